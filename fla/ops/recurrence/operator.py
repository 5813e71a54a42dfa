"""Declares the kernels of a chunked delta rule as one opaque operator `(*inputs, *options) -> (o, final_state, …)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch

from fla.opaque import OpaqueKernel, opaque
from fla.ops.launch.triton_call import DEVICES
from fla.ops.recurrence.arguments import Gradients, Inputs, Options

_SCHEMA_TYPES = {
    torch.Tensor: 'Tensor',
    torch.Tensor | None: 'Tensor?',
    bool: 'bool',
    float | None: 'float?',
}
_INPUTS = len(Inputs._fields)
_ALL = _INPUTS + len(Options._fields)


def declare(
    name: str,
    *,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    intermediates: Sequence[str],
    results: Sequence[str] = (),
) -> OpaqueKernel:
    """The operator `name`, such as 'fla::chunk_kda'.

    Args:
        forward: takes `(*inputs, *options)`; returns o, the final state, `results` and `intermediates`, any of them None.
        fake: the same with empty tensors.
        backward: takes `(*inputs, *options, *intermediates, do, dfinal_state)`; returns `Gradients`.
        intermediates: names of tensors that only the backward reads.
        results: names of further results, which have no gradient.
    """
    types = get_type_hints(Inputs) | get_type_hints(Options)
    schema = ', '.join(f'{_SCHEMA_TYPES[kind]} {argument}' for argument, kind in types.items())
    more = ''.join(f', Tensor? {one}' for one in (*results, *intermediates))

    def named_backward(*arguments: Any) -> Any:
        return backward(*arguments)

    # `opaque` reads from the names which tensors it must save
    names = (*types, *intermediates, 'do', 'dfinal_state')
    parameters = [inspect.Parameter(one, inspect.Parameter.POSITIONAL_OR_KEYWORD) for one in names]
    named_backward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return opaque(
        name,
        schema=f'({schema}) -> (Tensor o, Tensor? final_state{more})',
        forward=forward,
        fake=fake,
        backward=named_backward,
        grads=Gradients._fields,
        intermediates=intermediates,
        non_differentiable=results,
        devices=DEVICES,
    )


def unpack(arguments: tuple[Any, ...]) -> tuple[Inputs, Options, tuple[Any, ...]]:
    """The arguments of the operator, or of its backward: inputs, options, and the arguments after them."""
    return Inputs(*arguments[:_INPUTS]), Options(*arguments[_INPUTS:_ALL]), arguments[_ALL:]


def shaped_like(inputs: Inputs, gradients: Gradients) -> Gradients:
    """The gradients with those of A_log and dt_bias, which kernels take flat, in the shape of the inputs."""
    A_log, dt_bias = gradients.A_log, gradients.dt_bias
    if inputs.A_log is not None and A_log is not None:
        A_log = A_log.reshape(inputs.A_log.shape)
    if inputs.dt_bias is not None and dt_bias is not None:
        dt_bias = dt_bias.reshape(inputs.dt_bias.shape)
    return gradients._replace(A_log=A_log, dt_bias=dt_bias)
