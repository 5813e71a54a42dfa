"""When a rule of a policy holds: a small expression over a function's own parameters.

    q.dtype == bfloat16 and q.shape[1] >= 4096 and cu_seqlens is None

It knows comparisons (chained, and `in` a list of constants), `and`, `or`, `not`, `is None`, a parameter by its name, and of
a tensor `.dtype`, `.shape[i]` and `.device.type`. Nothing it knows looks at the numbers of a tensor, calls anything or
changes anything, so that it may stand in the code of a call. On a call that gives it no answer (an attribute of None, a
dimension that is not there, a tensor where a number is compared) its code raises, and it does not hold.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fla.backends.core.errors import DispatchError
from fla.backends.core.signature import Signature
from fla.utils.env import nearest

GRAMMAR = (
    'comparisons, `and`, `or`, `not`, `is None`, parameters, and of tensors `.dtype`, `.shape[i]` and `.device.type`, '
    'compared with numbers, strings, True, False and dtypes such as bfloat16'
)
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

_COMPARISONS = {
    ast.Eq: '==',
    ast.NotEq: '!=',
    ast.Lt: '<',
    ast.LtE: '<=',
    ast.Gt: '>',
    ast.GtE: '>=',
    ast.In: 'in',
    ast.NotIn: 'not in',
}
# Python's own parser stops at 200 parentheses, and the generated code has some for each `and`, `or` and `not` in another.
_MOST_NESTED = 32
# Far beyond what anybody writes, and what takes no time to read.
_MOST_CHARACTERS = 10_000
# What a tensor has of them at most.
_MOST_DIMENSIONS = 64
_ORDERED = ('<', '<=', '>', '>=')


class ConditionError(DispatchError, ValueError):
    """A `when` that is no condition, does not fit the function, or cannot be evaluated on a call."""


@dataclass(frozen=True)
class Condition:
    """A checked `when`. Two that differ in white space, parentheses or remarks are one.

    Attributes:
        text: as it was written.
        meaning: the same however it is written.

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
        """Why it does not fit a function; empty if it does."""
        known = ', '.join(signature.names)
        tensors = {*signature.tensors, *signature.tensor_groups} if signature.annotated else set()
        return [
            f'there is no parameter {name!r}.{nearest(name, [*signature.names, *DTYPES])} There are {known}'
            for name in self.parameters
            if name not in signature.names
        ] + [
            f'{name!r} is a tensor, whose numbers are not looked at: name its .dtype, .shape[i] or .device.type'
            for name in _parsed(self.text).values
            if name in tensors
        ]

    def source(self, bind: Callable[[str, Any], str], *, traced: bool = False, device_type: str | None = None) -> str:
        """As an expression of generated code. `bind(name, value)` gives a value a name there.

        Args:
            device_type: what every tensor's is to be taken for, but for parameters named `…_cpu`.
            traced: for Dynamo, in which what Python answers with an exception may end the trace instead: a dimension that
                is not there and, in torch 2.7, an attribute of None or None compared with a number.
        """
        return _Emitter(bind, traced, device_type).truth(_parsed(self.text).tree)


def flag(value: Any) -> bool:
    """A parameter that stands alone, which is True or False. Generated code calls it."""
    if value is True or value is False:
        return bool(value)
    raise TypeError('neither True nor False')


def size(tensor: Any, index: int) -> Any:
    """A dimension of a tensor that has it. Generated code calls it."""
    if not isinstance(tensor, torch.Tensor) or not -tensor.dim() <= index < tensor.dim():
        raise TypeError('no such dimension')
    return tensor.shape[index]


def tensor(value: Any) -> torch.Tensor:
    """A parameter an attribute of which is read. Generated code calls it."""
    if not isinstance(value, torch.Tensor):
        raise TypeError('no tensor')
    return value


def ordered(value: Any) -> Any:
    """A parameter that is larger or smaller than a number. Generated code calls it."""
    if value is None or isinstance(value, (torch.Tensor, str, tuple, list)):
        raise TypeError('neither larger nor smaller')
    return value


def plain(value: Any) -> Any:
    """A parameter that is compared: never a tensor, whose numbers that would look at. Generated code calls it."""
    if isinstance(value, torch.Tensor):
        raise TypeError('a tensor is not compared')
    return value


