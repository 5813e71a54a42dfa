"""Signatures: how a call to the public function becomes a call to a backend's method, as source text.

Everything here is decided when a plan is built. Arguments are matched by *name*; they are passed by position as long as
the callee's own order allows (cheapest), then by keyword.
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

_TENSOR = re.compile(r'\b(\w*Tensor|Parameter)\b')
# Annotations of which every word is one of these belong to no tensor.
_NO_TENSOR = {
    'int',
    'float',
    'bool',
    'str',
    'bytes',
    'complex',
    'None',
    'NoneType',
    'Optional',
    'Union',
    'Literal',
    'Callable',
    'class',
    'typing',
    'torch',
    'dtype',
    'device',
    'layout',
    'types',
    'collections',
    'abc',
    'True',
    'False',
}
_MANY = re.compile(r'\b(list|tuple|sequence|iterable|dict|mapping)\b', re.IGNORECASE)


@dataclass(frozen=True)
class Callee:
    """How a method is called from within the public function.

    Attributes:
        arguments: source text of the argument list.
        missing: parameters of the public function that the method does not name.
        unknown: parameters of the method that the public function lacks.
        unfillable: those of `unknown` without a default: the method cannot be called at all.
        identical: the method takes exactly the public function's parameters, so that it can stand in for it.
    """

    arguments: str
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    unfillable: tuple[str, ...]
    identical: bool


class Signature:
    """The public function's signature and what selection reads off it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.signature = inspect.signature(function)
        self.parameters = self.signature.parameters
        for name in self.parameters:
            if name.startswith(RESERVED_PREFIX):
                raise ValueError(f'parameter {name!r}: names beginning with {RESERVED_PREFIX!r} are reserved by dispatch')
        named = [p for p in self.parameters.values() if p.kind not in (VAR_POSITIONAL, VAR_KEYWORD)]
        self.names = tuple(p.name for p in named)
        self.var_positional = next((p.name for p in self.parameters.values() if p.kind is VAR_POSITIONAL), None)
        self.var_keyword = next((p.name for p in self.parameters.values() if p.kind is VAR_KEYWORD), None)
        self._find_tensors(named)

    def _find_tensors(self, named: list[inspect.Parameter]) -> None:
        """`tensors`: parameters annotated as one tensor; `tensor_groups`: as a list or tuple of tensors. Where nothing is
        annotated, every parameter without a default may be a tensor, which `annotated` says."""
        text = {p.name: p.annotation if isinstance(p.annotation, str) else repr(p.annotation) for p in named}
        hits = {p.name for p in named if p.annotation is not EMPTY and _TENSOR.search(text[p.name])}
        self.annotated = bool(hits)
        if not hits:
            hits = {p.name for p in named if p.default is EMPTY and p.annotation is EMPTY}
        # `Tensor | tuple[Tensor, Tensor]` can be either: such a parameter is looked at by a helper, like a group.
        groups = tuple(n for n in self.names if n in hits and _MANY.search(text[n]))
        self.tensors = tuple(n for n in self.names if n in hits and n not in groups)
        rest = [p for p in self.parameters.values() if p.kind in (VAR_POSITIONAL, VAR_KEYWORD)]
        self.tensor_groups = groups + tuple(p.name for p in rest if _TENSOR.search(repr(p.annotation)))
        # whatever is neither known to be a tensor nor known to be none: looked at when it matters that no tensor is missed
        known = {*self.tensors, *self.tensor_groups}
        self.unknown = tuple(p.name for p in self.parameters.values() if p.name not in known and _may_hold_tensors(p))

    def default(self, name: str) -> Any:
        """The default of a parameter, `EMPTY` where it is required."""
        return self.parameters[name].default

    def is_optional_tensor(self, name: str) -> bool:
        """Whether a tensor parameter may be something else (None, usually), so that reading an attribute needs a test."""
        parameter = self.parameters[name]
        text = parameter.annotation if isinstance(parameter.annotation, str) else repr(parameter.annotation)
        return not self.annotated or parameter.default is not EMPTY or 'None' in text or 'Optional' in text or '|' in text

    def header(self, name: str, first: str = '') -> str:
        """The `def` line of a function with this signature, with placeholders for the defaults, which are set afterwards."""
        parts, star, slash = [first] if first else [], False, False
        for parameter in self.parameters.values():
            if parameter.kind is POSITIONAL_ONLY:
                slash = True
            elif slash:
                parts.append('/')
                slash = False
            text = parameter.name + ('=None' if parameter.default is not EMPTY else '')
            if parameter.kind is VAR_POSITIONAL:
                text, star = '*' + text, True
            elif parameter.kind is VAR_KEYWORD:
                text = '**' + text
            elif parameter.kind is KEYWORD_ONLY and not star:
                parts.append('*')
                star = True
            parts.append(text)
        return f'def {name}({", ".join(parts + ["/"] * slash)}):'

    def forward_all(self) -> str:
        """Argument list that passes everything on to a function of this very signature."""
        parts = []
        for parameter in self.parameters.values():
            prefix = '*' if parameter.kind is VAR_POSITIONAL else '**' if parameter.kind is VAR_KEYWORD else ''
            keyword = f'{parameter.name}=' if parameter.kind is KEYWORD_ONLY else ''
            parts.append(prefix + keyword + parameter.name)
        return ', '.join(parts)

    def defaults(self) -> tuple[tuple[Any, ...] | None, dict[str, Any] | None]:
        """`__defaults__` and `__kwdefaults__` of a function of this signature."""
        positional, keyword = [], {}
        for parameter in self.parameters.values():
            if parameter.default is EMPTY:
                continue
            if parameter.kind is KEYWORD_ONLY:
                keyword[parameter.name] = parameter.default
            else:
                positional.append(parameter.default)
        return tuple(positional) or None, keyword or None

    def call(self, method: Callable[..., Any]) -> Callee:
        """How to call `method` (bound: without self) with this function's arguments."""
        theirs = parameters_of(method)
        takes_rest = any(p.kind is VAR_KEYWORD for p in theirs.values())
        takes_positions = any(p.kind is VAR_POSITIONAL for p in theirs.values())
        parts: list[str] = []
        used: set[str] = set()
        by_position = True
        if takes_positions:
            # the required arguments go by position, as callers write them; the rest by keyword where it can, which is not
            # where more of them may follow
            leading = [p.name for p in theirs.values() if p.kind not in (VAR_POSITIONAL, VAR_KEYWORD, KEYWORD_ONLY)]
            for name in self.names:
                parameter = self.parameters[name]
                by_keyword = parameter.default is not EMPTY and takes_rest and self.var_positional is None
                if parameter.kind is KEYWORD_ONLY or by_keyword:
                    break
                if len(parts) < len(leading) and leading[len(parts)] != name:
                    break
                parts.append(name)
                used.add(name)
            if self.var_positional and len(parts) == len(
                [n for n in self.names if self.parameters[n].kind is not KEYWORD_ONLY]
            ):
                parts.append(f'*{self.var_positional}')
            by_position = False
        for parameter in theirs.values():
            if parameter.kind in (VAR_POSITIONAL, VAR_KEYWORD) or parameter.name in used:
                continue
            if parameter.name not in self.names:
                by_position = False
                continue
            if parameter.kind is POSITIONAL_ONLY or (by_position and parameter.kind is not KEYWORD_ONLY):
                parts.append(parameter.name)
            else:
                parts.append(f'{parameter.name}={parameter.name}')
                by_position = False
            used.add(parameter.name)
        if takes_rest:
            parts += [f'{n}={n}' for n in self.names if n not in used and self.parameters[n].kind is not POSITIONAL_ONLY]
            if self.var_keyword:
                parts.append(f'**{self.var_keyword}')
        unknown = tuple(n for n, p in theirs.items() if p.kind not in (VAR_POSITIONAL, VAR_KEYWORD) and n not in self.names)
        return Callee(
            arguments=', '.join(parts),
            missing=tuple(n for n in self.names if n not in used),
            unknown=unknown,
            unfillable=tuple(n for n in unknown if theirs[n].default is EMPTY),
            identical=[(p.name, p.kind) for p in theirs.values()] == [(p.name, p.kind) for p in self.parameters.values()]
            and all(_same_default(theirs[n].default, self.parameters[n].default) for n in theirs),
        )

    def drift(self, method: Callable[..., Any]) -> list[str]:
        """What in the signature of `method` disagrees with the public function: unknown parameters, other defaults."""
        try:
            theirs = parameters_of(method)
        except (TypeError, ValueError) as error:
            return [f'its signature cannot be read: {error}']
        found = []
        for name, parameter in theirs.items():
            if parameter.kind in (VAR_POSITIONAL, VAR_KEYWORD):
                continue
            if name not in self.names:
                found.append(f'parameter {name!r} is unknown to the public function')
            elif parameter.default is not EMPTY and not _same_default(parameter.default, self.default(name)):
                mine = 'required' if self.default(name) is EMPTY else repr(self.default(name))
                found.append(f'default of {name!r} is {parameter.default!r}, in the public function {mine}')
        return found


