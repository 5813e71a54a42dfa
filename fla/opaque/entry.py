"""The function that callers hold: it chooses between the kernel itself (the eager path) and the operator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch.autograd import forward_ad

from fla.opaque.autograd import autograd_function, generate, refuse_grad
from fla.opaque.declaration import Declaration
from fla.opaque.operators import Operators

# A kernel takes a Parameter like a plain tensor; other subclasses may have no memory behind them.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_PLAIN_OR_NONE = _PLAIN | {type(None)}


def takes_eager_path(*tensors: torch.Tensor | None) -> bool:
    """Whether an opaque kernel takes its eager path for these tensors, if they are on its device.

    Generated entry points have the same test inline.
    """
    return not (
        torch.compiler.is_dynamo_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or any(type(tensor) not in _PLAIN_OR_NONE for tensor in tensors)
    )


class OpaqueKernel(Protocol):
    """The function that `opaque()` returns. It takes the schema's arguments, by position or keyword.

    Attributes:
        op: the library operator, which exported programs hold and `torch.library.opcheck` takes.
        forward_op: the operator below autograd, which compiled graphs, dispatch modes and selective checkpointing see.
        backward_op: the same for the gradient; None without a backward.
    """

    op: Any
    forward_op: Any
    backward_op: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def entry_point(declaration: Declaration, operators: Operators) -> OpaqueKernel:
    """Generate the public function of a declaration."""
    namespace: dict[str, Any] = {
        '_PLAIN': _PLAIN,
        '_PLAIN_OR_NONE': _PLAIN_OR_NONE,
        '_forward_ad': forward_ad,
        '_is_dynamo_compiling': torch.compiler.is_dynamo_compiling,
        '_is_grad_enabled': torch.is_grad_enabled,
        '_transforms_active': torch._C._are_functorch_transforms_active,
        '_dispatch_modes': torch._C._len_torch_dispatch_stack,
        '_refuse_grad': partial(refuse_grad, declaration),
        '_kernel': declaration.forward,
        '_op': operators.op,
    }
    if declaration.backward is not None:
        namespace['_Function'] = autograd_function(declaration, declaration.forward, declaration.backward, operator=False)
    base = declaration.name.partition('::')[2]
    function = generate(f'<opaque {declaration.name}>', _entry_source(declaration, base), namespace)[base]
    function.__doc__ = f'Opaque kernel `{declaration.name}{declaration.schema}`.'
    function.op, function.forward_op, function.backward_op = operators.op, operators.forward_op, operators.backward_op
    return cast(OpaqueKernel, function)


def _entry_source(declaration: Declaration, base: str) -> str:
    """The text of the public function. Straight-line: each generic loop in it would cost as much as a small kernel."""
    arguments = ', '.join(declaration.inputs)
    plain = ' and '.join(
        f'type({name}) in {"_PLAIN" if declaration.inputs[name] == "Tensor" else "_PLAIN_OR_NONE"}'
        for name in declaration.tensors
    )
    first = declaration.tensors[0]
    on_device = ' or '.join(
        f'{first}.is_{device}' if hasattr(torch.Tensor, f'is_{device}') else f'{first}.device.type == {device!r}'
        for device in declaration.devices
    )
    constants = [name for name in declaration.tensors if name not in declaration.grads]
    lines = [
        f'def {base}({arguments}):',
        f'    if (not _is_dynamo_compiling() and {plain} and ({on_device})',
        '            and not _transforms_active() and _forward_ad._current_level < 0 and not _dispatch_modes()):',
        '        if _is_grad_enabled():',
    ]
    if constants:
        lines.append(f'            if {_requires_grad(declaration, constants)}: _refuse_grad(({arguments},))')
    if declaration.backward is not None:
        lines.append(f'            if {_requires_grad(declaration, declaration.grads)}: return _Function.apply({arguments})')
    lines += _call_and_return(declaration, '_kernel', '        ')
    lines += _call_and_return(declaration, '_op', '    ')
    return '\n'.join(lines)


def _requires_grad(declaration: Declaration, names: Sequence[str]) -> str:
    return ' or '.join(
        f'{name}.requires_grad' if declaration.inputs[name] == 'Tensor' else f'({name} is not None and {name}.requires_grad)'
        for name in names
    )


def _call_and_return(declaration: Declaration, callee: str, indent: str) -> list[str]:
    call = f'{callee}({", ".join(declaration.inputs)})'
    if not declaration.results:
        return [f'{indent}{call}', f'{indent}return None']
    return [f'{indent}{", ".join(declaration.results)} = {call}', f'{indent}return {", ".join(declaration.visible)}']
