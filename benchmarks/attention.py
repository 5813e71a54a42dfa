"""Times of `parallel_attn` on a GPU: forward, forward with backward, and peak memory, of each backend that can run here, in
one process on one card; beside each the error against the formula in float64, and the time over PyTorch's own attention.

    python benchmarks/attention.py --json benchmarks/results/attention.json

Inputs are normal, decays logsigmoid of normal numbers. The yardstick is `scaled_dot_product_attention` as a user would call
it: causal where that says it all, else with a mask. A vendor's package is measured where it is installed, switched on or
not; what `sdpa` and `flashinfer` call is measured beside them without this package (`... directly`).
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from _gpu import gpu_ms, peak_mib, wall_ms
from _results import ResultFile, command, machine, said

BACKENDS = ('sdpa', 'default', 'flash_attn_3', 'flash_attn', 'flashinfer', 'xformers', 'tilelang', 'torch_varlen')
YARDSTICK = 'torch'
DIRECTLY = {'sdpa': 'FlashAttention directly', 'flashinfer': 'FlashInfer directly'}

# name: B, T, S, HQ, H, K, V and what is asked for
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    'causal': ((4, 2048, 2048, 16, 16, 128, 128), {}),
    'causal, long': ((1, 8192, 8192, 16, 16, 128, 128), {}),
    'causal, grouped, K = 64': ((4, 2048, 2048, 32, 8, 64, 64), {}),
    'causal, grouped, K = 256': ((2, 2048, 2048, 16, 2, 256, 256), {}),
    'window of 512': ((1, 8192, 8192, 16, 4, 128, 128), {'window_size': 512}),
    'packed': ((1, 8192, 8192, 16, 4, 128, 128), {'cu_seqlens': 8}),
    'decay': ((4, 2048, 2048, 16, 16, 128, 128), {'g': True}),
    'sinks and window of 128': ((4, 2048, 2048, 64, 8, 64, 64), {'sink_bias': True, 'window_size': 128}),
    'chunk after cache': ((4, 512, 4096, 16, 4, 128, 128), {}),
    'one step': ((32, 1, 4096, 16, 4, 128, 128), {}),
    'one step, one row': ((1, 1, 4096, 16, 4, 128, 128), {}),
    'float32': ((4, 1024, 1024, 16, 16, 128, 128), {'dtype': torch.float32}),
}


def inputs(shape: tuple[int, ...], asked: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors that have gradients, and the other arguments."""
    batch, length, kept, heads, groups, dim, value_dim = shape
    generator = torch.Generator('cuda').manual_seed(0)
    dtype = asked.get('dtype', torch.bfloat16)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device='cuda', generator=generator)

    tensors = {
        'q': normal(batch, length, heads, dim).to(dtype),
        'k': normal(batch, kept, groups, dim).to(dtype),
        'v': normal(batch, kept, groups, value_dim).to(dtype),
    }
    if asked.get('g'):
        tensors['g'] = F.logsigmoid(normal(batch, length, heads))
    if asked.get('sink_bias'):
        tensors['sink_bias'] = normal(heads)
    options: dict[str, Any] = {}
    if 'window_size' in asked:
        options['window_size'] = asked['window_size']
    if 'cu_seqlens' in asked:
        # of unequal lengths
        cuts = torch.rand(asked['cu_seqlens'] - 1, device='cuda', generator=generator).mul(length).int().sort().values
        options['cu_seqlens'] = F.pad(F.pad(cuts, (1, 0)), (0, 1), value=length)
    return tensors, options


