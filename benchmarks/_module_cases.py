"""Cases of `modules.py`: inputs, plain PyTorch, and the least memory traffic of a call. Functions come from the `fla` that
is on the path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]
Shape = tuple[int, ...]
EPS = 1e-5
GROUPS = 8


@dataclass(frozen=True)
class Module:
    """A function of `fla.modules`.

    Attributes:
        path: import path.
        axes: names of the axes of a size.
        sizes: name of a size → the size; 'quick' is for a CPU.
        make: makes the inputs of a size.
        plain: the same function in PyTorch; errors are measured against it in float64.
        moves: elements that a forward, and a backward, must at least read and write, per element of the first input; None
            where matrix products take the time.
        few: reduces a size to at most 512 rows of the same width, for errors.
        liger: Liger-Kernel's function, where it rounds differently and our backend therefore refuses.
        positional: arguments after the tensors; some of FLA's functions take no keywords.
        constants: keyword arguments.
        named: pass the tensors by keyword.
        backward: whether the function has a backward.
        results: names of the first results; each has a gradient.
    """

    path: str
    axes: str
    sizes: dict[str, Shape]
    make: Callable[[Shape, Callable[..., torch.Tensor]], Tensors]
    plain: Callable[..., torch.Tensor]
    moves: tuple[float, float] | None
    few: Callable[[Shape], Shape] = field(default=lambda shape: (min(shape[0], 512), *shape[1:]))
    liger: Callable[..., torch.Tensor] | None = None
    positional: tuple[Any, ...] = ()
    constants: dict[str, Any] = field(default_factory=dict)
    named: bool = False
    backward: bool = True
    results: tuple[str, ...] = ('out',)

    def function(self) -> Callable[..., Any]:
        """Returns the dispatched function, or FLA's, as a function of the tensors alone, by keyword."""
        module, _, name = self.path.rpartition('.')
        function = getattr(importlib.import_module(module), name)
        if self.named:
            return lambda **tensors: function(**tensors, **self.constants)
        return lambda **tensors: function(*tensors.values(), *self.positional, **self.constants)

    def bytes_of(self, tensors: Tensors) -> tuple[float, float] | None:
        """Returns the bytes that a forward, and a forward with backward, must at least move; None if unknown."""
        if self.moves is None:
            return None
        first = next(iter(tensors.values()))
        size = first.numel() * first.element_size()
        return size * self.moves[0], size * sum(self.moves)


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _rms_norm_of_sum(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return _rms_norm(total, weight), total


def _group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, GROUPS, weight, bias, EPS)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _rms_norm_gated(x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS) * F.silu(g)


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    w = _at_least_float32(x)
    return (w * torch.rsqrt(w.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _swiglu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * y


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return F.silu(first) * second


def _swiglu_linear(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(x) * y, weight)


def _rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = _at_least_float32(x).chunk(2, -1)
    c, s = (_at_least_float32(table)[:, None] for table in (cos, sin))
    return torch.cat([a * c - b * s, a * s + b * c], -1).to(x.dtype)


def _causal_conv1d(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], groups=weight.shape[0])).transpose(1, 2)


