"""The library operators behind an opaque kernel, and their gradient."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from fla.opaque.autograd import autograd_function, refuse_grad, refuse_tangents
from fla.opaque.declaration import Declaration, Kernel
from fla.opaque.vmap import register_vmap_loop


@dataclass
class Operators:
    """The operators and their kernels, which are replaced in place: compiled callers of a reloaded module stay valid."""

    declaration: Declaration
    origin: str
    library: torch.library.Library  # operators are deleted with it
    op: Any = None
    forward_op: Any = None
    backward_op: Any = None
    function: Any = None  # the autograd.Function around forward_op and backward_op


def define_operators(declaration: Declaration, origin: str) -> Operators:
    """Define the operators, or give new kernels to those that exist."""
    namespace, _, base = declaration.name.partition('::')
    packets = getattr(torch.ops, namespace)
    existing = [name for name in (base, f'{base}_forward', f'{base}_backward') if hasattr(packets, name)]
    # Stored on the operator itself, the one place that a second copy of this module sees too.
    operators = getattr(getattr(packets, base, None), '_fla_operators', None)
    if operators is not None:
        _replace_kernels(operators, declaration, origin)
    elif existing:
        raise ValueError(f'{namespace}::{existing[0]} is already defined by other code; choose another name')
    else:
        operators = _new_operators(declaration, origin)
        getattr(packets, base)._fla_operators = operators
    if declaration.backward is not None:
        operators.function = autograd_function(declaration, operators.forward_op, operators.backward_op, operator=True)
    return operators


def _new_operators(declaration: Declaration, origin: str) -> Operators:
    """Define three operators: the public one has the gradient and calls the other two, which have none.

    Tracing thus removes the Python kernel for autograd, which would take half of each compiled call (10 of 21 us).
    """
    namespace, _, base = declaration.name.partition('::')
    library: Any = torch.library.Library(namespace, 'FRAGMENT')  # type: ignore[no-untyped-call]
    operators = Operators(declaration, origin, library)

    def run(*args: Any) -> Any:
        results = _as_tuple(declaration.name, operators.declaration.forward(*args), len(declaration.results))
        _check_fresh(declaration.name, args, results)
        return _as_returned(results)

    def run_forward(*args: Any) -> Any:
        # Compiled code passes dual tensors in here, where their tangents are invisible.
        if forward_ad._current_level >= 0:
            raise RuntimeError(f'{declaration.name} is an opaque kernel: compiled code cannot run it inside forward-mode AD')
        return run(*args)

    def fake(*args: Any) -> Any:
        return operators.declaration.fake(*args)

    def run_backward(*args: Any) -> Any:
        now = operators.declaration
        assert now.backward is not None
        gradients = _as_tuple(f'{declaration.name}_backward', now.backward(*args), len(now.grads))
        if now.fake_backward is None:
            gradients = _conform(now, args, gradients)
        _check_fresh(f'{declaration.name}_backward', args, gradients)
        return _as_returned(gradients)

    def fake_backward(*args: Any) -> Any:
        now = operators.declaration
        return _default_fake_backward(now, args) if now.fake_backward is None else now.fake_backward(*args)

    def define(name: str, schema: str, run: Kernel, fake: Kernel) -> Any:
        # Keeps Inductor from changing strides that a verifier has looked at. torch 2.7 has only the older tag.
        strides = getattr(torch.Tag, 'needs_exact_strides', torch.Tag.needs_fixed_stride_order)
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, strides))
        torch.library.impl(f'{namespace}::{name}', declaration.devices, run, lib=library)
        torch.library.register_fake(f'{namespace}::{name}', fake, lib=library)
        op = getattr(getattr(torch.ops, namespace), name).default
        inputs = list(declaration.inputs)
        # right for the backward too: a kernel that writes has none
        register_vmap_loop(library, op, [(inputs.index(name), name) for name in declaration.mutated])
        return op

    try:
        operators.op = define(base, declaration.schema, run, fake)
    except RuntimeError as error:
        raise ValueError(f'{declaration.name}: PyTorch cannot take schema={declaration.schema!r}: {error}') from error
    operators.forward_op = define(f'{base}_forward', declaration.schema, run_forward, fake)
    if declaration.backward is not None:
        operators.backward_op = define(f'{base}_backward', declaration.backward_schema, run_backward, fake_backward)
    library.impl(base, partial(_autograd_kernel, operators), 'Autograd', with_keyset=True)
    return operators


def _autograd_kernel(operators: Operators, keyset: Any, *args: Any) -> Any:
    """The public operator's autograd kernel: records a gradient, refuses, or calls the operators below autograd."""
    if forward_ad._current_level >= 0:
        refuse_tangents(operators.declaration, args)
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
        refuse_grad(operators.declaration, args)
        return operators.function.apply(*args)
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        # forward_op would be wrong: an outer level of torch.func may differentiate and must meet this kernel again.
        return operators.op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
    return operators.forward_op(*args)


