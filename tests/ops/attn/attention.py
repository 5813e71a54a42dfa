"""Cases of attention, and what holds every backend to the formula in float64."""

from __future__ import annotations

from typing import Any

import torch

from fla.ops.attn import parallel_attn
from fla.ops.attn.naive import naive_parallel_attn
from fla.ops.backends import trace, use_backend
from tests import bounds

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TENSORS = ('q', 'k', 'v', 'g', 'sink_bias')


def inputs(
    *names: str,
    dtype: torch.dtype = FP64,
    batch: int = 2,
    length: int = 24,
    queries: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    value_dim: int = 6,
    strength: float = 1.0,
    device: str = 'cpu',
) -> dict[str, torch.Tensor]:
    """q, k, v and the tensors named, of numbers that bfloat16 holds; decays of `strength` a step on average."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        'q': (batch, queries or length, heads, dim),
        'k': (batch, length, kv_heads, dim),
        'v': (batch, length, kv_heads, value_dim),
        'g': (batch, length, heads),
        'sink_bias': (heads,),
    }
    made = {n: torch.randn(shapes[n], generator=generator).bfloat16().to(dtype) for n in ('q', 'k', 'v', *names)}
    if 'g' in made:
        made['g'] = -made['g'].abs() * strength
    return {name: x.to(device) for name, x in made.items()}


def results(
    backend: str | None, given: dict[str, torch.Tensor], grad: bool = True, reference: Any = None, **options: Any
) -> dict[str, torch.Tensor]:
    """o and, with `grad`, the gradient of each tensor for a fixed one of o; from that backend and no other."""
    leaves = {name: x.detach().requires_grad_(grad) for name, x in given.items()}
    if reference is not None:
        o = reference(**leaves, **options)
    else:
        with use_backend(backend, op='attn'), trace() as recorded:
            o = parallel_attn(**leaves, **options)
        assert recorded.last_backend('attn.parallel_attn') == backend
    found = {'o': o.detach()}
    if grad:
        weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).bfloat16().to(o)
        got = torch.autograd.grad(o, list(leaves.values()), weights)
        found |= {f'd{name}': x for name, x in zip(leaves, got, strict=True)}
    return found


def exact(given: dict[str, torch.Tensor], grad: bool = True, **options: Any) -> dict[str, torch.Tensor]:
    """As `results`, by the formula in float64."""
    wide = {name: x.double() for name, x in given.items()}
    return results(None, wide, grad, naive_parallel_attn, **options)


def check(backend: str, given: dict[str, torch.Tensor], grad: bool = True, **options: Any) -> dict[str, torch.Tensor]:
    """Every result of the backend is within its bounds."""
    dtype = given['q'].dtype
    found, wanted = results(backend, given, grad, **options), exact(given, grad, **options)
    wrong = []
    for name, expected in wanted.items():
        got = found[name]
        assert got.shape == expected.shape
        assert got.dtype == (dtype if name == 'o' else given[name[1:]].dtype)
        assert got.is_contiguous()
        if not expected.numel():
            continue
        # what no scores change (a window of one, a single key) has gradients that are nothing but rounding
        floor = 1e-2 if name in ('dq', 'dk', 'dg', 'dsink_bias') else 0.0
        rms = bounds.relative_rms(expected, got, floor)
        least = bounds.ATTENTION_FLOOR * float(expected.square().mean().sqrt()) if name in ('dq', 'dk') else 0.0
        row = bounds.worst_row(expected, got, max(floor, least)) if name in ('o', 'dq', 'dk', 'dv') else 0.0
        most_rms, most_row = bounds.of_attention(name, dtype)
        if not (rms <= most_rms and row <= most_row):
            wrong.append(f'{name}: RMS {rms:.1e} (bound {most_rms:.1e}), worst row {row:.1e} (bound {most_row:.1e})')
    assert not wrong, '; '.join(wrong)
    return found