@dataclass(frozen=True)
class _Parsed:
    """names: all parameters. values: those compared, or asked for truth, themselves."""

    tree: ast.expr
    meaning: str
    names: tuple[str, ...]
    values: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> _Parsed:
    if len(text) > _MOST_CHARACTERS:
        raise ConditionError(f'a condition has {_MOST_CHARACTERS} characters at most, {text[:40]!r}... has {len(text)}')
    try:
        # several lines are one expression, as within parentheses; those of the text have to be its own: `a) or (b`
        tree = _BareDtypes().visit(ast.parse(f'({text}\n)', mode='eval').body)
        whole = isinstance(ast.parse(f'[{text}\n]', mode='eval').body, (ast.List, ast.ListComp))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConditionError(f'{text!r} is no expression: {getattr(error, "msg", error)}') from None
    if not whole:
        raise ConditionError(f'{text!r} is no expression: unbalanced parentheses')
    reader = _Reader()
    try:
        reader.part(tree)
    except RecursionError:
        raise ConditionError('a condition is nested too deep') from None
    except ValueError as error:  # a number with more digits than Python prints
        raise ConditionError(f'{text[:40]!r}...: {error}') from None
    if reader.refused:
        raise ConditionError(f'{text!r}: {"; ".join(reader.refused)}. A condition knows {GRAMMAR}')
    return _Parsed(tree, ast.unparse(tree), tuple(dict.fromkeys(reader.names)), tuple(dict.fromkeys(reader.values)))