def _causal_conv1d_update(x: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    cache.copy_(torch.cat([cache[:, :, 1:], x[:, :, None]], -1))
    return F.silu((_at_least_float32(cache) * _at_least_float32(weight)).sum(-1)).to(x.dtype)


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(_at_least_float32(logits), target, reduction='none')


def _linear_cross_entropy(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(_at_least_float32(F.linear(x, weight)), target)


def _liger_swiglu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(x, y)


def _liger_cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Computes in the dtype of the logits, and overwrites these with their gradients."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    return LigerCrossEntropyFunction.apply(logits, target, None, -100, 0.0, 0.0, 'none')[0]


def _liger_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Works in place, and rotates one additional head, as keys."""
    from liger_kernel.ops.rope import LigerRopeFunction

    cos, sin = (torch.cat([table, table], -1)[None] for table in (cos, sin))
    keys = torch.empty_like(x[:, :, :1]).transpose(1, 2)
    return LigerRopeFunction.apply(x.transpose(1, 2), keys, cos, sin)[0].transpose(1, 2)


def _tables(shape: Shape, normal: Callable[..., torch.Tensor]) -> Tensors:
    x = normal(*shape)
    angles = torch.arange(shape[1], device=x.device)[:, None] * 1e4 ** (
        -torch.arange(0, shape[3], 2, device=x.device) / shape[3]
    )
    return {'x': x, 'cos': angles.cos().to(x.dtype), 'sin': angles.sin().to(x.dtype)}


def _targets(rows: int, classes: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(rows, device=like.device) * 7919 % classes


def _one_batch(shape: Shape) -> Shape:
    return (1, min(shape[1], 512), *shape[2:])


_ROWS = {'small': (2048, 2048), 'large': (16384, 8192), 'quick': (4, 32)}
_HEADS = {'small': (16384, 128), 'large': (1048576, 128), 'quick': (4, 16)}
_GATED = {'small': (2048, 5632), 'large': (16384, 14336), 'quick': (4, 24)}

MODULES = {
    'rms_norm': Module(
        'fla.modules.layernorm.rms_norm',
        'rows, D',
        _ROWS,
        lambda shape, normal: {'x': normal(*shape), 'weight': normal(shape[1])},
        _rms_norm,
        (2, 3),
        positional=(None,),
        constants={'eps': EPS},
    ),
    'rms_norm_of_sum': Module(
        'fla.modules.layernorm.rms_norm',
        'rows, D',
        _ROWS,
        lambda shape, normal: {'x': normal(*shape), 'weight': normal(shape[1]), 'residual': normal(*shape)},
        _rms_norm_of_sum,
        # the backward reads the returned sum and two gradients, and writes one gradient for both inputs
        (4, 4),
        constants={'bias': None, 'eps': EPS, 'prenorm': True},
        named=True,
        results=('out', 'sum'),
    ),
    'group_norm': Module(
        'fla.modules.layernorm.group_norm',
        'rows, D',
        _ROWS,
        lambda shape, normal: {'x': normal(*shape), 'weight': normal(shape[1]), 'bias': normal(shape[1])},
        _group_norm,
        (2, 3),
        constants={'eps': EPS, 'num_groups': GROUPS},
        named=True,
    ),
    'layer_norm': Module(
        'fla.modules.layernorm.layer_norm',
        'rows, D',
        _ROWS,
        lambda shape, normal: {'x': normal(*shape), 'weight': normal(shape[1]), 'bias': normal(shape[1])},
        _layer_norm,
        (2, 3),
        constants={'eps': EPS},
    ),
    'rms_norm_gated': Module(
        'fla.modules.fused_norm_gate.rms_norm_gated',
        'rows, D',
        _HEADS,
        lambda shape, normal: {'x': normal(*shape), 'g': normal(*shape), 'weight': normal(shape[1])},
        _rms_norm_gated,
        (3, 5),
        positional=(None,),
        constants={'eps': EPS},
    ),
    'l2norm': Module(
        'fla.modules.l2norm.l2norm', 'rows, D', _HEADS, lambda shape, normal: {'x': normal(*shape)}, _l2norm, (2, 3)
    ),
    'swiglu': Module(
        'fla.modules.activations.swiglu',
        'rows, D',
        _GATED,
        lambda shape, normal: {'x': normal(*shape), 'y': normal(*shape)},
        _swiglu,
        (3, 5),
        liger=_liger_swiglu,
    ),
    'silu_and_mul': Module(
        'fla.modules.activations.silu_and_mul',
        'rows, D',
        _GATED,
        lambda shape, normal: {'x': normal(shape[0], 2 * shape[1])},
        _silu_and_mul,
        # x holds both halves
        (1.5, 2.5),
    ),
    'swiglu_linear': Module(
        'fla.modules.activations.swiglu_linear',
        'rows, D, out',
        {'small': (2048, 5632, 2048), 'large': (16384, 14336, 4096), 'quick': (4, 24, 8)},
        lambda shape, normal: {
            **{name: normal(*shape[:2]) for name in ('x', 'y')},
            'weight': normal(shape[2], shape[1], scale=shape[1] ** -0.5),
        },
        _swiglu_linear,
        None,
        positional=(None,),
    ),
    'rotary_embedding': Module(
        'fla.modules.rotary.rotary_embedding',
        'B, T, H, D',
        {'small': (1, 2048, 16, 128), 'large': (4, 8192, 32, 128), 'quick': (2, 5, 2, 8)},
        _tables,
        _rotary,
        (2, 2),
        few=_one_batch,
        liger=_liger_rotary,
    ),
    'causal_conv1d': Module(
        'fla.modules.convolution.causal_conv1d',
        'B, T, D',
        {'small': (1, 2048, 2048), 'large': (4, 8192, 4096), 'quick': (2, 7, 16)},
        lambda shape, normal: {'x': normal(*shape), 'weight': normal(shape[2], 4)},
        _causal_conv1d,
        (2, 3),
        few=_one_batch,
        constants={'activation': 'silu'},
    ),
    'causal_conv1d_update': Module(
        'fla.modules.convolution.causal_conv1d_update',
        'N, D',
        {'small': (8, 8192), 'large': (1024, 8192), 'quick': (3, 16)},
        lambda shape, normal: {'x': normal(*shape), 'cache': normal(*shape, 4), 'weight': normal(shape[1], 4)},
        _causal_conv1d_update,
        # reads and writes the cache
        (10, 0),
        constants={'activation': 'silu'},
        named=True,
        backward=False,
    ),
    'cross_entropy': Module(
        'fla.modules.fused_cross_entropy.cross_entropy_loss',
        'rows, V',
        {'small': (1024, 32000), 'large': (8192, 131072), 'quick': (6, 40)},
        lambda shape, normal: {'logits': (x := normal(*shape)), 'target': _targets(*shape, x)},
        _cross_entropy,
        (1, 2),
        liger=_liger_cross_entropy,
    ),
    'fused_linear_cross_entropy': Module(
        'fla.modules.fused_linear_cross_entropy.fused_linear_cross_entropy_loss',
        'rows, D, V',
        {'small': (1024, 1024, 32000), 'large': (8192, 4096, 131072), 'quick': (6, 16, 40)},
        lambda shape, normal: {
            'x': (x := normal(*shape[:2])),
            'target': _targets(shape[0], shape[2], x),
            'weight': normal(shape[2], shape[1], scale=shape[1] ** -0.5),
        },
        _linear_cross_entropy,
        None,
    ),
}

# inputs without a gradient
_NO_GRADIENT = ('cos', 'sin', 'target')


def inputs(module: Module, shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Returns normal inputs, the same on each call."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype) * scale

    return module.make(shape, normal)


def with_gradients(tensors: Tensors, dtype: torch.dtype | None = None) -> tuple[Tensors, list[torch.Tensor]]:
    """Returns copies of the inputs, in `dtype` if given, and the list of those that require a gradient."""
    made = {}
    for name, one in tensors.items():
        made[name] = one.to(dtype) if dtype is not None and one.is_floating_point() else one
        if name not in _NO_GRADIENT:
            made[name] = made[name].detach().clone().requires_grad_()
    return made, [one for name, one in made.items() if name not in _NO_GRADIENT]


def results_of(module: Module, returned: Any) -> tuple[torch.Tensor, ...]:
    """Returns the measured results of the function's return value."""
    return returned[: len(module.results)] if isinstance(returned, tuple) else (returned,)
