"""Checks the names in a policy: operations, functions, backends and parameters must exist.

Works on plain data, as a file has it, and skips what is malformed: the schema reports that, and it must not hide unknown
names elsewhere in the file.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fla.backends.core import logs
from fla.backends.core.errors import DispatchError, error_text
from fla.backends.policy.conditions import Condition, ConditionError
from fla.backends.policy.policy import covers, normalise
from fla.backends.policy_files.yaml_lines import Place
from fla.utils.env import nearest

if TYPE_CHECKING:
    from fla.backends.registry.catalogue import Catalogue
    from fla.backends.runtime.entry import Entry

Problems = Iterator[tuple[Place, str]]
Words = Sequence[tuple[Place, str]]


def problems(catalogue: Catalogue, data: Any) -> Problems:
    """Yields (place, message) for every unknown name. Imports the operations that are named."""
    lookup = _Lookup(catalogue)
    for name in ('prefer', 'allow', 'deny'):
        yield from lookup.unknown_backends(words(field(data, name), (name,)), None)
    for name in ('order', 'lock'):
        for key, tokens in entries(field(data, name)):
            wrong = lookup.operation(key.strip())
            yield from (((name, key), text) for text in wrong)
            yield from lookup.unknown_backends(words(tokens, (name, key)), None if wrong else (key.strip(),))
    for glob, amounts in entries(field(data, 'boost')):
        wrong = lookup.glob(glob.strip())
        yield from ((('boost', glob), text) for text in wrong)
        tokens = [(('boost', glob, token), token) for token, _ in entries(amounts)]
        yield from lookup.unknown_backends(tokens, None if wrong else lookup.operations((glob.strip(),)))
    for number, rule in rules_of(data):
        yield from _rule_problems(lookup, ('rules', number), rule)


def _rule_problems(lookup: _Lookup, place: Place, rule: Mapping[str, Any]) -> Problems:
    globs = [(at, glob.strip()) for at, glob in words(rule.get('ops'), (*place, 'ops'))]
    known = tuple(glob for _, glob in globs if not lookup.glob(glob))
    yield from ((at, text) for at, glob in globs for text in lookup.glob(glob))
    operations = lookup.operations(known) if known and len(known) == len(globs) else None
    yield from lookup.unknown_backends(words(rule.get('use'), (*place, 'use')), operations)
    try:
        condition = condition_of(rule)
    except ConditionError:
        return
    if condition is not None:
        yield from (((*place, 'when'), text) for text in lookup.parameters(condition, known))


# -- well-formed parts of the data ------------------------------------------------------------------------------------------


def field(data: Any, name: str) -> Any:
    """Returns a field of a mapping; None if `data` is not one."""
    return data.get(name) if isinstance(data, Mapping) else None


def entries(value: Any) -> Iterable[tuple[str, Any]]:
    """Returns the entries of a mapping; none if `value` is not one."""
    return [(key, it) for key, it in value.items() if key.strip()] if isinstance(value, Mapping) else []


def rules_of(data: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields the rules that are mappings, with their indices."""
    listed = field(data, 'rules')
    for number, rule in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(rule, Mapping):
            yield number, rule


def condition_of(rule: Mapping[str, Any]) -> Condition | None:
    """Returns the condition of a rule; None if it has none, or one that is not text.

    Raises:
        ConditionError: if the grammar does not allow it.
    """
    when = rule.get('when')
    return Condition(when) if isinstance(when, str) and when.strip() else None


def words(value: Any, place: Place) -> Words:
    """Returns the words of a list, or a single word, with their places."""
    listed = [(place, value)] if isinstance(value, str) else []
    if isinstance(value, list):
        listed = [((*place, i), word) for i, word in enumerate(value) if isinstance(word, str)]
    return [(at, word) for at, word in listed if word.strip()]


# -- lookups ----------------------------------------------------------------------------------------------------------------


def _literal(glob: str) -> str | None:
    return None if set(glob) & set('*?[') else glob