def _replace_kernels(old: Operators, new: Declaration, origin: str) -> None:
    for field in ('schema', 'backward_schema', 'devices'):
        before, after = getattr(old.declaration, field), getattr(new, field)
        if before != after:
            raise ValueError(
                f'{new.name} is defined in {old.origin} with {field} {before!r}, now {after!r}; '
                'these cannot change in one process: choose another name, or restart the process'
            )
    if old.origin != origin:
        warnings.warn(f'{new.name} is defined in {old.origin} and again in {origin}; the latter is used now', stacklevel=4)
    old.declaration, old.origin = new, origin


def _as_tuple(name: str, results: Any, count: int) -> tuple[Any, ...]:
    """A kernel's results as a tuple (extensions also return lists), checked against the schema."""
    several = (results,) if count == 1 else tuple(results or ())
    if len(several) != count or any(x is not None and not isinstance(x, torch.Tensor) for x in several):
        raise RuntimeError(f'{name}: the kernel returned {results!r:.80}, its schema says {count} results')
    return several


def _as_returned(results: tuple[Any, ...]) -> Any:
    return results if len(results) > 1 else results[0] if results else None


def _check_fresh(name: str, args: tuple[Any, ...], results: tuple[Any, ...]) -> None:
    """Refuse results that share memory with an argument or each other: compiled code would compute wrong numbers."""
    taken = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
    for place, result in enumerate(results):
        if result is not None:
            memory = result.untyped_storage().data_ptr()
            if memory and memory in taken:
                raise RuntimeError(
                    f'{name}: result {place} shares memory with an argument or an earlier result; '
                    'return new memory (clone() it)'
                )
            taken.add(memory)


def _differentiated(declaration: Declaration, args: tuple[Any, ...]) -> list[torch.Tensor | None]:
    """For each gradient its input, or None where none is to be computed."""
    values = dict(zip(declaration.backward_inputs, args, strict=True))
    needs = values.get('needs_input_grad', [True] * len(declaration.grads))
    return [values[name] if need else None for name, need in zip(declaration.grads, needs, strict=True)]


def _default_fake_backward(declaration: Declaration, args: tuple[Any, ...]) -> Any:
    gradients = tuple(
        None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in _differentiated(declaration, args)
    )
    return _as_returned(gradients)


def _conform(declaration: Declaration, args: tuple[Any, ...], gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert gradients to what `_default_fake_backward` promised, which eager autograd does by itself."""
    conformed: list[torch.Tensor | None] = []
    for name, like, gradient in zip(declaration.grads, _differentiated(declaration, args), gradients, strict=True):
        if like is None:
            conformed.append(None)
        elif gradient is None or gradient.shape != like.shape:
            shape = None if gradient is None else tuple(gradient.shape)
            raise RuntimeError(
                f'{declaration.name}: backward returned {shape} as gradient of {name!r}, which has shape {tuple(like.shape)}'
            )
        else:
            conformed.append(gradient.to(like.dtype).contiguous())
    return tuple(conformed)
