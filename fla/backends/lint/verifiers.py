"""Rules for verifiers, `…_prefers` methods and checks, which run on every call and inside traces.

Covers functions named `…_verifier` or `…_prefers`, those passed as `default_verifier=` and `check=`, and helpers of the same
file that these call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from fla.backends.backend.untraceable import COMPILED
from fla.backends.lint.findings import Finding
from fla.backends.lint.source import VERIFIER_SUFFIXES, Function, Project, Source, class_value

# Methods of a tensor, and functions of torch, whose result depends on values.
_VALUES = {
    *('item', 'tolist', 'numpy', 'cpu', 'any', 'all', 'min', 'max', 'sum', 'amin', 'amax'),
    *('equal', 'allclose', 'is_nonzero', 'nonzero', 'unique'),
}
_SIZES = {'shape', 'size', 'numel', 'stride', 'nbytes'}
_MUTATORS = {'add', 'append', 'clear', 'discard', 'extend', 'insert', 'pop', 'popitem', 'remove', 'setdefault', 'update'}
_RUNTIMES = ('torch.cuda.', 'torch.xpu.', 'torch.npu.', 'torch.mps.', 'torch.accelerator.')


@dataclass(frozen=True)
class Body:
    """A function that runs as part of a verifier or check.

    Attributes:
        name: its name in messages.
        role: 'verifier', 'check', or 'helper' (called by a verifier).
        traced: False if the backend says traceable = False, so that compiled code never asks it.
        cls: the class it is a method of.
    """

    source: Source
    node: Function
    name: str
    role: str
    traced: bool = True
    cls: ast.ClassDef | None = None


def check(project: Project) -> Iterator[Finding]:
    """Yields every finding about verifiers and checks."""
    for body in _bodies(project):
        for rule, node, problem, remedy in _problems(body):
            yield body.source.finding(rule, node, f'{body.name} {problem}', remedy)


# -- which functions -------------------------------------------------------------------------------------------------------


def _bodies(project: Project) -> Iterator[Body]:
    """Yields each function once, under the strictest role it has: verifiers and their helpers, then checks and theirs."""
    roots = [body for source in project.sources.values() for body in (*_methods(source), *_arguments(project, source))]
    seen: set[ast.AST] = set()
    for is_check in (False, True):
        waiting = [body for body in roots if (body.role == 'check') is is_check]
        while waiting:
            body = waiting.pop(0)
            if body.node not in seen:
                seen.add(body.node)
                yield body
                waiting += _helpers(project, body)


def _methods(source: Source) -> Iterator[Body]:
    class_of = {item: cls for cls in source.classes() for item in cls.body}
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.endswith(VERIFIER_SUFFIXES):
            cls = class_of.get(node)
            traceable = class_value(cls, 'traceable') if cls is not None else None
            traced = not (isinstance(traceable, ast.Constant) and traceable.value is False)
            yield Body(source, node, node.name, 'verifier', traced, cls)


def _arguments(project: Project, source: Source) -> Iterator[Body]:
    """Yields the functions that a dispatch(…) call is given."""
    for call in source.calls():
        if source.dotted(call.func).rpartition('.')[2] != 'dispatch':
            continue
        for keyword in call.keywords:
            if keyword.arg not in ('check', 'default_verifier'):
                continue
            role = 'check' if keyword.arg == 'check' else 'verifier'
            for value in keyword.value.elts if isinstance(keyword.value, (ast.List, ast.Tuple)) else [keyword.value]:
                if isinstance(value, ast.Lambda):
                    yield Body(source, value, f'the lambda given as {keyword.arg}', role)
                found = project.resolve(source, value.id) if isinstance(value, ast.Name) else None
                if found is not None and isinstance(found[1], (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield Body(found[0], found[1], found[1].name, role)


def _helpers(project: Project, body: Body) -> Iterator[Body]:
    """Yields the functions of the same file that a verifier or check calls, by name or on self."""
    methods = project.methods(body.source, body.cls) if body.cls is not None else {}
    for node in ast.walk(body.node):
        found: ast.AST | None = None
        match node:
            case ast.Call(func=ast.Name(id=name)):
                found = body.source.defined.get(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id='self' | 'cls'), attr=name)):
                where, method = methods.get(name, (None, None))
                found = method if where is body.source else None
        if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f'{found.name} (called by {body.name.rpartition("called by ")[2].rstrip(")")})'
            role = 'check' if body.role == 'check' else 'helper'
            yield Body(body.source, found, name, role, body.traced, body.cls)


# -- what is wrong with them -----------------------------------------------------------------------------------------------

# rule, where, problem, remedy
Problem = tuple[str, ast.AST, str, str]


def _problems(body: Body) -> Iterator[Problem]:
    if body.traced:
        yield from _untraceable(body)
    yield from _side_effects(body.node)
    yield from _devices(body)
    if body.role == 'check':  # may raise and format what it likes; reads values where its caller allows that
        return
    yield from _tensor_values(body.node)
    yield from _broad_excepts(body)
    if body.traced:
        yield from _formatted_sizes(body.node)
    if body.role == 'verifier':
        yield from _verdicts(body.node)


def _local_names(function: Function) -> set[str]:
    """Returns the parameters and all names that are assigned, inner functions included."""
    names: set[str] = set()
    outer: set[str] = set()
    for node in ast.walk(function):
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Global(names=rebound) | ast.Nonlocal(names=rebound):
                outer.update(rebound)
    return names - outer


def _untraceable(body: Body) -> Iterator[Problem]:
    local = _local_names(body.node)
    reported: set[tuple[int, object]] = set()
    for node in ast.walk(body.node):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Name) and node.id not in local:
            names = [node.id, body.source.imports.get(node.id, '').rpartition('.')[2]]
        for name in names:
            # `logging.getLogger(…)` is one problem, not one for each name in it
            key = getattr(node, 'lineno', 0), COMPILED.get(name)
            if name in COMPILED and key not in reported:
                reported.add(key)
                yield 'untraceable', node, *COMPILED[name]


def _side_effects(function: Function) -> Iterator[Problem]:
    local, made = _local_names(function), _made_inside(function)
    remedy = 'decide on the arguments alone; facts of the machine belong into is_available or probe'
    for node in ast.walk(function):
        match node:
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                yield 'side-effect', node, f'rebinds {", ".join(names)}', remedy
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                if _root(node) not in made:
                    yield 'side-effect', node, f'changes {ast.unparse(node)}', remedy
            case ast.Call(func=ast.Name(id='setattr' | 'delattr' as name)) if name not in local:
                yield 'side-effect', node, f'calls {name}', remedy
            case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in _MUTATORS and _root(owner) not in made:
                yield 'side-effect', node, f'changes {ast.unparse(owner)} with {name}()', remedy


def _made_inside(function: Function) -> set[str]:
    """Returns the names bound to an object that the function has made itself."""
    fresh = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Call, ast.BinOp)
    made = [node for node in _assignments(function) if isinstance(node.value, fresh) and not isinstance(node, ast.AugAssign)]
    return {target.id for node in made for target in _targets(node) if isinstance(target, ast.Name)}


Assignment = ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.AugAssign


def _assignments(function: Function) -> list[Assignment]:
    kinds = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign)
    return [node for node in ast.walk(function) if isinstance(node, kinds)]


def _targets(node: Assignment) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ''


def _devices(body: Body) -> Iterator[Problem]:
    for node in ast.walk(body.node):
        match node:
            case ast.Attribute(attr='type', value=ast.Attribute(attr='device')):
                remedy = 'use .is_cuda, or declare `devices` on the backend (`cuda` does not include ROCm there)'
                yield 'slow-device-type', node, f'reads {ast.unparse(node)}', remedy
            case ast.Call(func=called) if body.source.dotted(called).startswith(_RUNTIMES):
                remedy = 'declare `devices` or `min_capability` on the backend, or ask once in is_available or probe'
                yield 'device-query', node, f'asks {body.source.dotted(called)}() on each call', remedy


def _tensor_values(function: Function) -> Iterator[Problem]:
    remedy = 'decide on metadata, or on lengths that are on the host already, such as cu_seqlens_cpu.shape'
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VALUES:
            yield 'tensor-value', node, f'reads tensor values: {ast.unparse(node)}', remedy


def _broad_excepts(body: Body) -> Iterator[Problem]:
    remedy = 'catch what you expect; a verifier that raises is reported with its traceback and skipped'
    for node in ast.walk(body.node):
        caught: list[ast.expr | None] = []
        if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise):
            caught += node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and body.source.dotted(node.func) == 'contextlib.suppress':
            caught += node.args
        if any(one is None or body.source.dotted(one) in ('Exception', 'BaseException') for one in caught):
            yield 'broad-except', node, 'catches every exception, its own bugs included', remedy


# -- sizes -----------------------------------------------------------------------------------------------------------------


def _formatted_sizes(function: Function) -> Iterator[Problem]:
    sizes = _size_names(function)
    remedy = 'use a constant reason, or a lazy one: (False, ("K must be 128, got %s", k))'
    for node in ast.walk(function):
        part = next((part for part in _formatted(node) if _has_size(part, sizes)), None)
        if part is not None:
            yield 'formatted-size', node, f'formats a size: {ast.unparse(part)}', remedy


def _formatted(node: ast.AST) -> list[ast.expr]:
    """Returns the values that an expression turns into text."""
    match node:
        case ast.JoinedStr(values=parts):
            return [part.value for part in parts if isinstance(part, ast.FormattedValue)]
        case ast.BinOp(left=ast.JoinedStr() | ast.Constant(value=str()), op=ast.Mod(), right=right):
            return [right]
        case ast.Call(func=ast.Attribute(attr='format') | ast.Name(id='str' | 'repr' | 'format')):
            return [*node.args, *(keyword.value for keyword in node.keywords)]
    return []


def _has_size(expression: ast.AST, names: set[str]) -> bool:
    match expression:
        case ast.Compare():  # the outcome of a test is not a size
            return False
        case ast.Call(func=ast.Name(id='len')):
            return True
        case ast.Attribute(attr=name) if name in _SIZES:
            return True
        case ast.Name(id=name) if name in names:
            return True
    return any(_has_size(child, names) for child in ast.iter_child_nodes(expression))


def _size_names(function: Function) -> set[str]:
    """Returns the local names that hold a size, or a value computed from one."""
    names: set[str] = set()
    grown = -1
    while len(names) > grown:
        grown = len(names)
        for node in _assignments(function):
            if node.value is not None and _has_size(node.value, names):
                stored = [n for target in _targets(node) for n in ast.walk(target) if isinstance(n, ast.Name)]
                names.update(n.id for n in stored if isinstance(n.ctx, ast.Store))
    return names


# -- what it returns -------------------------------------------------------------------------------------------------------

_FORM = 'return (True, None) or (False, reason); only a first element that is True accepts'


def _verdicts(function: Function) -> Iterator[Problem]:
    if isinstance(function, ast.Lambda):
        yield from _verdict(function.body, function.body)
        return
    if isinstance(function, ast.AsyncFunctionDef):
        yield 'verdict', function, 'is async, so that it returns a coroutine', _FORM
        return
    for node in _own_nodes(function):
        if isinstance(node, ast.Return):
            yield from _verdict(node.value, node)
        elif isinstance(node, (ast.Yield, ast.YieldFrom)):
            yield 'verdict', node, 'yields, so that it returns a generator', _FORM
    if not _leaves(function.body):
        yield 'verdict', function, 'can reach its end, which returns None', _FORM


def _verdict(value: ast.expr | None, place: ast.AST) -> Iterator[Problem]:
    match value:
        case ast.IfExp(body=body, orelse=orelse):
            yield from _verdict(body, place)
            yield from _verdict(orelse, place)
        case ast.Tuple(elts=[ast.Constant(value=False), ast.Constant(value=reason)]) if not reason:
            yield 'verdict', place, 'rejects without a reason', 'say what the call must be like: (False, "K must be 128")'
        case ast.Tuple(elts=[ast.Constant(value=bool()), _]):
            pass
        case ast.Tuple(elts=[first, _]) if not isinstance(first, (ast.Constant, ast.Starred)):
            pass
        case None | ast.Tuple() | ast.List() | ast.Dict() | ast.Set() | ast.JoinedStr() | ast.Lambda():
            yield 'verdict', place, f'returns {"nothing" if value is None else ast.unparse(value)}', _FORM
        case ast.Constant() | ast.Compare() | ast.UnaryOp():
            yield 'verdict', place, f'returns {ast.unparse(value)}', _FORM


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function, those of inner functions excluded."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield node
            yield from _own_nodes(node)


def _leaves(block: list[ast.stmt]) -> bool:
    """Returns whether a block always returns or raises."""
    return any(_leaves_at(statement) for statement in block)


def _leaves_at(statement: ast.stmt) -> bool:
    match statement:
        case ast.Return() | ast.Raise():
            return True
        case ast.If(body=body, orelse=orelse):
            return _leaves(body) and _leaves(orelse)
        case ast.With(body=body):
            return _leaves(body)
        case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
            return (all(_leaves(h.body) for h in handlers) and (_leaves(body) or _leaves(orelse))) or _leaves(final)
        case ast.While(test=ast.Constant(value=value)) if value:
            return not any(isinstance(node, ast.Break) for node in ast.walk(statement))
        case ast.Match(cases=[*_, ast.match_case(pattern=ast.MatchAs(pattern=None), guard=None)] as cases):
            return all(_leaves(case.body) for case in cases)
    return False
