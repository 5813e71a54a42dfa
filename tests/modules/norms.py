"""The norms, called as users call them, against their definitions in float64. Interpreted on a CPU and compiled on a GPU,
the Triton kernels are held to the same bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fla.backends import trace, use_backend
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.modules.norm.l2norm import l2norm
from fla.modules.norm.layernorm import group_norm, layer_norm, rms_norm
from tests import bounds

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# name -> function, options; covers every kind, activation and output of the kernels
KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    'rms': (rms_norm, {}),
    'rms prenorm': (rms_norm, {'prenorm': True}),
    'layer': (layer_norm, {}),
    'layer prenorm': (layer_norm, {'prenorm': True}),
    'groups': (group_norm, {'num_groups': 4}),
    'rms groups': (group_norm, {'num_groups': 4, 'is_rms_norm': True, 'prenorm': True}),
    'swish': (rms_norm_gated, {'activation': 'swish'}),
    'sigmoid': (rms_norm_gated, {'activation': 'sigmoid', 'prenorm': True}),
    'l2': (l2norm, {}),
}
BARE: tuple[str, ...] = ()
EVERYTHING = ('weight', 'bias', 'residual')


def given(kind: str, shape, dtype=FP32, extras=EVERYTHING, wide=(), device='cpu', seed=0) -> dict[str, torch.Tensor]:
    """The tensors of a call; those in `wide` in float32."""
    generator = torch.Generator().manual_seed(seed)
    function = KINDS[kind][0]
    names = ['x', *(['g'] if function is rms_norm_gated else []), *(() if function is l2norm else extras)]
    made = {}
    for name in names:
        size = shape[-1:] if name in ('weight', 'bias') else shape
        made[name] = torch.randn(size, generator=generator).to(device, FP32 if name in wide else dtype)
    return made


def oracle(
    kind: str,
    x,
    g=None,
    weight=None,
    bias=None,
    residual=None,
    eps=None,
    activation='swish',
    is_rms_norm=False,
    num_groups=1,
    prenorm=False,
    **_,
) -> tuple[torch.Tensor, ...]:
    """The definition in plain PyTorch, in the dtype of the arguments."""
    function = KINDS[kind][0]
    eps = (1e-6 if function in (l2norm, rms_norm_gated) else 1e-5) if eps is None else eps
    total = x if residual is None else x + residual
    groups = total.unflatten(-1, (num_groups, -1)) if num_groups > 1 else total
    if function in (layer_norm, group_norm) and not is_rms_norm:
        groups = groups - groups.sum(-1, keepdim=True) / groups.shape[-1]
    squares = groups.pow(2).sum(-1, keepdim=True)
    y = groups / (squares / (1 if function is l2norm else groups.shape[-1]) + eps).sqrt()
    y = y.reshape(x.shape)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    if g is not None:
        gate = 1 / (1 + torch.exp(-g))
        y = y * (gate if activation == 'sigmoid' else g * gate)
    return (y, total) if prenorm else (y,)


def call(kind: str, tensors: dict[str, torch.Tensor], backend: str = 'default', **more) -> tuple[torch.Tensor, ...]:
    """The results of this backend; fails if another one serves."""
    function, options = KINDS[kind]
    if function is not l2norm:
        tensors = {'weight': None, **tensors}
    with use_backend(backend, op='modules'), trace() as recorded:
        out = function(**tensors, **(options | more))
    assert recorded.last_backend(f'modules.{function.__name__}') == backend
    return out if isinstance(out, tuple) else (out,)


def upstream(results: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Incoming gradients, the same on every device."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(x.shape, generator=generator).to(x) for x in results]


def everything(kind: str, tensors: dict[str, torch.Tensor], backend: str = 'default', **more) -> dict[str, torch.Tensor]:
    """Results and gradients by name."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    results = call(kind, leaves, backend, **more)
    gradients = torch.autograd.grad(results, list(leaves.values()), upstream(results))
    found = dict(zip(('y', 'total'), results, strict=False))
    return found | {f'd{name}': x for name, x in zip(leaves, gradients, strict=True)}


def exact(kind: str, tensors: dict[str, torch.Tensor], like: dict[str, torch.Tensor], **more) -> dict[str, torch.Tensor]:
    """The same in float64, for incoming gradients rounded like those of `like`."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    results = oracle(kind, **leaves, **(KINDS[kind][1] | more))
    rounded = upstream(tuple(like[name] for name in ('y', 'total') if name in like))
    gradients = torch.autograd.grad(results, list(leaves.values()), [x.double() for x in rounded])
    found = dict(zip(('y', 'total'), results, strict=False))
    return found | {f'd{name}': x for name, x in zip(leaves, gradients, strict=True)}


def check(kind: str, tensors: dict[str, torch.Tensor], backend: str = 'default', **more) -> None:
    """Checks dtype and shape of every result and gradient, and the bound of the call's narrowest dtype."""
    found = everything(kind, tensors, backend, **more)
    right = exact(kind, tensors, found, **more)
    narrowest = max((x.dtype for x in (*tensors.values(), found['y'])), key=bounds.of_norm)
    wrong = {}
    for name, x in found.items():
        assert x.shape == right[name].shape, name
        if name.startswith('d'):
            assert x.dtype == tensors[name[1:]].dtype
        error = bounds.relative_rms(right[name].detach(), x.detach())
        if not error <= bounds.of_norm(narrowest):
            wrong[name] = error
    assert not wrong, f'{wrong}, the bound is {bounds.of_norm(narrowest)}'
