"""From the bytes of a policy file to a `Policy` that knows the line of each sentence, or to all that is wrong with it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fla.backends.core.errors import DispatchError
from fla.backends.policy.conditions import ConditionError
from fla.backends.policy.policy import Policy, Rule, normalise
from fla.backends.policy.version import PolicyVersion
from fla.backends.policy_files import names, text
from fla.backends.policy_files.names import problems as unknown_names
from fla.backends.policy_files.text import UNREAD, Errors, Reading
from fla.backends.policy_files.versions import checked_path, read_regular
from fla.backends.registry.catalogue import Catalogue
from fla.backends.runtime.dispatcher import Dispatcher, LiveFunction

_MOST_SHOWN = 50
# Thousands of rules. What is larger is most likely another file, which would be read for minutes.
_MOST_BYTES = 1 << 20


class PolicyFileError(DispatchError, ValueError):
    """A policy file that cannot be put in force. `errors` lists all that is wrong with it, each as 'path:line: what'."""

    def __init__(self, path: str, errors: Iterable[str]) -> None:
        self.path, self.errors = path, tuple(errors)
        more = len(self.errors) - _MOST_SHOWN
        shown = [*self.errors[:_MOST_SHOWN], *([f'... and {more} more, in .errors'] if more > 0 else [])]
        super().__init__('\n'.join([f'{path} is not in force:', *(f'  {error}' for error in shown)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.errors)


@dataclass(frozen=True)
class Draft:
    """A policy file as it was read.

    Attributes:
        source: the file.
        sha256: of its bytes.
        time: when it was read.
        readings: what it says.
        errors: what is wrong with its form, as (line, what).
        policy: what it becomes, None if there are errors.
    """

    source: str
    sha256: str
    time: float
    readings: tuple[Reading, ...]
    errors: Errors
    policy: Policy | None

    def unknown(self, catalogue: Catalogue[LiveFunction]) -> Errors:
        """Its operations, functions, backends and parameters that nobody knows, also where its form is wrong elsewhere."""
        return {
            (reading.line(place), said)
            for reading in self.readings
            for place, said in unknown_names(catalogue, reading.data)
        }

    def at(self, errors: Errors) -> list[str]:
        """Errors as 'path:line: what', in the order of their lines."""
        return [f'{self.source}:{line}: {said}' for line, said in sorted(errors)]

    def version(self, unknown: Errors | None = None) -> PolicyVersion:
        """What can be put in force.

        Raises:
            PolicyFileError: for the errors of its form and for those given.
        """
        errors = self.errors | (unknown or set())
        if errors or self.policy is None:
            raise PolicyFileError(self.source, self.at(errors))
        return PolicyVersion(0, self.sha256, self.source, self.time, self.policy)


def read(path: str | os.PathLike[str]) -> Draft:
    """Read a policy file; names of operations, backends and parameters are not looked up.

    Raises:
        OSError: if the file cannot be read.
        ImportError: without pydantic and pyyaml.
    """
    text.needed()
    source = checked_path(path)
    content = read_regular(source)
    errors: Errors = set()
    if len(content) > _MOST_BYTES:
        errors.add((1, f'the file has {len(content)} bytes; a policy file has {_MOST_BYTES} at most'))
    readings = tuple(text.read(content, errors)) if not errors else ()
    policies = [_policy(source, reading, errors) for reading in readings]
    policy = None if errors or not policies else policies[0]
    return Draft(source, hashlib.sha256(content).hexdigest(), time.time(), readings, errors, policy)


def read_version(path: str | os.PathLike[str], dispatcher: Dispatcher) -> PolicyVersion:
    """Read a policy file, once, and check it. Changes nothing.

    Raises:
        PolicyFileError: lists every error with its line.
        OSError: if the file cannot be read.
    """
    draft = read(path)
    return draft.version(draft.unknown(dispatcher.catalogue))


def load_policy(path: str | os.PathLike[str], dispatcher: Dispatcher) -> PolicyVersion:
    """Put a policy file in force as the file layer, in place of the former one. Errors change nothing.

    Raises:
        PolicyFileError: lists every error with its line.
        OSError: if the file cannot be read.
        FrozenError: while dispatch is frozen.
    """
    dispatcher.policies.refuse_if_frozen('load a policy file')
    return dispatcher.policies.set_file(read_version(path, dispatcher))


def _policy(source: str, reading: Reading, errors: Errors) -> Policy | None:
    """The policy of a reading whose form is right."""
    from pydantic import ValidationError

    from fla.backends.policy_files.schema import PolicyModel, message

    before = len(errors)
    fields: dict[str, Any] = {}
    try:
        model = PolicyModel.model_validate(reading.data)
        fields = {k: v for k, v in model.model_dump(exclude={'rules'}).items() if v is not None}
    except ValidationError as error:
        said = [one for one in error.errors() if one['loc'] and one['input'] is not UNREAD]
        errors |= {(reading.line(one['loc']), message(one)) for one in said}
    rules = _rules(source, reading, errors)
    errors |= _boosted_twice(reading) | _ordered_twice(reading) | _nothing_said(reading)
    if len(errors) > before:
        return None
    places = {'.'.join(map(str, place)): line for place, line in reading.lines.items() if 0 < len(place) <= 2}
    return Policy(**fields, rules=rules, places=tuple((key, f'{source}:{line}') for key, line in places.items()))


def _nothing_said(reading: Reading) -> Errors:
    """A file that was truncated, or a key whose values are commented out, must not be taken for what allows everything."""
    if reading.data is None:
        return {(1, 'the file says nothing; a policy that says nothing is written {}')}
    if not isinstance(reading.data, dict) and reading.data is not UNREAD:
        return {(1, 'the file is no mapping of keys')}
    said = names.entries(reading.data)
    return {(reading.line((key,)), f'{key} has no value; leave it out') for key, value in said if value is None}


def _rules(source: str, reading: Reading, errors: Errors) -> tuple[Rule, ...]:
    """The rules whose form is right; a condition that is none is one more error."""
    found = []
    for number, rule in names.rules_of(reading.data):
        place = f'{source}:{reading.line(("rules", number))}'
        ops, use, when = rule.get('ops', ()), rule.get('use', ()), rule.get('when')
        try:
            names.condition_of(rule)
        except ConditionError as error:
            errors.add((reading.line(('rules', number, 'when')), f'rules.{number}.when: {error}'))
            continue
        try:
            found.append(Rule(ops, use, when, rule.get('priority', 0), place))
        except (TypeError, ConditionError):
            continue  # the schema has said so
    return tuple(found)


def _ordered_twice(reading: Reading) -> Errors:
    """Names that stand under `order` and under `lock`, of which only the lock would count."""
    ordered = {key.strip() for key, _ in names.entries(names.field(reading.data, 'order'))}
    locked = [key for key, _ in names.entries(names.field(reading.data, 'lock'))]
    return {
        (reading.line(('lock', key)), f'lock.{key}: order has {key.strip()!r}, too; a lock is an order, so leave one out')
        for key in locked
        if key.strip() in ordered
    }


def _boosted_twice(reading: Reading) -> Errors:
    """Backends that one entry of `boost` names twice: 'triton' and 'default' are one."""
    found: Errors = set()
    for glob, amounts in names.entries(names.field(reading.data, 'boost')):
        seen: dict[str, Any] = {}
        for token, _ in names.entries(amounts):
            first = seen.setdefault(normalise(token), token)
            if first != token:
                line = reading.line(('boost', glob, token))
                found.add((line, f'boost.{glob} names a backend twice: {first} and {token}'))
    return found
