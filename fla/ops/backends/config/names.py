"""Whether there is what a policy file names: operations, functions, backends, parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fla.ops.backends.errors import DispatchError
from fla.ops.backends.policy import Policy, Rule, covers
from fla.utils.env import nearest

if TYPE_CHECKING:
    from fla.ops.backends.dispatcher import Dispatcher
    from fla.ops.backends.entry import Entry


def problems(dispatcher: Dispatcher, policy: Policy, source: str) -> list[str]:
    """Every name of a policy that nobody knows, each as 'path:line: what'. Imports the operations that are named."""
    found: list[str] = []
    for field in ('prefer', 'allow', 'deny'):
        found += _tokens(dispatcher, getattr(policy, field) or (), None, policy.place(field, source))
    for field in ('order', 'lock'):
        for name, tokens in getattr(policy, field):
            place = policy.place(f'{field}.{name}', policy.place(field, source))
            unknown = _operation(dispatcher, name)
            found += [f'{place}: {text}' for text in unknown] or _tokens(dispatcher, tokens, name, place)
    for glob, amounts in policy.boost:
        place = policy.place(f'boost.{glob}', source)
        unknown = _glob(dispatcher, glob)
        tokens = tuple(token for token, _ in amounts)
        found += [f'{place}: {text}' for text in unknown] or _tokens(dispatcher, tokens, _literal(glob), place)
    return found + of_rules(dispatcher, policy, source)


def of_rules(dispatcher: Dispatcher, policy: Policy, source: str) -> list[str]:
    """The same of its rules alone."""
    found: list[str] = []
    for rule in policy.rules:
        place = rule.place or source
        unknown = [text for glob in rule.ops for text in _glob(dispatcher, glob)]
        found += [f'{place}: {text}' for text in unknown or _parameters(dispatcher, rule)]
        if not unknown:
            found += _tokens(dispatcher, rule.use, _literal(rule.ops[0]) if len(rule.ops) == 1 else None, place)
    return found


def _literal(glob: str) -> str | None:
    return None if set(glob) & set('*?[') else glob


def _operation(dispatcher: Dispatcher, name: str) -> list[str]:
    try:
        dispatcher.check_operation(name)
    except DispatchError as error:
        return [str(error)]
    return []


def _tokens(dispatcher: Dispatcher, tokens: Iterable[str], name: str | None, place: str) -> list[str]:
    where = f' of operation {dispatcher.operation_of(name)!r}' if name else ''
    words = dispatcher.words(name)
    return [
        f'{place}: unknown backend {token!r}{where}.{nearest(token, words)}'
        for token in dispatcher.unknown_tokens(tuple(tokens), name)
    ]


def _functions(dispatcher: Dispatcher, glob: str) -> list[Entry]:
    """The functions a glob covers, of operations that are imported for the question."""
    for operation in dispatcher.discovery.operations():
        if fnmatch.fnmatchcase(operation, glob) or fnmatch.fnmatchcase(operation, glob.rpartition('.')[0]):
            dispatcher.import_operation(operation)
    return [entry for entry in dispatcher.functions().values() if covers(glob, entry.operation, entry.name)]


def _glob(dispatcher: Dispatcher, glob: str) -> list[str]:
    name = _literal(glob)
    if name is not None:
        return _operation(dispatcher, name)
    operations = dispatcher.discovery.operations()
    if any(fnmatch.fnmatchcase(operation, glob) for operation in operations) or _functions(dispatcher, glob):
        return []
    close = nearest(glob.partition('.')[0].strip('*'), operations)
    return [f'{glob!r} covers no operation and no function.{close} Known operations: {", ".join(operations)}']


def _parameters(dispatcher: Dispatcher, rule: Rule) -> list[str]:
    """A rule over several functions is for those that have its parameters; there is to be one."""
    if rule.condition is None:
        return []
    entries = [entry for glob in rule.ops for entry in _functions(dispatcher, glob)]
    said = [f'{entry.key}: {rule.condition.problem(entry.signature)}' for entry in entries]
    return said[:1] if said and all(rule.condition.problem(entry.signature) for entry in entries) else []
