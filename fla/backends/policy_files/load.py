"""Reads a policy file: a `Policy` with the line of each statement, or the list of all errors."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fla.backends.core.errors import DispatchError
from fla.backends.policy.conditions import ConditionError
from fla.backends.policy.policy import Policy, Rule, normalise
from fla.backends.policy_files import names, yaml_lines
from fla.backends.policy_files.extra import require_extra
from fla.backends.policy_files.versions import PolicyVersion, checked_path, read_regular
from fla.backends.policy_files.yaml_lines import UNREAD, Errors, Reading

if TYPE_CHECKING:
    from fla.backends.registry.catalogue import Catalogue


_MAX_ERRORS_SHOWN = 50
# Room for thousands of rules. A larger file is most likely not a policy, and reading it would take minutes.
_MAX_BYTES = 1 << 20


class PolicyFileError(DispatchError, ValueError):
    """A policy file that cannot be used. `errors` lists every mistake as 'path:line: message'."""

    def __init__(self, path: str, errors: Iterable[str]) -> None:
        self.path, self.errors = path, tuple(errors)
        more = len(self.errors) - _MAX_ERRORS_SHOWN
        shown = [*self.errors[:_MAX_ERRORS_SHOWN], *([f'... and {more} more, in .errors'] if more > 0 else [])]
        super().__init__('\n'.join([f'{path} is not in force:', *(f'  {error}' for error in shown)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.errors)


@dataclass(frozen=True)
class Draft:
    """A policy file that was read; its names are not checked yet.

    Attributes:
        source: the file's path.
        sha256: hash of its bytes.
        time: when it was read, in seconds since the epoch.
        readings: its data.
        errors: mistakes of form, as (line, message).
        policy: the policy that it states, None if there are errors.
    """

    source: str
    sha256: str
    time: float
    readings: tuple[Reading, ...]
    errors: Errors
    policy: Policy | None

    def unknown(self, catalogue: Catalogue) -> Errors:
        """Returns the unknown operations, functions, backends and parameters, also beside mistakes of form."""
        return {
            (reading.line(place), message)
            for reading in self.readings
            for place, message in names.problems(catalogue, reading.data)
        }

    def at(self, errors: Errors) -> list[str]:
        """Returns errors as 'path:line: message', ordered by line."""
        return [f'{self.source}:{line}: {message}' for line, message in sorted(errors)]

    def version(self, unknown: Errors | None = None) -> PolicyVersion:
        """Returns the policy as a version that can be put in force.

        Raises:
            PolicyFileError: for mistakes of form, and for the errors given as `unknown`.
        """
        errors = self.errors | (unknown or set())
        if errors or self.policy is None:
            raise PolicyFileError(self.source, self.at(errors))
        return PolicyVersion(0, self.sha256, self.source, self.time, self.policy)


def read(path: str | os.PathLike[str]) -> Draft:
    """Reads a policy file without checking names of operations, backends and parameters.

    Raises:
        OSError: if the file cannot be read.
        ImportError: without pydantic and ruamel.yaml.
    """
    require_extra('a policy file', 'pydantic', 'ruamel.yaml')
    source = checked_path(path)
    content = read_regular(source)
    errors: Errors = set()
    if len(content) > _MAX_BYTES:
        errors.add((1, f'the file has {len(content)} bytes; a policy file has {_MAX_BYTES} at most'))
    readings = tuple(yaml_lines.read(content, errors)) if not errors else ()
    policies = [_policy(source, reading, errors) for reading in readings]
    policy = None if errors or not policies else policies[0]
    return Draft(source, hashlib.sha256(content).hexdigest(), time.time(), readings, errors, policy)


def _policy(source: str, reading: Reading, errors: Errors) -> Policy | None:
    """Returns the policy of a reading, or None after adding its mistakes to `errors`."""
    from pydantic import ValidationError

    from fla.backends.policy_files.schema import MODELS, PolicyModel
    from fla.backends.policy_files.validation import message

    before = len(errors)
    fields: dict[str, Any] = {}
    try:
        model = PolicyModel.model_validate(reading.data)
        fields = {k: v for k, v in model.model_dump(exclude={'rules'}).items() if v is not None}
    except ValidationError as error:
        found = [one for one in error.errors() if one['loc'] and one['input'] is not UNREAD]
        errors |= {(reading.line(one['loc']), message(one, MODELS)) for one in found}
    rules = _rules(source, reading, errors)
    errors |= _boosted_twice(reading) | _ordered_and_locked(reading) | _empty(reading)
    if len(errors) > before:
        return None
    places = {'.'.join(map(str, place)): line for place, line in reading.lines.items() if 0 < len(place) <= 2}
    return Policy(**fields, rules=rules, places=tuple((key, f'{source}:{line}') for key, line in places.items()))


def _empty(reading: Reading) -> Errors:
    """A truncated file, or a key whose values are commented out, must not read as a policy that allows everything."""
    if reading.data is None:
        return {(1, 'the file is empty; a policy without settings is written {}')}
    if not isinstance(reading.data, dict) and reading.data is not UNREAD:
        return {(1, 'the file must be a mapping of keys')}
    return {
        (reading.line((key,)), f'{key} has no value; leave it out')
        for key, value in names.entries(reading.data)
        if value is None
    }


def _rules(source: str, reading: Reading, errors: Errors) -> tuple[Rule, ...]:
    """Returns the well-formed rules; adds the errors of conditions to `errors`. The schema reports all others."""
    found = []
    for number, rule in names.rules_of(reading.data):
        place = f'{source}:{reading.line(("rules", number))}'
        try:
            names.condition_of(rule)
        except ConditionError as error:
            errors.add((reading.line(('rules', number, 'when')), f'rules.{number}.when: {error}'))
            continue
        try:
            found.append(Rule(rule.get('ops', ()), rule.get('use', ()), rule.get('when'), rule.get('priority', 0), place))
        except (TypeError, ConditionError):
            continue
    return tuple(found)


def _ordered_and_locked(reading: Reading) -> Errors:
    """Names under both `order` and `lock`, where only the lock would count."""
    ordered = {key.strip() for key, _ in names.entries(names.field(reading.data, 'order'))}
    return {
        (reading.line(('lock', key)), f'lock.{key}: order has {key.strip()!r}, too; a lock is an order, so leave one out')
        for key, _ in names.entries(names.field(reading.data, 'lock'))
        if key.strip() in ordered
    }


def _boosted_twice(reading: Reading) -> Errors:
    """Backends that one entry of `boost` names twice; 'triton' and 'default' are the same."""
    found: Errors = set()
    for glob, amounts in names.entries(names.field(reading.data, 'boost')):
        seen: dict[str, Any] = {}
        for token, _ in names.entries(amounts):
            first = seen.setdefault(normalise(token), token)
            if first != token:
                line = reading.line(('boost', glob, token))
                found.add((line, f'boost.{glob} names a backend twice: {first} and {token}'))
    return found
