"""Whether there is what a policy names: operations, functions, backends, parameters.

It is asked of plain data, as a file holds it, and passes over what has no right form: that is another's error, and must not
hide the names beside it.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fla.backends.core import logs
from fla.backends.core.errors import DispatchError, error_text
from fla.backends.policy.conditions import Condition, ConditionError
from fla.backends.policy.policy import covers, normalise
from fla.backends.policy_files.text import Place
from fla.backends.registry.catalogue import Catalogue
from fla.backends.runtime.dispatcher import LiveFunction
from fla.utils.env import nearest

Said = Iterator[tuple[Place, str]]
Words = Sequence[tuple[Place, str]]


def problems(dispatcher: Catalogue[LiveFunction], data: Any) -> Said:
    """Every name that nobody knows, with its place. Imports the operations that are named."""
    there = _There(dispatcher)
    for name in ('prefer', 'allow', 'deny'):
        yield from there.lacks(words(field(data, name), (name,)), None)
    for name in ('order', 'lock'):
        for key, tokens in entries(field(data, name)):
            said = there.operation(key.strip())
            yield from (((name, key), text) for text in said)
            yield from there.lacks(words(tokens, (name, key)), None if said else (key.strip(),))
    for glob, amounts in entries(field(data, 'boost')):
        said = there.glob(glob.strip())
        yield from ((('boost', glob), text) for text in said)
        tokens = [(('boost', glob, token), token) for token, _ in entries(amounts)]
        yield from there.lacks(tokens, None if said else there.operations((glob.strip(),)))
    for number, rule in rules_of(data):
        yield from _of_rule(there, ('rules', number), rule)


def _of_rule(there: _There, place: Place, rule: Mapping[str, Any]) -> Said:
    known, unknown = [], False
    for at, glob in words(rule.get('ops'), (*place, 'ops')):
        said = there.glob(glob.strip())
        yield from ((at, text) for text in said)
        unknown = unknown or bool(said)
        if not said:
            known.append(glob.strip())
    operations = None if unknown or not known else there.operations(tuple(known))
    yield from there.lacks(words(rule.get('use'), (*place, 'use')), operations)
    try:
        condition = condition_of(rule)
    except ConditionError:
        return
    if condition is not None:
        yield from (((*place, 'when'), text) for text in there.parameters(condition, tuple(known)))


# -- what has the right form ------------------------------------------------------------------------------------------------


def field(data: Any, name: str) -> Any:
    """A field of what may be no mapping."""
    return data.get(name) if isinstance(data, Mapping) else None


def entries(value: Any) -> Iterable[tuple[str, Any]]:
    """The entries of what may be no mapping."""
    return [(key, it) for key, it in value.items() if key.strip()] if isinstance(value, Mapping) else []


def rules_of(data: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rules that are mappings, with their places in the list."""
    listed = field(data, 'rules')
    for number, rule in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(rule, Mapping):
            yield number, rule


def condition_of(rule: Mapping[str, Any]) -> Condition | None:
    """The condition of a rule, None if it has none, or something that is no text.

    Raises:
        ConditionError: if it is not in the grammar.
    """
    when = rule.get('when')
    return Condition(when) if isinstance(when, str) and when.strip() else None


def words(value: Any, place: Place) -> Words:
    """The words of a list, or of one that stands alone."""
    listed = [(place, value)] if isinstance(value, str) else []
    if isinstance(value, list):
        listed = [((*place, i), word) for i, word in enumerate(value) if isinstance(word, str)]
    return [(at, word) for at, word in listed if word.strip()]


# -- what there is ----------------------------------------------------------------------------------------------------------


def _literal(glob: str) -> str | None:
    return None if set(glob) & set('*?[') else glob


def _once(method: Callable[..., Any]) -> Any:
    """Asks once for each set of arguments: a file names the same things again and again, and each answer may mean looking
    at the disk."""

    @functools.wraps(method)
    def ask(self: _There, *arguments: Any) -> Any:
        key = (method.__name__, *arguments)
        if key not in self.answers:
            self.answers[key] = method(self, *arguments)
        return self.answers[key]

    return ask


class _There:
    """What a namespace has, for the names of one policy."""

    def __init__(self, dispatcher: Catalogue[LiveFunction]) -> None:
        self.dispatcher = dispatcher
        self.answers: dict[tuple[Any, ...], Any] = {}

    @_once
    def operation(self, name: str) -> list[str]:
        """What is wrong with the name of an operation or function; empty if there is one."""
        try:
            self.dispatcher.check_operation(name)
        except DispatchError as error:
            return [str(error)]
        except Exception as error:
            return [f'{name!r} cannot be imported: {error_text(error)}']
        return []

    @_once
    def glob(self, glob: str) -> list[str]:
        """What is wrong with a glob; empty if it covers something."""
        if _literal(glob) is not None:
            return list(self.operation(glob))
        known = self.known()
        if any(fnmatch.fnmatchcase(operation, glob) for operation in known) or self.functions(glob):
            return []
        close = nearest(glob.partition('.')[0].strip('*'), known)
        return [f'{glob!r} covers no operation and no function.{close} Known operations: {", ".join(known)}']

    @_once
    def known(self) -> list[str]:
        """Every operation."""
        return self.dispatcher.discovery.operations()

    @_once
    def covered(self, glob: str) -> list[str]:
        """The operations that a glob may have functions of."""
        head = glob.rpartition('.')[0]
        return [o for o in self.known() if fnmatch.fnmatchcase(o, glob) or fnmatch.fnmatchcase(o, head)]

    @_once
    def operations(self, globs: tuple[str, ...]) -> tuple[str, ...] | None:
        """The operations of what is covered; None: all of them."""
        found: list[str] = []
        for glob in globs:
            if glob == '*':
                return None
            name = _literal(glob)
            found += [self.dispatcher.operation_of(name)] if name is not None else self.covered(glob)
        return tuple(dict.fromkeys(found)) or None

    @_once
    def functions(self, glob: str) -> list[LiveFunction]:
        """The functions a glob covers, of operations that are imported for the question."""
        for operation in self.covered(glob):
            try:
                self.dispatcher.import_operation(operation)
            except Exception as error:
                logs.warn_once(('policy', operation), '%s cannot be imported: %s', operation, error_text(error))
        return [
            entry for entry in self.dispatcher.functions().values() if covers(glob, entry.spec.operation, entry.spec.name)
        ]

    @_once
    def parameters(self, condition: Condition, globs: tuple[str, ...]) -> list[str]:
        """A rule over several functions is for those that have its parameters; where none has, what the closest lacks."""
        functions = [entry for glob in globs for entry in self.functions(glob)]
        found = [[f'{entry.spec.key}: {text}' for text in condition.problems(entry.spec.signature)] for entry in functions]
        return min(found, key=len, default=[])

    @_once
    def unknown(self, token: str, operations: tuple[str, ...] | None) -> str:
        """What is to be said of a token that none of the operations has (None: that nobody has), empty if one has it."""
        asked: Sequence[str | None] = operations or [None]
        if not all(self.dispatcher.unknown_tokens((token,), name) for name in asked):
            return ''
        known = {word for name in asked for word in self.dispatcher.words(name)}
        owners = sorted({repr(self.dispatcher.operation_of(name)) for name in asked if name})
        where = f' of operation {" or ".join(owners)}' if owners else ''
        return f'unknown backend {token!r}{where}.{nearest(token, known)}'

    def lacks(self, words: Words, operations: tuple[str, ...] | None) -> Said:
        """The words that name no backend of these operations; None: of any."""
        for place, word in words:
            said = self.unknown(normalise(word), operations)
            if said:
                yield place, said