def yardstick(tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """PyTorch's attention of these, its mask made beforehand. No decays, no sinks."""
    from fla.ops.attn.naive import visible

    length, kept = tensors['q'].shape[1], tensors['k'].shape[1]
    masked = bool(options) or length not in (1, kept)
    mask = visible(tensors['q'], tensors['k'], **options) if masked else None
    causal = not masked and length == kept

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

    return call


def directly(name: str, tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """What a backend calls, as a user would.

    Raises:
        ValueError: for a case that it does not call this for.
    """
    length, plain = tensors['q'].shape[1], {'g', 'sink_bias'}.isdisjoint(tensors) and 'cu_seqlens' not in options
    if name == DIRECTLY['sdpa']:
        if length != 1 or options or not plain:
            raise ValueError('more than one query')
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return lambda q, k, v: flash(*(x.transpose(1, 2) for x in (q, k, v)))[0].transpose(1, 2)
    if len(tensors['q']) != 1 or not plain:
        raise ValueError('more than one sequence, decays or sinks')
    from flashinfer import single_prefill_with_kv_cache as prefill

    left = options.get('window_size', 0) - 1
    return lambda q, k, v: prefill(q[0], k[0], v[0], causal=True, kv_layout='NHD', window_left=left)[None]


def errors(shape: tuple[int, ...], asked: dict[str, Any], call: Callable[..., Any] | None, grad: bool) -> dict[str, float]:
    """Relative RMS of o and the gradients on 320 steps of the first heads of each group, one row of the batch."""
    from fla.ops.attn.naive import naive_parallel_attn

    _, length, kept, heads, groups, dim, value_dim = shape
    share = heads // groups
    steps = min(length, 320)
    small = (1, steps, steps if kept == length else min(kept, 640), 2 * share, 2, dim, value_dim)
    tensors, options = inputs(small, {**asked, **({'window_size': 100} if 'window_size' in asked else {})})
    run = yardstick(tensors, options) if call is None else lambda **leaves: call(**leaves, **options)
    found = []
    for function, dtype in ((run, None), (lambda **leaves: naive_parallel_attn(**leaves, **options), torch.float64)):
        leaves = {n: x.detach().to(dtype or x.dtype).clone().requires_grad_(grad) for n, x in tensors.items()}
        o = function(**leaves)
        weights = torch.randn(o.shape, device='cuda', generator=torch.Generator('cuda').manual_seed(1))
        if grad:
            o.backward(weights.to(o.dtype))
        found.append({'o': o.detach(), **{f'd{n}': x.grad for n, x in leaves.items() if grad}})
    ours, exact = found
    return {
        name: float((ours[name].double() - x).square().mean().sqrt() / x.square().mean().sqrt()) for name, x in exact.items()
    }


def measured(shape: tuple[int, ...], asked: dict[str, Any], backend: str) -> dict[str, Any]:
    """One case on one backend, or why not."""
    from fla.ops.attn import parallel_attn

    tensors, options = inputs(shape, asked)
    if backend == YARDSTICK:
        if not {'g', 'sink_bias'}.isdisjoint(tensors):
            return {'refused': 'no decays, no sinks'}
        call, bound = yardstick(tensors, options), None
    elif backend in DIRECTLY.values():
        try:
            call, bound = directly(backend, tensors, options), None
        except (ValueError, ImportError) as refused:
            return {'refused': said(refused)}
    else:
        bound = parallel_attn.bind(backend=backend)
        call = lambda *args, **named: bound(*args, **named, **options)  # noqa: E731
    do = torch.randn(*shape[:2], shape[3], shape[6], device='cuda').to(tensors['v'])
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}

    def forward() -> None:
        with torch.no_grad():
            call(**tensors)

    def both() -> None:
        torch.autograd.grad(call(**leaves), list(leaves.values()), do)

    row: dict[str, Any] = {}
    for name, wanted in (('forward', forward), ('both', both)):
        try:
            began = time.perf_counter()
            wanted()
            torch.cuda.synchronize()
        except Exception as refused:
            row[f'{name}_refused'] = said(refused)
            continue
        row[f'{name}_first_s'] = time.perf_counter() - began
        row[f'{name}_ms'] = gpu_ms(wanted)
        row[f'{name}_wall_ms'] = wall_ms(wanted, calls=20, rounds=5)
        row[f'{name}_peak_mib'] = peak_mib(wanted)
    if 'forward_ms' in row and shape[1] == 1:
        row['new_keys_wall_ms'] = with_new_keys(call, tensors)
    if 'forward_ms' in row:
        pairs = shape[0] * shape[3] * (shape[1] * shape[2] - shape[1] * (shape[1] - 1) / 2)
        if not options:
            row['forward_tflops'] = 2 * pairs * (shape[5] + shape[6]) / row['forward_ms'] / 1e9
        if backend not in DIRECTLY.values():
            row['errors'] = errors(shape, asked, bound, grad='both_ms' in row)
    return row


# of keys than a case has, each only once: plans are kept for all that are measured in one process
FEWER = itertools.count(1)


def with_new_keys(call: Callable[..., Any], tensors: dict[str, torch.Tensor]) -> float:
    """Milliseconds of wall time of a step whose keys are so many for the first time, as at each step of decoding: the median
    of 20."""
    taken = []
    for _ in range(20):
        fewer = next(FEWER)
        given = {**tensors, **{name: tensors[name][:, fewer:] for name in ('k', 'v')}}
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            call(**given)
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - start))
    return median(taken)


def rows(cases: list[str], backends: list[str]) -> Iterator[dict[str, Any]]:
    from fla.backends import explain
    from fla.ops.attn import parallel_attn

    for name in cases:
        shape, asked = CASES[name]
        tensors, options = inputs(shape, asked)
        chosen = explain(parallel_attn, **tensors, **options)
        base: dict[str, Any] = {}
        for backend in (YARDSTICK, *backends, *(DIRECTLY[one] for one in backends if one in DIRECTLY)):
            row = measured(shape, asked, backend)
            base = row if backend == YARDSTICK else base
            for kind in ('forward', 'both'):
                if f'{kind}_ms' in row and f'{kind}_ms' in base:
                    row[f'{kind}_over_torch'] = row[f'{kind}_ms'] / base[f'{kind}_ms']
            notes = list(chosen[backend].notes) if backend in backends else []
            yield {
                'case': name,
                'backend': backend,
                'chosen': backend == chosen.winner,
                'notes': notes,
                'shape': shape,
                **row,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, help='write the results there')
    parser.add_argument('--case', choices=CASES, action='append', help='only this case')
    parser.add_argument('--backend', choices=BACKENDS, action='append', help='only this backend')
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print('These kernels need a GPU: nothing is measured here.')
        return
    from fla.ops.attn.backends.flash_attn import FlashAttention2Backend, FlashAttention3Backend
    from fla.ops.attn.backends.flashinfer import FlashInferBackend
    from fla.ops.attn.backends.tilelang import AttentionTileLang
    from fla.ops.attn.backends.varlen import TorchVarlenBackend
    from fla.ops.attn.backends.xformers import XFormersBackend

    vendors = (FlashAttention2Backend, FlashAttention3Backend, FlashInferBackend, XFormersBackend)
    ours = (AttentionTileLang, TorchVarlenBackend)
    able = {one.backend_type for one in vendors + ours if one.is_available()[0]}
    backends = [one for one in options.backend or BACKENDS if one in ('sdpa', 'default') or one in able]
    about = machine(packages=('flash-attn', 'flash-attn-3', 'flashinfer-python', 'xformers', 'tilelang'))
    results = ResultFile(options.json, 'attention', **about, command=command('attention', options, 'case', 'backend'))
    for row in rows(options.case or list(CASES), backends):
        results.add(row)
    results.complete()


if __name__ == '__main__':
    main()
