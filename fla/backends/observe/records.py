"""The record of one call: enough to select a backend for it under another policy. It holds no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fla.backends.core.spec import FunctionSpec
from fla.backends.core.tensors import same

# Types of flags besides dtypes, which are written {'dtype': 'bfloat16'}.
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Record:
    """One dispatched call.

    Attributes:
        function: 'operation.function'.
        backend: the backend that ran. Under on_error='fallback' each backend that was tried has a record.
        tensors: parameter → (dtype, shape, device) of tensor arguments; empty for a compiled call.
        flags: parameter → value of numbers, booleans, strings, dtypes and None that differ from their default.
        compiled: recorded while a region was traced, not at a call.
        strides: parameter → strides in elements, of non-contiguous tensors.
        requires_grad: parameters whose tensor requires grad.
        grad_mode: whether gradients were enabled.
        lost: other arguments that differ from their default, such as nested, sparse and quantised tensors.
    """

    function: str
    backend: str
    tensors: Mapping[str, tuple[str, tuple[int, ...], str]]
    flags: Mapping[str, Any]
    compiled: bool
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    requires_grad: tuple[str, ...] = ()
    grad_mode: bool = True
    lost: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values. Default values of `strides` and later fields are left out."""
        later: dict[str, Any] = {
            'strides': {n: list(s) for n, s in self.strides.items()},
            'requires_grad': list(self.requires_grad),
            'lost': list(self.lost),
        }
        return {
            'function': self.function,
            'backend': self.backend,
            'tensors': {n: {'dtype': d, 'shape': list(s), 'device': v} for n, (d, s, v) in self.tensors.items()},
            'flags': {n: {'dtype': _name(v)} if isinstance(v, torch.dtype) else v for n, v in self.flags.items()},
            'compiled': self.compiled,
            **{name: value for name, value in later.items() if value},
            **({} if self.grad_mode else {'grad_mode': False}),
        }

    def arguments(self, device_of: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The call's arguments, with new uninitialised tensors. `device_of`: parameter → another device."""
        made = dict(self.flags)
        for name, (dtype, shape, device) in self.tensors.items():
            where = (device_of or {}).get(name, device)
            kind, strides = getattr(torch, dtype), self.strides.get(name)
            if strides is None:
                tensor = torch.empty(shape, dtype=kind, device=where)
            else:
                tensor = torch.empty_strided(shape, strides, dtype=kind, device=where)
            made[name] = tensor.requires_grad_(name in self.requires_grad)
        return made

    def __str__(self) -> str:
        words = []
        for name, (dtype, shape, device) in self.tensors.items():
            more = f' strides {list(self.strides[name])}' if name in self.strides else ''
            more += ' requires_grad' if name in self.requires_grad else ''
            words.append(f'{name}: {dtype}{list(shape)} on {device}{more}')
        words += [f'{name}={value!r}' for name, value in self.flags.items()]
        return ', '.join(words) + ('' if self.grad_mode else '; no_grad')


def record_of(spec: FunctionSpec, backend: str, arguments: Mapping[str, Any] | None) -> Record:
    """The record of a call. `arguments` is None for a call that is being compiled."""
    if arguments is None:
        return Record(spec.key, backend, {}, {}, compiled=True)
    tensors: dict[str, tuple[str, tuple[int, ...], str]] = {}
    flags: dict[str, Any] = {}
    strides: dict[str, tuple[int, ...]] = {}
    wanting, lost = [], []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            shape = _shape(value)
            if shape is None:
                lost.append(name)
                continue
            tensors[name] = _name(value.dtype), shape, str(value.device)
            if not value.is_contiguous():
                strides[name] = value.stride()
            if value.requires_grad:
                wanting.append(name)
        elif name in (spec.signature.var_positional, spec.signature.var_keyword):
            if value:
                lost.append(name)
        elif not same(value, spec.signature.default(name)):
            if type(value) in PLAIN or isinstance(value, torch.dtype):
                flags[name] = value
            else:
                lost.append(name)
    grad_mode = torch.is_grad_enabled()
    return Record(spec.key, backend, tensors, flags, False, strides, tuple(wanting), grad_mode, tuple(lost))


def _shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """None for a tensor that shape and strides do not describe: nested, sparse, quantised, of symbolic sizes, or a lazily
    conjugated or negated view."""
    is_other = tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized
    if is_other or tensor.is_conj() or tensor.is_neg():
        return None
    numbers = (*tensor.shape, *tensor.stride())
    return tuple(tensor.shape) if all(type(number) is int for number in numbers) else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix('torch.')
