"""Checks the names in a policy: operations, functions, backends and parameters must exist.

Works on plain data, as a file has it, and skips what is malformed: the schema reports that, and it must not hide unknown
names elsewhere in the file.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fla.backends.core import logs
from fla.backends.core.errors import DispatchError, error_text
from fla.backends.policy.conditions import Condition, ConditionError
from fla.backends.policy.policy import covers, normalise
from fla.backends.policy_files.yaml_lines import Place
from fla.backends.registry.catalogue import Catalogue
from fla.backends.runtime.dispatcher import LiveFunction
from fla.utils.env import nearest

Problems = Iterator[tuple[Place, str]]
Words = Sequence[tuple[Place, str]]
# The operations that a name or glob covers (None: all), and what is wrong with it ('': nothing).
Match = tuple[tuple[str, ...] | None, str]


def problems(catalogue: Catalogue[LiveFunction], data: Any) -> Problems:
    """Yields (place, message) for every unknown name. Imports the operations that are named."""
    lookup = _Lookup(catalogue)
    for name in ('prefer', 'allow', 'deny'):
        yield from lookup.unknown_backends(words(field(data, name), (name,)), None)
    for name in ('order', 'lock'):
        for key, tokens in entries(field(data, name)):
            operations, wrong = lookup.named(key.strip())
            if wrong:
                yield (name, key), wrong
            yield from lookup.unknown_backends(words(tokens, (name, key)), operations)
    for glob, amounts in entries(field(data, 'boost')):
        operations, wrong = lookup.matching(glob.strip())
        if wrong:
            yield ('boost', glob), wrong
        tokens = [(('boost', glob, token), token) for token, _ in entries(amounts)]
        yield from lookup.unknown_backends(tokens, operations)
    rules = field(data, 'rules')
    for number, rule in enumerate(rules if isinstance(rules, list) else ()):
        if isinstance(rule, Mapping):
            yield from _rule_problems(lookup, ('rules', number), rule)


def _rule_problems(lookup: _Lookup, place: Place, rule: Mapping[str, Any]) -> Problems:
    known: list[str] = []
    covered: list[str] = []
    is_for_all = False
    for at, glob in words(rule.get('ops'), (*place, 'ops')):
        operations, wrong = lookup.matching(glob.strip())
        if wrong:
            yield at, wrong
        else:
            known.append(glob.strip())
        covered += operations or ()
        is_for_all = is_for_all or operations is None
    used = words(rule.get('use'), (*place, 'use'))
    yield from lookup.unknown_backends(used, None if is_for_all else tuple(dict.fromkeys(covered)) or None)
    when = rule.get('when')
    try:
        condition = Condition(when) if isinstance(when, str) and when.strip() else None
    except ConditionError:
        return
    if condition is not None:
        yield from (((*place, 'when'), text) for text in lookup.wrong_parameters(condition, known))


# -- well-formed parts of the data ------------------------------------------------------------------------------------------


def field(data: Any, name: str) -> Any:
    """Returns a field of a mapping; None if `data` is not one."""
    return data.get(name) if isinstance(data, Mapping) else None


def entries(value: Any) -> Iterable[tuple[str, Any]]:
    """Returns the entries of a mapping; none if `value` is not one."""
    return [(key, it) for key, it in value.items() if key.strip()] if isinstance(value, Mapping) else []


def words(value: Any, place: Place) -> Words:
    """Returns the words of a list, or a single word, with their places."""
    listed = [(place, value)] if isinstance(value, str) else []
    if isinstance(value, list):
        listed = [((*place, i), word) for i, word in enumerate(value) if isinstance(word, str)]
    return [(at, word) for at, word in listed if word.strip()]


# -- lookups ----------------------------------------------------------------------------------------------------------------


class _Lookup:
    """Looks names up in a namespace, for one policy."""

    def __init__(self, catalogue: Catalogue[LiveFunction]) -> None:
        self.catalogue = catalogue
        # a policy repeats names, and an answer may need the disk
        self.named = functools.cache(self._named)
        self.matching = functools.cache(self._matching)
        self.functions = functools.cache(self._functions)
        self.unknown_backend = functools.cache(self._unknown_backend)

    def _named(self, name: str) -> Match:
        """Looks up the name of an operation or function."""
        try:
            self.catalogue.check_operation(name)
        except DispatchError as error:
            return None, str(error)
        except Exception as error:
            return None, f'{name!r} cannot be imported: {error_text(error)}'
        return (self.catalogue.operation_of(name),), ''

    def _matching(self, glob: str) -> Match:
        """Looks up a glob over operations and functions."""
        if not set(glob) & set('*?['):
            return self.named(glob)
        known = self.catalogue.discovery.operations()
        covered = self._covered(glob)
        if any(fnmatch.fnmatchcase(operation, glob) for operation in covered) or self.functions(glob):
            return None if glob == '*' else tuple(covered), ''
        close = nearest(glob.partition('.')[0].strip('*'), known)
        return None, f'{glob!r} matches no operation and no function.{close} Known operations: {", ".join(known)}'

    def _covered(self, glob: str) -> list[str]:
        """Returns the operations whose functions a glob may match."""
        head = glob.rpartition('.')[0]
        known = self.catalogue.discovery.operations()
        return [name for name in known if fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(name, head)]

    def _functions(self, glob: str) -> list[LiveFunction]:
        """Returns the functions that a glob matches, after importing their operations."""
        for operation in self._covered(glob):
            try:
                self.catalogue.import_operation(operation)
            except Exception as error:
                logs.warn_once(('policy', operation), '%s cannot be imported: %s', operation, error_text(error))
        return [
            entry for entry in self.catalogue.functions().values() if covers(glob, entry.spec.operation, entry.spec.name)
        ]

    def wrong_parameters(self, condition: Condition, globs: Iterable[str]) -> list[str]:
        """Returns the errors of a condition. A rule applies to those functions that have its parameters, so these are none
        if one function has them all, else those of the closest function."""
        functions = [entry for glob in globs for entry in self.functions(glob)]
        found = [[f'{entry.spec.key}: {text}' for text in condition.problems(entry.spec.signature)] for entry in functions]
        return min(found, key=len, default=[])

    def _unknown_backend(self, token: str, operations: tuple[str, ...] | None) -> str:
        """Returns an error if none of the operations (None: of all) has a backend that the token names, else ''."""
        asked: Sequence[str | None] = operations or [None]
        if not all(self.catalogue.unknown_tokens((token,), name) for name in asked):
            return ''
        known = {word for name in asked for word in self.catalogue.words(name)}
        where = f' of operation {" or ".join(map(repr, sorted(operations)))}' if operations else ''
        return f'unknown backend {token!r}{where}.{nearest(token, known)}'

    def unknown_backends(self, words: Words, operations: tuple[str, ...] | None) -> Problems:
        """Yields the words that name no backend of these operations; None: of any."""
        for place, word in words:
            text = self.unknown_backend(normalise(word), operations)
            if text:
                yield place, text
