"""What a verifier, a prefers and a check may do. Why: they run on every call, and in a trace.

Looked at are functions named `…_verifier` or `…_prefers`, those passed as `default_verifier=` and `check=`, and helpers of
the same file that these call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from fla.backends.backend.untraceable import COMPILED
from fla.backends.lint.findings import Finding
from fla.backends.lint.source import VERIFIER_SUFFIXES, Function, Project, Source, class_value

# A Tensor's methods, and functions of torch, whose result depends on values.
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
        name: as messages call it.
        role: 'verifier', 'check', or 'helper' (called by a verifier).
        traced: False where the backend says traceable = False, so that compiled code never asks it.
        cls: the class it is a method of.
    """

    source: Source
    node: Function
    name: str
    role: str
    traced: bool = True
    cls: ast.ClassDef | None = None


def check(project: Project) -> Iterator[Finding]:
    """Every finding about verifiers and checks."""
    for body in _bodies(project):
        for rule, node, problem, remedy in _problems(body):
            yield body.source.finding(rule, node, f'{body.name} {problem}', remedy)


# -- which functions -------------------------------------------------------------------------------------------------------


def _bodies(project: Project) -> Iterator[Body]:
    """Each function once, under the strictest role it has: verifiers, their helpers, checks, theirs."""
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
    inside: dict[ast.AST, ast.ClassDef] = {item: cls for cls in source.classes() for item in cls.body}
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.endswith(VERIFIER_SUFFIXES):
            cls = inside.get(node)
            traceable = class_value(cls, 'traceable') if cls is not None else None
            traced = not (isinstance(traceable, ast.Constant) and traceable.value is False)
            yield Body(source, node, node.name, 'verifier', traced, cls)


def _arguments(project: Project, source: Source) -> Iterator[Body]:
    """Functions that a dispatch(…) call is given."""
    for call in ast.walk(source.tree):
        if not isinstance(call, ast.Call) or source.dotted(call.func).rpartition('.')[2] != 'dispatch':
            continue
        for keyword in call.keywords:
            if keyword.arg not in ('check', 'default_verifier'):
                continue
            role = 'check' if keyword.arg == 'check' else 'verifier'
            group = keyword.value.elts if isinstance(keyword.value, (ast.List, ast.Tuple)) else [keyword.value]
            for value in group:
                if isinstance(value, ast.Lambda):
                    yield Body(source, value, f'the lambda given as {keyword.arg}', role)
                    continue
                found = project.resolve(source, value.id) if isinstance(value, ast.Name) else None
                if found is not None and isinstance(found[1], (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield Body(found[0], found[1], found[1].name, role)


def _helpers(project: Project, body: Body) -> Iterator[Body]:
    """Functions of the same file that a verifier or check calls, by name or on self."""
    methods = project.methods(body.source, body.cls) if body.cls is not None else {}
    for call in ast.walk(body.node):
        if not isinstance(call, ast.Call):
            continue
        found: ast.AST | None = None
        if isinstance(call.func, ast.Name):
            found = body.source.defined.get(call.func.id)
        elif isinstance(call.func, ast.Attribute) and body.source.dotted(call.func.value) in ('self', 'cls'):
            where, method = methods.get(call.func.attr, (None, None))
            found = method if where is body.source else None
        if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f'{found.name} (called by {body.name.rpartition("called by ")[2].rstrip(")")})'
            role = 'check' if body.role == 'check' else 'helper'
            yield Body(body.source, found, name, role, body.traced, body.cls)


# -- what is wrong with them -----------------------------------------------------------------------------------------------

Problem = tuple[str, ast.AST, str, str]


def _problems(body: Body) -> Iterator[Problem]:
    local = _local_names(body.node)
    if body.traced:
        yield from _untraceable(body, local)
    yield from _side_effects(body.node, local)
    yield from _devices(body)
    if body.role == 'check':
        # it may raise, and then format what it likes; and it looks at values where its caller allows it
        return
    yield from _tensor_values(body)
    yield from _broad_excepts(body)
    if body.traced:
        yield from _formatted_sizes(body)
    if body.role == 'verifier':
        yield from _verdicts(body.node)


def _local_names(function: Function) -> set[str]:
    """Parameters and whatever is assigned, inner functions included."""
    names: set[str] = set()
    outer: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            outer.update(node.names)
    return names - outer


def _untraceable(body: Body, local: set[str]) -> Iterator[Problem]:
    told: set[tuple[int, object]] = set()
    for node in ast.walk(body.node):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Name) and node.id not in local:
            names = [node.id, body.source.imports.get(node.id, '').rpartition('.')[2]]
        for name in names:
            # `logging.getLogger(…)` is one problem, not one for each name in it
            told_here = getattr(node, 'lineno', 0), COMPILED.get(name)
            if name in COMPILED and told_here not in told:
                told.add(told_here)
                yield 'untraceable', node, *COMPILED[name]


def _side_effects(function: Function, local: set[str]) -> Iterator[Problem]:
    made = _made_inside(function)
    remedy = 'decide on the arguments alone; facts of the machine belong into is_available or probe'
    for node in ast.walk(function):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            yield 'side-effect', node, f'rebinds {", ".join(node.names)}', remedy
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            if _root(node) not in made:
                yield 'side-effect', node, f'changes {ast.unparse(node)}', remedy
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in ('setattr', 'delattr') and called.id not in local:
                yield 'side-effect', node, f'calls {called.id}', remedy
            elif isinstance(called, ast.Attribute) and called.attr in _MUTATORS and _root(called.value) not in made:
                yield 'side-effect', node, f'changes {ast.unparse(called.value)} with {called.attr}()', remedy


def _made_inside(function: Function) -> set[str]:
    """Names bound to an object that the function has made itself."""
    fresh = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Call, ast.BinOp)
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and isinstance(node.value, fresh):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ''


