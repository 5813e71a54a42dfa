"""Reads a policy file: a `Policy` with the line of each statement, or the list of all errors."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fla.backends.core.errors import DispatchError
from fla.backends.policy.policy import Policy, Rule, normalise
from fla.backends.policy.version import PolicyVersion
from fla.backends.policy_files import names, yaml_lines
from fla.backends.policy_files.extra import require_extra
from fla.backends.policy_files.names import problems as unknown_names
from fla.backends.policy_files.versions import checked_path, read_regular
from fla.backends.policy_files.yaml_lines import UNREAD, Errors, Reading
from fla.backends.registry.catalogue import Catalogue
from fla.backends.runtime.dispatcher import Dispatcher, LiveFunction, owner_of

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

    def unknown(self, catalogue: Catalogue[LiveFunction]) -> Errors:
        """Returns the unknown operations, functions, backends and parameters, also beside mistakes of form."""
        return {
            (reading.line(place), message)
            for reading in self.readings
            for place, message in unknown_names(catalogue, reading.data)
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


def read_version(path: str | os.PathLike[str], dispatcher: Dispatcher) -> PolicyVersion:
    """Read a policy file, once, and check it. Changes nothing.

    Raises:
        PolicyFileError: lists every error with its line.
        OSError: if the file cannot be read.
    """
    draft = read(path)
    return draft.version(draft.unknown(dispatcher.catalogue))


def read_policy(path: str | os.PathLike[str], dispatcher: Dispatcher | None = None) -> Policy:
    """The policy in a file, checked; changes nothing. Errors as for `read_version`."""
    return read_version(path, owner_of(dispatcher)).policy


def unload_policy(dispatcher: Dispatcher | None = None) -> None:
    """Remove the policy file's layer."""
    owner_of(dispatcher).policies.unload_file()


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
    """Returns the policy of a reading, or None after adding its mistakes to `errors`."""
    from pydantic import ValidationError

    from fla.backends.policy_files.schema import MODELS, PolicyModel
    from fla.backends.policy_files.validation import message

    found = _ordered_and_locked(reading) | _boosted_twice(reading)
    try:
        fields = PolicyModel.model_validate(reading.data).model_dump(exclude_unset=True)
    except ValidationError as error:
        for one in error.errors():
            if not one['loc']:  # a truncated file must not read as a policy that allows everything
                empty = reading.data is None
                found.add(
                    (1, f'the file is {"empty" if empty else "not a mapping of keys"}; {{}} is the policy without settings')
                )
            elif one['input'] is not UNREAD:
                found.add((reading.line(one['loc']), message(one, MODELS)))
    errors |= found
    if errors:
        return None
    rules = tuple(
        Rule(**rule, place=f'{source}:{reading.line(("rules", n))}') for n, rule in enumerate(fields.pop('rules', ()))
    )
    places = {'.'.join(map(str, place)): line for place, line in reading.lines.items() if 0 < len(place) <= 2}
    return Policy(**fields, rules=rules, places=tuple((key, f'{source}:{line}') for key, line in places.items()))


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
