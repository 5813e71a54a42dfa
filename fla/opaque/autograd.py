"""The generated `autograd.Function` of the eager path and of the operator, and the derivatives that it refuses."""

from __future__ import annotations

import linecache
from typing import Any

import torch
from torch.autograd import forward_ad

from fla.opaque.declaration import Declaration, Kernel
from fla.opaque.vmap import loop_under_vmap


def autograd_function(declaration: Declaration, forward: Kernel, backward: Kernel, *, operator: bool) -> Any:
    """An `autograd.Function` around `forward` and `backward`: the kernels themselves, or with `operator` the operators."""
    base = declaration.name.partition('::')[2]
    source = _function_source(declaration, operator)
    filename = f'<opaque {declaration.name} {"operator" if operator else "eager"} autograd>'
    generated = generate(filename, source, {'_forward': forward, '_backward': loop_under_vmap(backward)})
    body = {
        'forward': staticmethod(generated['forward']),
        'backward': staticmethod(_once(declaration.name, generated['backward'])),
    }
    return type(f'{base}_function', (torch.autograd.Function,), body)


def _function_source(declaration: Declaration, operator: bool) -> str:
    """The text of forward and backward. For an operator, forward returns the intermediates too: they are its results."""
    arguments = list(declaration.inputs)
    returned = list(declaration.results) if operator else declaration.visible
    fixed = ', '.join(name for name in returned if name in declaration.non_differentiable + declaration.intermediates)
    values = {**declaration.inputs, **declaration.results}
    needed = [name for name in declaration.backward_inputs if name in values]
    saved = [name for name in needed if values[name].startswith('Tensor')]
    constants = [name for name in needed if name not in saved]
    needs = ''.join(f'ctx.needs_input_grad[{arguments.index(name)}], ' for name in declaration.grads)
    passed = [f'({needs})' if name == 'needs_input_grad' else name for name in declaration.backward_inputs]
    lines = [
        f'def forward(ctx, {", ".join(arguments)}):',
        f'    {", ".join(declaration.results)} = _forward({", ".join(arguments)})',
        f'    ctx.save_for_backward({", ".join(saved)})',
    ]
    if constants:
        lines.append(f'    ctx.constants = ({", ".join(constants)},)')
    if fixed:
        lines.append(f'    ctx.mark_non_differentiable(*[_one for _one in ({fixed},) if _one is not None])')
    lines += [
        f'    return {", ".join(returned)}',
        '',
        f'def backward(ctx, {", ".join(f"d{name}" for name in returned)}):',
    ]
    if saved:
        lines.append(f'    {", ".join(saved)}, = ctx.saved_tensors')
    if constants:
        lines.append(f'    {", ".join(constants)}, = ctx.constants')
    gradients = [f'd{name}' if name in declaration.grads else 'None' for name in arguments]
    lines += [
        f'    {", ".join(f"d{name}" for name in declaration.grads)} = _backward({", ".join(passed)})',
        f'    return {", ".join(gradients)}',
    ]
    return '\n'.join(lines)


def _once(name: str, backward: Kernel) -> Kernel:
    """Refuse double backward. `once_differentiable` would silently give zeros for what depends on saved tensors alone."""

    def once(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f'create_graph=True reached the backward of {name}, an opaque kernel without a derivative of its own; '
                'use an implementation in plain PyTorch for double backward'
            )
        return backward(ctx, *gradients)

    return once


def generate(filename: str, source: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Execute generated source in `namespace` and return it; tracebacks show the source.

    The namespace has no `__name__`: Dynamo would look globals up in the module of that name.
    """
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, 'exec'), namespace)
    return namespace


def refuse_grad(declaration: Declaration, args: tuple[Any, ...]) -> None:
    """Raise RuntimeError for an argument that requires grad where the kernel cannot give one."""
    for name, value in zip(declaration.inputs, args, strict=True):
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            continue
        if name not in declaration.grads:
            lack = 'no backward' if declaration.backward is None else f'no gradient for {name!r}'
            raise RuntimeError(
                f'{declaration.name} has {lack}, and {name!r} requires grad; '
                f'call it under torch.no_grad(), or detach() {name!r}'
            )
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f'{declaration.name} is an opaque kernel: torch.func cannot differentiate it by {name!r}; '
                'use loss.backward(), or an implementation in plain PyTorch'
            )


def refuse_tangents(declaration: Declaration, args: tuple[Any, ...]) -> None:
    """Raise RuntimeError for an argument with a forward-mode tangent."""
    for name, value in zip(declaration.inputs, args, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        if forward_ad.unpack_dual(value).tangent is not None:  # type: ignore[no-untyped-call]
            raise RuntimeError(
                f'{declaration.name} is an opaque kernel: forward-mode AD cannot follow {name!r} into it; '
                'use an implementation in plain PyTorch'
            )
