"""Conditions of rules: small expressions over a function's own parameters.

    q.dtype == bfloat16 and q.shape[1] >= 4096 and cu_seqlens is None

Allowed are comparisons (chained, and `in` a list of constants), `and`, `or`, `not`, `is None`, a parameter by its name, and
a tensor's `.dtype`, `.shape[i]` and `.device.type`. A condition reads no tensor values, calls nothing and changes nothing:
it may stand in the code of a call. If a call gives no answer (an attribute of None, a missing dimension, a tensor compared
with a number), the code raises, and the condition does not hold.
"""

from __future__ import annotations

import ast
import functools
import keyword
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fla.backends.core.errors import DispatchError
from fla.backends.core.signature import Signature
from fla.utils.env import nearest

_GRAMMAR = (
    'comparisons, `and`, `or`, `not`, `is None`, parameters, and of tensors `.dtype`, `.shape[i]` and `.device.type`, '
    'compared with numbers, strings, True, False and dtypes such as bfloat16'
)
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

_COMPARISONS: dict[type[ast.cmpop], str] = dict(
    zip(
        (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
        ('==', '!=', '<', '<=', '>', '>=', 'in', 'not in'),
        strict=True,
    )
)
_ATTRIBUTE = re.compile(r'(\w+)\.(?:(dtype|device\.type)|shape\[-?(\d+)\])')
_ORDERED = {'<', '<=', '>', '>='}
# Python's parser stops at 200 parentheses, and the generated code has some for each nested `and`, `or` and `not`.
_MOST_NESTED = 32
# far beyond any real condition, and parsed in no time
_MOST_CHARACTERS = 10_000
# PyTorch's limit
_MOST_DIMENSIONS = 64


class ConditionError(DispatchError, ValueError):
    """A `when` that is not a condition, does not fit the function, or cannot be evaluated on a call."""


@dataclass(frozen=True)
class Condition:
    """A checked `when`. Two that differ only in white space, parentheses or comments are equal.

    Attributes:
        text: the source, as written.
        meaning: the normalised source.

    Raises:
        ConditionError: if it is not in the grammar.
    """

    text: str = field(compare=False)
    meaning: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise ConditionError(f'a condition is an expression such as "q.shape[1] >= 4096", got {self.text!r}')
        object.__setattr__(self, 'meaning', _parsed(self.text).meaning)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters it reads, in the order they are named."""
        return _parsed(self.text).names

    def problems(self, signature: Signature) -> list[str]:
        """Returns why it does not fit a function; empty if it does."""
        known = ', '.join(signature.names)
        tensors = {*signature.tensors, *signature.tensor_groups} if signature.annotated else set()
        return [
            f'there is no parameter {name!r}.{nearest(name, [*signature.names, *DTYPES])} There are {known}'
            for name in self.parameters
            if name not in signature.names
        ] + [
            f'{name!r} is a tensor, whose values are not read: name its .dtype, .shape[i] or .device.type'
            for name in _parsed(self.text).values
            if name in tensors
        ]

    def source(self, bind: Callable[[str, Any], str], *, traced: bool = False, device_type: str | None = None) -> str:
        """Returns an expression for generated code.

        Args:
            bind: `bind(name, value)` returns the name of a value in that code.
            traced: for Dynamo, where some exceptions would end the trace: a missing dimension and, in torch 2.7, an
                attribute of None or None compared with a number.
            device_type: assumed for every tensor, except for parameters named `…_cpu`.
        """
        return _Emitter(bind, traced, device_type).truth(_parsed(self.text).tree)


# Called by generated code:


def flag(value: Any) -> bool:
    """Returns a parameter that is tested itself, which must be True or False."""
    if value is True or value is False:
        return bool(value)
    raise TypeError('neither True nor False')


def size(tensor: Any, index: int) -> Any:
    """Returns a dimension that a tensor must have."""
    if not isinstance(tensor, torch.Tensor) or not -tensor.dim() <= index < tensor.dim():
        raise TypeError('no such dimension')
    return tensor.shape[index]


def tensor(value: Any) -> torch.Tensor:
    """Returns a parameter that must be a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError('not a tensor')
    return value


def ordered(value: Any) -> Any:
    """Returns a parameter that can be larger or smaller than a number."""
    if value is None or isinstance(value, (torch.Tensor, str, tuple, list)):
        raise TypeError('neither larger nor smaller')
    return value


def plain(value: Any) -> Any:
    """Returns a parameter that is compared, which must not be a tensor: the comparison would read its values."""
    if isinstance(value, torch.Tensor):
        raise TypeError('a tensor is not compared')
    return value


@dataclass(frozen=True)
class _Parsed:
    """names: all parameters. values: parameters that are compared or tested themselves, rather than an attribute."""

    tree: ast.expr
    meaning: str
    names: tuple[str, ...]
    values: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> _Parsed:
    if len(text) > _MOST_CHARACTERS:
        raise ConditionError(f'a condition has {_MOST_CHARACTERS} characters at most, {text[:40]!r}... has {len(text)}')
    try:
        # parentheses join several lines; the brackets detect a text that closes them: `a) or (b`
        tree = _BareDtypes().visit(ast.parse(f'({text}\n)', mode='eval').body)
        is_whole = isinstance(ast.parse(f'[{text}\n]', mode='eval').body, (ast.List, ast.ListComp))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConditionError(f'{text!r} is not an expression: {getattr(error, "msg", error)}') from None
    if not is_whole:
        raise ConditionError(f'{text!r} is not an expression: unbalanced parentheses')
    reader = _Reader()
    try:
        reader.part(tree)
    except RecursionError:
        raise ConditionError('a condition is nested too deep') from None
    except ValueError as error:  # a number with more digits than Python prints
        raise ConditionError(f'{text[:40]!r}...: {error}') from None
    if reader.refused:
        raise ConditionError(f'{text!r}: {"; ".join(reader.refused)}. A condition may have {_GRAMMAR}')
    return _Parsed(tree, ast.unparse(tree), tuple(dict.fromkeys(reader.names)), tuple(dict.fromkeys(reader.values)))


class _BareDtypes(ast.NodeTransformer):
    """Replaces `torch.bfloat16` by `bfloat16`."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == 'torch' and node.attr in DTYPES:
            return ast.copy_location(ast.Name(node.attr, ast.Load()), node)
        return self.generic_visit(node)


class _Reader:
    """Checks a tree against the grammar; collects its parameters, and the errors."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: list[str] = []
        self.refused: list[str] = []
        self.depth = 0

    def refuse(self, node: ast.AST, why: str = '') -> ConditionError:
        dtypes = dict.fromkeys(repr(one.id) for one in ast.walk(node) if isinstance(one, ast.Name) and one.id in DTYPES)
        read = f' ({", ".join(dtypes)} is read as a dtype, also where a parameter has that name)' if dtypes else ''
        return ConditionError((why or f'{ast.unparse(node)!r} is not allowed') + read)

    def value(self, name: str) -> None:
        self.names.append(name)
        self.values.append(name)

    def part(self, node: ast.expr) -> None:
        """Checks the whole, or one side of an `and` or `or`; collects its error, so that other sides are checked, too."""
        depth = self.depth
        try:
            self.truth(node)
        except ConditionError as error:
            self.refused.append(str(error))
            self.depth = depth

    def truth(self, node: ast.expr) -> None:
        """Checks an expression that must be true or false."""
        if self.depth > _MOST_NESTED:
            raise ConditionError(f'more than {_MOST_NESTED} nested `and`, `or` and `not`; use a second rule')
        self.depth += 1
        match node:
            case ast.BoolOp(_, sides):
                for side in sides:
                    self.part(side)
            case ast.UnaryOp(ast.Not(), operand):
                self.truth(operand)
            case ast.Compare():
                self.comparison(node)
            case ast.Name(name) if name not in DTYPES:
                self.value(name)
            case _:
                raise self.refuse(node)
        self.depth -= 1

    def comparison(self, node: ast.Compare) -> None:
        if any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            if [ast.unparse(right) for right in node.comparators] != ['None']:
                raise self.refuse(node, '`is` is for None alone')
            if not isinstance(node.left, ast.Name) or node.left.id in DTYPES:
                raise self.refuse(node, 'only a parameter can be None')
            self.names.append(node.left.id)
            return
        left = self.operand(node.left)
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            word = _COMPARISONS[type(op)]
            right = self.choices(comparator) if word in ('in', 'not in') else self.operand(comparator)
            if 'any' not in (left, right) and left != right:
                raise self.refuse(node, f'{ast.unparse(node)!r} compares a {left} with a {right}')
            if word in _ORDERED and not {left, right} <= {'number', 'any'}:
                raise self.refuse(node, f'only numbers are larger or smaller: {ast.unparse(node)!r}')
            left = right
        if not any(_reads(one) for one in (node.left, *node.comparators)):
            raise self.refuse(node, f'{ast.unparse(node)!r} reads no parameter')

    def choices(self, node: ast.expr) -> str:
        """Returns the kind of the constants after `in`."""
        if not isinstance(node, (ast.Tuple, ast.List)) or not node.elts:
            raise self.refuse(node, '`in` wants a list of constants')
        kinds = {self.operand(one) for one in node.elts if not _reads(one)}
        if len(kinds) != 1 or any(_reads(one) for one in node.elts):
            raise self.refuse(node, '`in` wants a list of constants of one kind')
        return kinds.pop()

    def operand(self, node: ast.expr) -> str:
        """Returns the kind of one side of a comparison: number, string, bool, dtype, or any for a parameter."""
        match node:
            case ast.Constant() | ast.UnaryOp(ast.USub()) if _is_number(node):
                return 'number'
            case ast.Constant(bool()):
                return 'bool'
            case ast.Constant(str()):
                return 'string'
            case ast.Constant(None):
                raise self.refuse(node, 'None is compared by `is`')
            case ast.Name(name) if name in DTYPES:
                return 'dtype'
            case ast.Name(name):
                self.value(name)
                return 'any'
        name, attribute = _attribute(node)
        if not name:
            raise self.refuse(node)
        self.names.append(name)
        return {'dtype': 'dtype', 'device.type': 'string'}.get(attribute, 'number')


def _is_number(node: ast.expr) -> bool:
    value = getattr(node.operand if isinstance(node, ast.UnaryOp) else node, 'value', None)
    # no argument of a call is beyond these bounds
    return (type(value) is int and value < 2**64) or (isinstance(value, float) and math.isfinite(value))


def _attribute(node: ast.expr) -> tuple[str, str]:
    """Returns the parameter and what is read for `q.dtype`, `q.device.type` and `q.shape[1]`; ('', '') for anything else."""
    found = _ATTRIBUTE.fullmatch(ast.unparse(node))
    if not found or found[1] in DTYPES or keyword.iskeyword(found[1]) or int(found[3] or 0) > _MOST_DIMENSIONS:
        return '', ''
    return found[1], found[2] or 'shape'


def _reads(node: ast.expr) -> bool:
    """Whether an operand depends on the call."""
    return any(isinstance(one, ast.Name) and one.id not in DTYPES for one in ast.walk(node))


class _Emitter:
    """Writes a checked tree as source, with bound names for everything but parameters."""

    def __init__(self, bind: Callable[[str, Any], str], traced: bool, device_type: str | None) -> None:
        self.bind, self.traced, self.device_type = bind, traced, device_type

    def truth(self, node: ast.expr) -> str:
        match node:
            case ast.BoolOp(op, sides):
                return f'({(" and " if isinstance(op, ast.And) else " or ").join(map(self.truth, sides))})'
            case ast.UnaryOp(_, operand):
                return f'(not {self.truth(operand)})'
            case ast.Name(name):
                return f'{self.bind("flag", flag)}({name})'
            case ast.Compare(_, [ast.Is() | ast.IsNot()]):
                return f'({ast.unparse(node)})'
        assert isinstance(node, ast.Compare)
        words = ['', *(_COMPARISONS[type(op)] for op in node.ops), '']
        # a side between two comparisons belongs to both
        parts: list[str] = []
        for word, side, after in zip(words, (node.left, *node.comparators), words[1:], strict=False):
            parts += [word, self.operand(side, bool({word, after} & _ORDERED))]
        return f'({" ".join(parts[1:])})'

    def operand(self, node: ast.expr, is_ordered: bool = False) -> str:
        match node:
            case ast.Name(name) if name in DTYPES:
                return self.bind(name, DTYPES[name])
            case ast.Name(name):
                test = self.bind('ordered', ordered) if self.traced and is_ordered else self.bind('plain', plain)
                return f'{test}({name})'
            case ast.Tuple(items) | ast.List(items):
                return f'({", ".join(map(self.operand, items))},)'
        name, attribute = _attribute(node)
        if attribute == 'device.type' and self.device_type is not None and not name.endswith('_cpu'):
            return f'({self.bind("tensor", tensor)}({name}), {self.device_type!r})[1]'
        if not self.traced or not name:
            return ast.unparse(node)
        if isinstance(node, ast.Subscript):
            return f'{self.bind("size", size)}({name}, {ast.unparse(node.slice)})'
        return f'{self.bind("tensor", tensor)}({name}).{attribute}'
