"""Signatures: how a call to the public function becomes a call to a backend's method, as source text.

All of this is decided when a plan is built. Arguments are matched by *name*; they are passed by position as long as the
callee's own order allows (cheapest), then by keyword.
"""

from __future__ import annotations

import inspect
import re
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_ONLY
VAR_POSITIONAL = inspect.Parameter.VAR_POSITIONAL
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
EMPTY = inspect.Parameter.empty

RESERVED_PREFIX = '_d_'

_ORDINARY = inspect.Parameter.POSITIONAL_OR_KEYWORD
_VARIADIC = (VAR_POSITIONAL, VAR_KEYWORD)
_TENSOR = re.compile(r'\b(\w*Tensor|Parameter)\b')
_MANY = re.compile(r'\b(list|tuple|sequence|iterable|dict|mapping)\b', re.IGNORECASE)
# A parameter holds no tensor if every word of its annotation matches.
_NO_TENSOR = re.compile(
    'int|float|bool|str|bytes|complex|None|NoneType|True|False|Optional|Union|Literal|Callable|class|typing|types|'
    'collections|abc|torch|dtype|device|layout'
)


@dataclass(frozen=True)
class Callee:
    """How the public function calls a method.

    Attributes:
        arguments: source text of the argument list.
        missing: parameters of the public function that the method does not name.
        unknown: parameters of the method that the public function lacks.
        unfillable: those of `unknown` without a default: the method cannot be called at all.
        identical: the method takes exactly the public function's parameters, so that it can replace it.
    """

    arguments: str
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    unfillable: tuple[str, ...]
    identical: bool


class Signature:
    """The public function's signature, and the facts that selection needs.

    Attributes:
        names: parameters, except `*args` and `**kwargs`.
        var_positional, var_keyword: the names of those two, or None.
        tensors: parameters annotated as one tensor.
        tensor_groups: parameters annotated as a list, tuple or mapping of tensors.
        annotated: whether any parameter is annotated as a tensor; if not, `tensors` are all parameters without a default.
        unknown: parameters that may hold tensors or may not: checked where no tensor may be missed.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.signature = inspect.signature(function)
        self.parameters = self.signature.parameters
        for name in self.parameters:
            if name.startswith(RESERVED_PREFIX):
                raise ValueError(f'parameter {name!r}: names beginning with {RESERVED_PREFIX!r} are reserved by dispatch')
        parameters = list(self.parameters.values())
        named = [p for p in parameters if p.kind not in _VARIADIC]
        self.names = tuple(p.name for p in named)
        self.var_positional = next((p.name for p in parameters if p.kind is VAR_POSITIONAL), None)
        self.var_keyword = next((p.name for p in parameters if p.kind is VAR_KEYWORD), None)
        hits = {p.name for p in named if p.annotation is not EMPTY and _TENSOR.search(_annotation(p))}
        self.annotated = bool(hits)
        if not hits:
            hits = {p.name for p in named if p.default is EMPTY and p.annotation is EMPTY}
        # `Tensor | tuple[Tensor, Tensor]` can be either: a helper inspects such a parameter, as it does a group
        groups = tuple(p.name for p in named if p.name in hits and _MANY.search(_annotation(p)))
        self.tensors = tuple(name for name in self.names if name in hits and name not in groups)
        rest = (p.name for p in parameters if p.kind in _VARIADIC and _TENSOR.search(repr(p.annotation)))
        self.tensor_groups = (*groups, *rest)
        known = {*self.tensors, *self.tensor_groups}
        self.unknown = tuple(p.name for p in parameters if p.name not in known and _may_hold_tensors(p))

    def default(self, name: str) -> Any:
        """Returns the default of a parameter, `EMPTY` if it is required."""
        return self.parameters[name].default

    def is_optional_tensor(self, name: str) -> bool:
        """Whether a tensor parameter may be something else (usually None), so that reading an attribute needs a test."""
        text = _annotation(self.parameters[name])
        return not self.annotated or self.default(name) is not EMPTY or 'None' in text or 'Optional' in text or '|' in text

    def header(self, name: str, first: str = '') -> str:
        """Returns the `def` line of a function with this signature. Defaults are placeholders, to be set afterwards.

        Args:
            first: a parameter in front of the others.
        """
        parameters = [
            p.replace(annotation=EMPTY, default=EMPTY if p.default is EMPTY else None) for p in self.parameters.values()
        ]
        if first:
            kind = POSITIONAL_ONLY if any(p.kind is POSITIONAL_ONLY for p in parameters) else _ORDINARY
            parameters.insert(0, inspect.Parameter(first, kind))
        return f'def {name}{inspect.Signature(parameters)}:'

    def forward_all(self) -> str:
        """Returns the argument list that passes everything on to a function of the same signature."""
        prefixes: dict[Any, str] = {VAR_POSITIONAL: '*', VAR_KEYWORD: '**'}
        return ', '.join(
            f'{p.name}={p.name}' if p.kind is KEYWORD_ONLY else prefixes.get(p.kind, '') + p.name
            for p in self.parameters.values()
        )

    def defaults(self) -> tuple[tuple[Any, ...] | None, dict[str, Any] | None]:
        """Returns `__defaults__` and `__kwdefaults__` of a function with this signature."""
        given = [p for p in self.parameters.values() if p.default is not EMPTY]
        positional = tuple(p.default for p in given if p.kind is not KEYWORD_ONLY)
        return positional or None, {p.name: p.default for p in given if p.kind is KEYWORD_ONLY} or None

    def call(self, method: Callable[..., Any]) -> Callee:
        """Returns how to call `method` (bound: without self) with this function's arguments."""
        theirs = parameters_of(method)
        named = [p for p in theirs.values() if p.kind not in _VARIADIC]
        takes_rest = any(p.kind is VAR_KEYWORD for p in theirs.values())
        takes_positions = any(p.kind is VAR_POSITIONAL for p in theirs.values())
        parts: list[str] = []
        used: set[str] = set()
        if takes_positions:
            # required arguments go by position, as callers write them; the others go by keyword unless `*args` may follow
            leading = [p.name for p in named if p.kind is not KEYWORD_ONLY]
            positional = [name for name in self.names if self.parameters[name].kind is not KEYWORD_ONLY]
            for name in positional:
                by_keyword = self.default(name) is not EMPTY and takes_rest and self.var_positional is None
                if by_keyword or (len(parts) < len(leading) and leading[len(parts)] != name):
                    break
                parts.append(name)
                used.add(name)
            if self.var_positional and len(parts) == len(positional):
                parts.append(f'*{self.var_positional}')
        by_position = not takes_positions
        for parameter in named:
            name = parameter.name
            if name in used:
                continue
            if name not in self.names:
                by_position = False
                continue
            by_position = by_position and parameter.kind is not KEYWORD_ONLY
            parts.append(name if by_position or parameter.kind is POSITIONAL_ONLY else f'{name}={name}')
            used.add(name)
        if takes_rest:
            parts += [f'{n}={n}' for n in self.names if n not in used and self.parameters[n].kind is not POSITIONAL_ONLY]
            if self.var_keyword:
                parts.append(f'**{self.var_keyword}')
        unknown = tuple(p.name for p in named if p.name not in self.names)
        return Callee(
            arguments=', '.join(parts),
            missing=tuple(n for n in self.names if n not in used),
            unknown=unknown,
            unfillable=tuple(n for n in unknown if theirs[n].default is EMPTY),
            identical=[(p.name, p.kind) for p in theirs.values()] == [(p.name, p.kind) for p in self.parameters.values()]
            and all(_same_default(theirs[n].default, self.parameters[n].default) for n in theirs),
        )

    def drift(self, method: Callable[..., Any]) -> list[str]:
        """Returns where the signature of `method` disagrees with the public function: unknown parameters, other defaults."""
        try:
            theirs = parameters_of(method)
        except (TypeError, ValueError) as error:
            return [f'its signature cannot be read: {error}']
        found = []
        for name, parameter in theirs.items():
            if parameter.kind in _VARIADIC:
                continue
            if name not in self.names:
                found.append(f'parameter {name!r} is unknown to the public function')
            elif parameter.default is not EMPTY and not _same_default(parameter.default, self.default(name)):
                mine = 'required' if self.default(name) is EMPTY else repr(self.default(name))
                found.append(f'default of {name!r} is {parameter.default!r}, in the public function {mine}')
        return found