def _devices(body: Body) -> Iterator[Problem]:
    for node in ast.walk(body.node):
        if isinstance(node, ast.Attribute) and node.attr == 'type':
            if isinstance(node.value, ast.Attribute) and node.value.attr == 'device':
                remedy = 'use .is_cuda, or declare `devices` on the backend (`cuda` does not include ROCm there)'
                yield 'slow-device-type', node, f'reads {ast.unparse(node)}', remedy
        elif isinstance(node, ast.Call) and body.source.dotted(node.func).startswith(_RUNTIMES):
            remedy = 'declare `devices` or `min_capability` on the backend, or ask once in is_available or probe'
            yield 'device-query', node, f'asks {body.source.dotted(node.func)}() on each call', remedy


def _tensor_values(body: Body) -> Iterator[Problem]:
    for node in ast.walk(body.node):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VALUES:
            remedy = 'decide on metadata, or on lengths that are on the host already, such as cu_seqlens_cpu.shape'
            yield 'tensor-value', node, f'looks at tensor values: {ast.unparse(node)}', remedy


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


def _formatted_sizes(body: Body) -> Iterator[Problem]:
    sizes = _size_names(body.node)
    remedy = 'use a constant reason, or a lazy one: (False, ("K must be 128, got %s", k))'
    for node in ast.walk(body.node):
        for part in _formatted(node):
            if _has_size(part, sizes):
                yield 'formatted-size', node, f'formats a size: {ast.unparse(part)}', remedy
                break


def _formatted(node: ast.AST) -> list[ast.expr]:
    """The values that an expression turns into text."""
    if isinstance(node, ast.JoinedStr):
        return [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        template = isinstance(node.left, ast.JoinedStr)
        template = template or (isinstance(node.left, ast.Constant) and isinstance(node.left.value, str))
        return [node.right] if template else []
    if isinstance(node, ast.Call):
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node.func, ast.Attribute) and node.func.attr == 'format':
            return values
        if isinstance(node.func, ast.Name) and node.func.id in ('str', 'repr', 'format'):
            return values
    return []


def _has_size(expression: ast.expr, names: set[str]) -> bool:
    waiting: list[ast.AST] = [expression]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Compare):
            continue  # the outcome of a test is no size
        if isinstance(node, ast.Attribute) and node.attr in _SIZES:
            return True
        if isinstance(node, ast.Name) and node.id in names:
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'len':
            return True
        waiting += ast.iter_child_nodes(node)
    return False


def _size_names(function: Function) -> set[str]:
    """Local names that hold a size, or something computed from one."""
    names: set[str] = set()
    assignments = [n for n in ast.walk(function) if isinstance(n, (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign))]
    grown = -1
    while len(names) > grown:
        grown = len(names)
        for node in assignments:
            if node.value is not None and _has_size(node.value, names):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                stored = [n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
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
    if not _always_leaves(function.body):
        yield 'verdict', function, 'can fall off its end, which returns None', _FORM


def _verdict(value: ast.expr | None, place: ast.AST) -> Iterator[Problem]:
    if isinstance(value, ast.IfExp):
        yield from _verdict(value.body, place)
        yield from _verdict(value.orelse, place)
        return
    wrong = value is None or isinstance(
        value, (ast.Constant, ast.Compare, ast.List, ast.Dict, ast.Set, ast.JoinedStr, ast.UnaryOp, ast.Lambda)
    )
    if isinstance(value, ast.Tuple):
        first = value.elts[0] if len(value.elts) == 2 else None
        wrong = first is None or isinstance(first, ast.Starred)
        wrong = wrong or (isinstance(first, ast.Constant) and not isinstance(first.value, bool))
        if not wrong and isinstance(first, ast.Constant) and first.value is False and _is_empty(value.elts[1]):
            yield 'verdict', place, 'rejects without a reason', 'say what the call must be like: (False, "K must be 128")'
    if wrong:
        yield 'verdict', place, f'returns {ast.unparse(value) if value is not None else "nothing"}', _FORM


def _is_empty(reason: ast.expr) -> bool:
    return isinstance(reason, ast.Constant) and not reason.value


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """What runs as part of a function itself, inner functions excluded."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield node
            yield from _own_nodes(node)


def _always_leaves(statements: list[ast.stmt]) -> bool:
    """Whether a block always returns or raises."""
    return any(_leaves(statement) for statement in statements)


def _leaves(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Return, ast.Raise)):
        return True
    if isinstance(statement, ast.If):
        return _always_leaves(statement.body) and _always_leaves(statement.orelse)
    if isinstance(statement, ast.With):
        return _always_leaves(statement.body)
    if isinstance(statement, ast.Try):
        handlers = all(_always_leaves(handler.body) for handler in statement.handlers)
        whole = handlers and (_always_leaves(statement.body) or _always_leaves(statement.orelse))
        return whole or _always_leaves(statement.finalbody)
    if isinstance(statement, ast.While):
        endless = isinstance(statement.test, ast.Constant) and bool(statement.test.value)
        return endless and not any(isinstance(node, ast.Break) for node in ast.walk(statement))
    if isinstance(statement, ast.Match):
        patterns = [case.pattern for case in statement.cases if case.guard is None]
        whole = any(isinstance(pattern, ast.MatchAs) and pattern.pattern is None for pattern in patterns)
        return whole and all(_always_leaves(case.body) for case in statement.cases)
    return False