class _BareDtypes(ast.NodeTransformer):
    """`torch.bfloat16` is `bfloat16`."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == 'torch' and node.attr in DTYPES:
            return ast.copy_location(ast.Name(node.attr, ast.Load()), node)
        return self.generic_visit(node)


class _Reader:
    """Checks a tree against the grammar and collects its parameters, and what is not in the grammar."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: list[str] = []
        self.refused: list[str] = []
        self.depth = 0

    def refuse(self, node: ast.AST, why: str = '') -> ConditionError:
        dtypes = dict.fromkeys(repr(one.id) for one in ast.walk(node) if isinstance(one, ast.Name) and one.id in DTYPES)
        read = f' ({", ".join(dtypes)} is read as a dtype, also where a parameter has that name)' if dtypes else ''
        return ConditionError((why or f'{ast.unparse(node)!r} is not allowed') + read)

    def part(self, node: ast.expr) -> None:
        """One side of an `and` or `or`, or the whole: what is wrong with it does not hide what is wrong with the others."""
        depth = self.depth
        try:
            self.truth(node)
        except ConditionError as error:
            self.refused.append(str(error))
            self.depth = depth

    def truth(self, node: ast.expr) -> None:
        """What stands where true or false is wanted."""
        if self.depth > _MOST_NESTED:
            raise ConditionError(
                f'more than {_MOST_NESTED} of `and`, `or` and `not` in each other; give the rule a second one'
            )
        self.depth += 1
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                self.part(value)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.truth(node.operand)
        elif isinstance(node, ast.Compare):
            self.comparison(node)
        elif isinstance(node, ast.Name) and node.id not in DTYPES:
            self.names.append(node.id)
            self.values.append(node.id)
        else:
            raise self.refuse(node)
        self.depth -= 1

    def comparison(self, node: ast.Compare) -> None:
        if any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            right = node.comparators[0]
            if len(node.ops) > 1 or not (isinstance(right, ast.Constant) and right.value is None):
                raise self.refuse(node, '`is` is for None alone')
            if not isinstance(node.left, ast.Name) or node.left.id in DTYPES:
                raise self.refuse(node, 'only a parameter can be None')
            self.names.append(node.left.id)
            return
        kinds = [self.operand(node.left)]
        for op, right in zip(node.ops, node.comparators, strict=True):
            word = _COMPARISONS[type(op)]
            if word in ('in', 'not in'):
                kinds.append(self.choices(right))
            else:
                kinds.append(self.operand(right))
            self.fits(node, kinds[-2], word, kinds[-1])
        if not any(_reads(one) for one in (node.left, *node.comparators)):
            raise self.refuse(node, f'{ast.unparse(node)!r} reads no parameter')

    def choices(self, node: ast.expr) -> str:
        if not isinstance(node, (ast.Tuple, ast.List)) or not node.elts:
            raise self.refuse(node, '`in` wants a list of constants')
        kinds = {self.operand(one) for one in node.elts if not _reads(one)}
        if len(kinds) != 1 or any(_reads(one) for one in node.elts):
            raise self.refuse(node, '`in` wants a list of constants of one kind')
        return kinds.pop()

    def fits(self, node: ast.AST, left: str, word: str, right: str) -> None:
        if 'any' not in (left, right) and left != right:
            raise self.refuse(node, f'{ast.unparse(node)!r} compares a {left} with a {right}')
        if word in _ORDERED and not {left, right} <= {'number', 'any'}:
            raise self.refuse(node, f'only numbers are larger or smaller: {ast.unparse(node)!r}')

    def operand(self, node: ast.expr) -> str:
        """The kind of a side of a comparison: number, string, bool, dtype, or any for a parameter."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and _number(node.operand):
            return 'number'
        if isinstance(node, ast.Constant):
            if _number(node):
                return 'number'
            if isinstance(node.value, (bool, str)):
                return 'bool' if isinstance(node.value, bool) else 'string'
            raise self.refuse(node, 'None is compared by `is`' if node.value is None else '')
        if isinstance(node, ast.Name):
            if node.id in DTYPES:
                return 'dtype'
            self.names.append(node.id)
            self.values.append(node.id)
            return 'any'
        name, attribute = _attribute(node)
        if name is None:
            raise self.refuse(node)
        self.names.append(name)
        return {'dtype': 'dtype', 'device.type': 'string'}.get(attribute, 'number')


def _number(node: ast.expr) -> bool:
    if not isinstance(node, ast.Constant) or isinstance(node.value, bool):
        return False
    # no call has a number that is beyond all numbers
    if isinstance(node.value, int):
        return abs(node.value) < 2**64
    return isinstance(node.value, float) and math.isfinite(node.value)


def _attribute(node: ast.expr) -> tuple[str | None, str]:
    """Of `q.dtype`, `q.device.type` and `q.shape[1]`: the parameter and what is read; (None, '') for anything else."""
    found = ''
    if isinstance(node, ast.Attribute) and node.attr == 'dtype':
        node, found = node.value, 'dtype'
    elif isinstance(node, ast.Attribute) and node.attr == 'type':
        inner = node.value
        if isinstance(inner, ast.Attribute) and inner.attr == 'device':
            node, found = inner.value, 'device.type'
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == 'shape':
        index = node.slice
        if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub):
            index = index.operand
        if isinstance(index, ast.Constant) and type(index.value) is int and index.value <= _MOST_DIMENSIONS:
            node, found = node.value.value, 'shape'
    if found and isinstance(node, ast.Name) and node.id not in DTYPES:
        return node.id, found
    return None, ''


def _reads(node: ast.expr) -> bool:
    """Whether an operand depends on the call."""
    return any(isinstance(one, ast.Name) and one.id not in DTYPES for one in ast.walk(node))


class _Emitter:
    """Writes a checked tree with the generator's own names for what is not a parameter."""

    def __init__(self, bind: Callable[[str, Any], str], traced: bool, device_type: str | None) -> None:
        self.bind, self.traced, self.device_type = bind, traced, device_type

    def truth(self, node: ast.expr) -> str:
        if isinstance(node, ast.BoolOp):
            word = ' and ' if isinstance(node.op, ast.And) else ' or '
            return f'({word.join(map(self.truth, node.values))})'
        if isinstance(node, ast.UnaryOp):
            return f'(not {self.truth(node.operand)})'
        if isinstance(node, ast.Name):
            return f'{self.bind("flag", flag)}({node.id})'
        assert isinstance(node, ast.Compare)
        if isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            return f'({ast.unparse(node)})'
        words = [_COMPARISONS[type(op)] for op in node.ops]
        # a side that stands between two comparisons belongs to both
        is_ordered = [bool({*words[max(0, i - 1) : i + 1]} & {*_ORDERED}) for i in range(len(words) + 1)]
        parts = [self.operand(node.left, is_ordered[0])]
        for word, right, larger in zip(words, node.comparators, is_ordered[1:], strict=True):
            parts += [word, self.operand(right, larger)]
        return f'({" ".join(parts)})'

    def operand(self, node: ast.expr, is_ordered: bool = False) -> str:
        if isinstance(node, ast.Name) and node.id in DTYPES:
            return self.bind(node.id, DTYPES[node.id])
        if isinstance(node, ast.Name):
            test = self.bind('ordered', ordered) if self.traced and is_ordered else self.bind('plain', plain)
            return f'{test}({node.id})'
        if isinstance(node, (ast.Tuple, ast.List)):
            return f'({", ".join(map(self.operand, node.elts))},)'
        name, attribute = _attribute(node)
        if attribute == 'device.type' and name is not None and self.device_type is not None and not name.endswith('_cpu'):
            return f'({self.bind("tensor", tensor)}({name}), {self.device_type!r})[1]'
        if not self.traced or name is None:
            return ast.unparse(node)
        if isinstance(node, ast.Subscript):
            return f'{self.bind("size", size)}({name}, {ast.unparse(node.slice)})'
        return f'{self.bind("tensor", tensor)}({name}).{attribute}'