def _annotation(parameter: inspect.Parameter) -> str:
    return parameter.annotation if isinstance(parameter.annotation, str) else repr(parameter.annotation)


def _may_hold_tensors(parameter: inspect.Parameter) -> bool:
    if parameter.annotation is EMPTY:
        # an unannotated option is of its default's type
        return not isinstance(parameter.default, (bool, int, float, str))
    text = _annotation(parameter)
    words = re.findall(r'[A-Za-z_]+', re.sub(r"'[^']*'", ' ', text) if 'Literal' in text else text)
    return not all(map(_NO_TENSOR.fullmatch, words))


def parameters_of(method: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function or bound method. Cached: planning reads each often, at 0.1 ms a time."""
    function = getattr(method, '__func__', method)
    if not isinstance(function, types.FunctionType):
        return inspect.signature(method).parameters
    cache = _free if function is method else _bound
    if function not in cache:
        cache[function] = inspect.signature(method).parameters
    return cache[function]


# Weak: a function that a notebook has replaced is freed, with everything its globals hold.
_free: weakref.WeakKeyDictionary[types.FunctionType, Mapping[str, inspect.Parameter]] = weakref.WeakKeyDictionary()
_bound: weakref.WeakKeyDictionary[types.FunctionType, Mapping[str, inspect.Parameter]] = weakref.WeakKeyDictionary()


def _same_default(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, (bool, int, float, str, bytes, tuple)) and one == other


def location(function: Any) -> str:
    """Returns `file:line` of a function or class, for messages."""
    try:
        code = inspect.unwrap(getattr(function, '__func__', function)).__code__
        return f'{code.co_filename}:{code.co_firstlineno}'
    except AttributeError:
        pass
    try:
        return f'{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}'
    except (TypeError, OSError):
        return getattr(function, '__module__', None) or 'unknown place'
