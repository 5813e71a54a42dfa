"""Cases of attention, and the comparison of every backend with the formula in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fla.backends import trace, use_backend
from fla.ops.attn import parallel_attn
from fla.ops.attn.naive import naive_parallel_attn
from tests import bounds
from tests.ops.attn.emulated import emulated

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TENSORS = ('q', 'k', 'v', 'g', 'sink_bias')

# seeds of the gradient of o: that of a test, and those for measuring rounding, which include it
OWN, DRAWS = 9, (5, 6, 7, 8, 9)

Errors = dict[str, tuple[float, float]]


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
    """q, k, v and the named tensors, with numbers that bfloat16 holds; decays average `strength` per step."""
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
    backend: str | None,
    given: dict[str, torch.Tensor],
    grad: bool = True,
    reference: Any = None,
    seed: int = OWN,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """o and, with `grad`, the gradient of each tensor for a fixed gradient of o; fails if another backend serves."""
    leaves = {name: x.detach().requires_grad_(grad) for name, x in given.items()}
    if reference is not None:
        o = reference(**leaves, **options)
    else:
        with use_backend(backend, op='attn'), trace() as recorded:
            o = parallel_attn(**leaves, **options)
        assert recorded.last_backend('attn.parallel_attn') == backend
    found = {'o': o.detach()}
    if grad:
        got = torch.autograd.grad(o, list(leaves.values()), upstream(o, seed))
        found |= {f'd{name}': x for name, x in zip(leaves, got, strict=True)}
    return found


def upstream(o: torch.Tensor, seed: int = OWN) -> torch.Tensor:
    """The fixed gradient of o."""
    return torch.randn(o.shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(o)


def exact(given: dict[str, torch.Tensor], grad: bool = True, **options: Any) -> dict[str, torch.Tensor]:
    """Like `results`, by the formula in float64."""
    wide = {name: x.double() for name, x in given.items()}
    return results(None, wide, grad, naive_parallel_attn, **options)


def errors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> Errors:
    """Relative RMS and worst row of each result. Of few numbers a row may be the rounding of much larger ones: then some
    steps of a head are one."""
    made = {}
    for name, expected in wanted.items():
        floor = bounds.ATTENTION_FLOOR if name in ('dq', 'dk', 'dg', 'dsink_bias') else 0.0
        row = 0.0
        if name in ('o', 'dq', 'dk', 'dv'):
            rows = bounds.in_blocks if expected.shape[-1] < 16 and expected.numel() else torch.Tensor.detach
            row = bounds.worst_row(rows(expected), rows(found[name]), floor)
        made[name] = bounds.relative_rms(expected, found[name], floor), row
    return made


def bounds_of(given: dict[str, torch.Tensor], grad: bool = True, **options: Any) -> Errors:
    """Bounds of both for each result: from what rounding does to the formula on the same call, for the same gradient of o
    and some others. Which rows all but cancel, and by how much, is a matter of that gradient."""
    dtype = given['q'].dtype
    largest: Errors = {}
    for seed in DRAWS:
        rounded = results(None, given, grad, partial(emulated, dtype), seed, **options)
        for name, (rms, row) in errors(rounded, exact(given, grad, seed=seed, **options)).items():
            old = largest.get(name, (0.0, 0.0))
            largest[name] = max(old[0], rms), max(old[1], row)
    return {name: bounds.of_attention(name, dtype, error) for name, error in largest.items()}


def check(backend: str, given: dict[str, torch.Tensor], grad: bool = True, **options: Any) -> dict[str, torch.Tensor]:
    """Checks that every result of the backend is within its bounds."""
    found = results(backend, given, grad, **options)
    check_results(found, given, grad, **options)
    return found


def check_apart(found: dict[str, torch.Tensor]) -> None:
    """NaN in sequence [1, 40), from step 3 on, does not reach other sequences."""
    assert found['o'][:, 3].isnan().any()
    for name, x in found.items():
        if name != 'dsink_bias':
            assert x[:, :1].isfinite().all(), name
            assert x[:, 40:].isfinite().all(), name


def check_results(found: dict[str, torch.Tensor], given: dict[str, torch.Tensor], grad: bool = True, **options: Any) -> None:
    """Like `check`, for given results."""
    dtype = given['q'].dtype
    wanted = exact(given, grad, **options)
    for name, expected in wanted.items():
        assert found[name].shape == expected.shape
        assert found[name].dtype == (dtype if name == 'o' else given[name[1:]].dtype)
        # gradients by PyTorch itself may not be
        assert name != 'o' or found[name].is_contiguous()
    if wanted['o'].numel():
        most = bounds_of(given, grad, **options)
        wrong = [
            f'{name}: RMS {rms:.1e} (bound {most[name][0]:.1e}), worst row {row:.1e} (bound {most[name][1]:.1e})'
            for name, (rms, row) in errors(found, wanted).items()
            if not (rms <= most[name][0] and row <= most[name][1])
        ]
        assert not wrong, '; '.join(wrong)