def _cached(method: Callable[..., Any]) -> Any:
    """Caches answers on the instance: a file repeats names, and an answer may need the disk."""

    @functools.wraps(method)
    def answer(self: _Lookup, *arguments: Any) -> Any:
        key = (method.__name__, *arguments)
        if key not in self.answers:
            self.answers[key] = method(self, *arguments)
        return self.answers[key]

    return answer


class _Lookup:
    """Looks names up in a namespace, for one policy."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.answers: dict[tuple[Any, ...], Any] = {}

    @_cached
    def operation(self, name: str) -> list[str]:
        """Returns the errors of the name of an operation or function; none if it exists."""
        try:
            self.catalogue.check_operation(name)
        except DispatchError as error:
            return [str(error)]
        except Exception as error:
            return [f'{name!r} cannot be imported: {error_text(error)}']
        return []

    @_cached
    def glob(self, glob: str) -> list[str]:
        """Returns the errors of a glob; none if it matches something."""
        if _literal(glob) is not None:
            return list(self.operation(glob))
        known = self.known()
        if any(fnmatch.fnmatchcase(operation, glob) for operation in known) or self.functions(glob):
            return []
        close = nearest(glob.partition('.')[0].strip('*'), known)
        return [f'{glob!r} matches no operation and no function.{close} Known operations: {", ".join(known)}']

    @_cached
    def known(self) -> list[str]:
        """Returns every operation."""
        return self.catalogue.discovery.operations()

    @_cached
    def covered(self, glob: str) -> list[str]:
        """Returns the operations whose functions a glob may match."""
        head = glob.rpartition('.')[0]
        return [o for o in self.known() if fnmatch.fnmatchcase(o, glob) or fnmatch.fnmatchcase(o, head)]

    @_cached
    def operations(self, globs: tuple[str, ...]) -> tuple[str, ...] | None:
        """Returns the operations that globs match; None for all."""
        found: list[str] = []
        for glob in globs:
            if glob == '*':
                return None
            name = _literal(glob)
            found += [self.catalogue.operation_of(name)] if name is not None else self.covered(glob)
        return tuple(dict.fromkeys(found)) or None

    @_cached
    def functions(self, glob: str) -> list[Entry]:
        """Returns the functions that a glob matches, after importing their operations."""
        for operation in self.covered(glob):
            try:
                self.catalogue.import_operation(operation)
            except Exception as error:
                logs.warn_once(('policy', operation), '%s cannot be imported: %s', operation, error_text(error))
        return [entry for entry in self.catalogue.functions().values() if covers(glob, entry.operation, entry.name)]

    @_cached
    def parameters(self, condition: Condition, globs: tuple[str, ...]) -> list[str]:
        """Returns the errors of a condition. A rule applies to those functions that have its parameters, so these are none
        if one function has them all, else those of the closest function."""
        functions = [entry for glob in globs for entry in self.functions(glob)]
        found = [[f'{entry.key}: {text}' for text in condition.problems(entry.signature)] for entry in functions]
        return min(found, key=len, default=[])

    @_cached
    def unknown_backend(self, token: str, operations: tuple[str, ...] | None) -> str:
        """Returns an error if none of the operations (None: of all) has a backend that the token names, else ''."""
        asked: Sequence[str | None] = operations or [None]
        if not all(self.catalogue.unknown_tokens((token,), name) for name in asked):
            return ''
        known = {word for name in asked for word in self.catalogue.words(name)}
        owners = sorted({repr(self.catalogue.operation_of(name)) for name in asked if name})
        where = f' of operation {" or ".join(owners)}' if owners else ''
        return f'unknown backend {token!r}{where}.{nearest(token, known)}'

    def unknown_backends(self, words: Words, operations: tuple[str, ...] | None) -> Problems:
        """Yields the words that name no backend of these operations; None: of any."""
        for place, word in words:
            text = self.unknown_backend(normalise(word), operations)
            if text:
                yield place, text
