"""Whether there is what a policy names: operations, functions, backends, parameters.

It is asked of plain data, as a file holds it, and passes over what has no right form: that is another's error, and must not
hide the names beside it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fla.ops.backends import logs
from fla.ops.backends.conditions import Condition, ConditionError
from fla.ops.backends.config.text import Place
from fla.ops.backends.errors import DispatchError, error_text
from fla.ops.backends.policy import covers, normalise
from fla.utils.env import nearest

if TYPE_CHECKING:
    from fla.ops.backends.dispatcher import Dispatcher
    from fla.ops.backends.entry import Entry

Said = Iterator[tuple[Place, str]]


def problems(dispatcher: Dispatcher, data: Any) -> Said:
    """Every name that nobody knows, with its place. Imports the operations that are named."""
    for name in ('prefer', 'allow', 'deny'):
        yield from _backends(dispatcher, _words(field(data, name), (name,)), None)
    for name in ('order', 'lock'):
        for key, tokens in entries(field(data, name)):
            said = _operation(dispatcher, key)
            yield from (((name, key), text) for text in said)
            yield from _backends(dispatcher, _words(tokens, (name, key)), None if said else [key.strip()])
    for glob, amounts in entries(field(data, 'boost')):
        said = _glob(dispatcher, glob)
        yield from ((('boost', glob), text) for text in said)
        words = [(('boost', glob, token), token) for token, _ in entries(amounts)]
        yield from _backends(dispatcher, words, None if said else _operations(dispatcher, [glob]))
    for number, rule in rules_of(data):
        yield from _of_rule(dispatcher, ('rules', number), rule)


def _of_rule(dispatcher: Dispatcher, place: Place, rule: Mapping[str, Any]) -> Said:
    known, unknown = [], False
    for at, glob in _words(rule.get('ops'), (*place, 'ops')):
        said = _glob(dispatcher, glob)
        yield from ((at, text) for text in said)
        unknown = unknown or bool(said)
        if not said:
            known.append(glob)
    operations = None if unknown or not known else _operations(dispatcher, known)
    yield from _backends(dispatcher, _words(rule.get('use'), (*place, 'use')), operations)
    try:
        condition = condition_of(rule)
    except ConditionError:
        return
    if condition is not None:
        functions = [function for glob in known for function in _functions(dispatcher, glob)]
        yield from (((*place, 'when'), text) for text in _parameters(condition, functions))


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


def _words(value: Any, place: Place) -> list[tuple[Place, str]]:
    """The words of a list, or of one that stands alone."""
    listed = [(place, value)] if isinstance(value, str) else []
    if isinstance(value, list):
        listed = [((*place, i), word) for i, word in enumerate(value) if isinstance(word, str)]
    return [(at, word) for at, word in listed if word.strip()]


# -- what there is ----------------------------------------------------------------------------------------------------------


def _literal(glob: str) -> str | None:
    return None if set(glob) & set('*?[') else glob


def _operation(dispatcher: Dispatcher, name: str) -> list[str]:
    try:
        dispatcher.check_operation(name.strip())
    except DispatchError as error:
        return [str(error)]
    except Exception as error:
        return [f'{name!r} cannot be imported: {error_text(error)}']
    return []


def _backends(dispatcher: Dispatcher, words: Sequence[tuple[Place, str]], operations: Sequence[str] | None) -> Said:
    """Those that none of the operations has; None: that nobody has."""
    tokens = tuple(dict.fromkeys(normalise(word) for _, word in words))
    if not tokens:
        return
    asked: Sequence[str | None] = operations or [None]
    unknown = set(tokens)
    for name in asked:
        unknown &= set(dispatcher.unknown_tokens(tuple(unknown), name))
    known = {word for name in asked for word in dispatcher.words(name)} if unknown else set()
    owners = sorted({repr(dispatcher.operation_of(name)) for name in asked if name})
    where = f' of operation {" or ".join(owners)}' if owners else ''
    for place, word in words:
        token = normalise(word)
        if token in unknown:
            yield place, f'unknown backend {token!r}{where}.{nearest(token, known)}'


def _covered(dispatcher: Dispatcher, glob: str) -> list[str]:
    """The operations that a glob may have functions of."""
    head = glob.rpartition('.')[0]
    return [o for o in dispatcher.discovery.operations() if fnmatch.fnmatchcase(o, glob) or fnmatch.fnmatchcase(o, head)]


def _operations(dispatcher: Dispatcher, globs: Sequence[str]) -> list[str] | None:
    """The operations of what is covered; None: all of them."""
    found = []
    for glob in map(str.strip, globs):
        if glob == '*':
            return None
        name = _literal(glob)
        found += [dispatcher.operation_of(name)] if name is not None else _covered(dispatcher, glob)
    return list(dict.fromkeys(found)) or None


def _functions(dispatcher: Dispatcher, glob: str) -> list[Entry]:
    """The functions a glob covers, of operations that are imported for the question."""
    glob = glob.strip()
    for operation in _covered(dispatcher, glob):
        try:
            dispatcher.import_operation(operation)
        except Exception as error:
            logs.warn_once(('policy', operation), '%s cannot be imported: %s', operation, error_text(error))
    return [entry for entry in dispatcher.functions().values() if covers(glob, entry.operation, entry.name)]


def _glob(dispatcher: Dispatcher, glob: str) -> list[str]:
    glob = glob.strip()
    if _literal(glob) is not None:
        return _operation(dispatcher, glob)
    operations = dispatcher.discovery.operations()
    if any(fnmatch.fnmatchcase(operation, glob) for operation in operations) or _functions(dispatcher, glob):
        return []
    close = nearest(glob.partition('.')[0].strip('*'), operations)
    return [f'{glob!r} covers no operation and no function.{close} Known operations: {", ".join(operations)}']


def _parameters(condition: Condition, functions: Iterable[Entry]) -> list[str]:
    """A rule over several functions is for those that have its parameters; where there is none, what the closest lacks."""
    found = [[f'{entry.key}: {text}' for text in condition.problems(entry.signature)] for entry in functions]
    return min(found, key=len, default=[])