def _may_hold_tensors(parameter: inspect.Parameter) -> bool:
    if parameter.annotation is EMPTY:
        # the default tells what an unannotated option is
        return not isinstance(parameter.default, (bool, int, float, str))
    text = parameter.annotation if isinstance(parameter.annotation, str) else repr(parameter.annotation)
    words = re.findall(r'[A-Za-z_]+', re.sub(r"'[^']*'", ' ', text) if 'Literal' in text else text)
    return not set(words) <= _NO_TENSOR


def parameters_of(method: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters of a function or bound method. Remembered: planning asks for each several times, at 0.1 ms a time."""
    function = getattr(method, '__func__', method)
    if not isinstance(function, types.FunctionType):
        return inspect.signature(method).parameters
    known = _free if function is method else _bound
    if function not in known:
        known[function] = inspect.signature(method).parameters
    return known[function]


# Weak: a function that a notebook has replaced goes, with everything its globals hold.
_free: weakref.WeakKeyDictionary[types.FunctionType, Mapping[str, inspect.Parameter]] = weakref.WeakKeyDictionary()
_bound: weakref.WeakKeyDictionary[types.FunctionType, Mapping[str, inspect.Parameter]] = weakref.WeakKeyDictionary()


def _same_default(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, (bool, int, float, str, bytes, tuple)) and one == other


def location(function: Any) -> str:
    """`file:line` of a function or class, for messages."""
    try:
        code = inspect.unwrap(getattr(function, '__func__', function)).__code__
        return f'{code.co_filename}:{code.co_firstlineno}'
    except AttributeError:
        pass
    try:
        return f'{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}'
    except (TypeError, OSError):
        return getattr(function, '__module__', None) or 'unknown place'
