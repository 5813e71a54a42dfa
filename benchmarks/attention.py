"""Measures `parallel_attn` on a GPU: times of forward and of forward with backward, and peak memory, of each backend that
can run, in one process on one card.

    python benchmarks/attention.py --json benchmarks/results/attention.json

Inputs are normal, decays are the logsigmoid of normal numbers. The yardstick, `torch`, is `scaled_dot_product_attention` as
a user would call it: causal where that is enough, otherwise with a mask. A vendor's package is measured if it is installed,
whether its toggle is on or not. The functions behind `sdpa` and `flashinfer` are also called directly, without this
package.

The JSON holds a row for each case and backend. `chosen` marks the backend that dispatch selects. Times are in ms, memory in
MiB; `*_over_torch` is the time over the yardstick's, `new_keys_wall_ms` the time of a decode step with a new number of
keys, and `errors` are relative RMS errors against the formula in float64, on 320 steps. `*_refused` is the error of a
backend that cannot run the case. --quick: a decode step and a small case in float32.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from _gpu import time_call
from _results import ResultFile, command, error_line, has_gpu, machine, parser, relative_rms

BACKENDS = ('sdpa', 'default', 'flash_attn_3', 'flash_attn', 'flashinfer', 'xformers', 'tilelang', 'torch_varlen')
YARDSTICK = 'torch'
DIRECTLY = {'sdpa': 'FlashAttention directly', 'flashinfer': 'FlashInfer directly'}

# name: B, T, S, HQ, H, K, V, and the other arguments
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
    """Returns the tensors with gradients and the other arguments of a case."""
    batch, length, keys, heads, groups, dim, value_dim = shape
    generator = torch.Generator('cuda').manual_seed(0)
    dtype = asked.get('dtype', torch.bfloat16)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device='cuda', generator=generator)

    tensors = {
        'q': normal(batch, length, heads, dim).to(dtype),
        'k': normal(batch, keys, groups, dim).to(dtype),
        'v': normal(batch, keys, groups, value_dim).to(dtype),
    }
    if asked.get('g'):
        tensors['g'] = F.logsigmoid(normal(batch, length, heads))
    if asked.get('sink_bias'):
        tensors['sink_bias'] = normal(heads)
    options: dict[str, Any] = {}
    if 'window_size' in asked:
        options['window_size'] = asked['window_size']
    if 'cu_seqlens' in asked:
        # sequences of unequal lengths
        cuts = torch.rand(asked['cu_seqlens'] - 1, device='cuda', generator=generator).mul(length).int().sort().values
        options['cu_seqlens'] = F.pad(F.pad(cuts, (1, 0)), (0, 1), value=length)
    return tensors, options


def yardstick(tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """Returns PyTorch's attention for these arguments, with its mask prepared. Supports neither decays nor sinks."""
    from fla.ops.attn.naive import visible

    length, keys = tensors['q'].shape[1], tensors['k'].shape[1]
    masked = bool(options) or length not in (1, keys)
    mask = visible(tensors['q'], tensors['k'], **options) if masked else None
    causal = not masked and length == keys

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

    return call


def directly(name: str, tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """Returns the library function behind a backend.

    Raises:
        ValueError: for a case in which the backend does not call it.
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
    """Returns relative RMS errors of o and, with `grad`, the gradients, on 320 steps of two groups of heads, batch 1."""
    from fla.ops.attn.naive import naive_parallel_attn

    _, length, keys, heads, groups, dim, value_dim = shape
    share = heads // groups
    steps = min(length, 320)
    small = (1, steps, steps if keys == length else min(keys, 640), 2 * share, 2, dim, value_dim)
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
    return {name: relative_rms(ours[name], x) for name, x in exact.items()}


def measured(shape: tuple[int, ...], asked: dict[str, Any], backend: str) -> dict[str, Any]:
    """Returns the measurements of one case on one backend, or why it cannot run."""
    from fla.ops.attn import parallel_attn

    tensors, options = inputs(shape, asked)
    if backend == YARDSTICK:
        if not {'g', 'sink_bias'}.isdisjoint(tensors):
            return {'refused': 'no decays, no sinks'}
        call, bound = yardstick(tensors, options), None
    elif backend in DIRECTLY.values():
        try:
            call, bound = directly(backend, tensors, options), None
        except (ValueError, ImportError) as error:
            return {'refused': error_line(error)}
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
    for name, measured_call in (('forward', forward), ('both', both)):
        row |= time_call(name, measured_call)
    if 'forward_ms' in row and shape[1] == 1:
        row['new_keys_wall_ms'] = with_new_keys(call, tensors)
    if 'forward_ms' in row:
        pairs = shape[0] * shape[3] * (shape[1] * shape[2] - shape[1] * (shape[1] - 1) / 2)
        if not options:
            row['forward_tflops'] = 2 * pairs * (shape[5] + shape[6]) / row['forward_ms'] / 1e9
        if backend not in DIRECTLY.values():
            row['errors'] = errors(shape, asked, bound, grad='both_ms' in row)
    return row


# numbers of keys to leave out, each used once in a process: cached plans of an earlier number would serve again
FEWER = itertools.count(1)


def with_new_keys(call: Callable[..., Any], tensors: dict[str, torch.Tensor]) -> float:
    """Wall time in ms of a step with a new number of keys, as in each step of decoding: the median of 20."""
    times = []
    for _ in range(20):
        fewer = next(FEWER)
        arguments = {**tensors, **{name: tensors[name][:, fewer:] for name in ('k', 'v')}}
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            call(**arguments)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


def rows(cases: list[str], backends: list[str]) -> Iterator[dict[str, Any]]:
    """Yields a row for each case and backend; the yardstick comes first."""
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
    options = parser(__doc__)
    options.add_argument('--case', choices=CASES, action='append', help='measure only this case')
    options.add_argument('--backend', choices=BACKENDS, action='append', help='measure only this backend')
    chosen = options.parse_args()
    if not has_gpu():
        return
    from fla.ops.attn.backends.flash_attn import FlashAttention2Backend, FlashAttention3Backend
    from fla.ops.attn.backends.flashinfer import FlashInferBackend
    from fla.ops.attn.backends.tilelang import AttentionTileLang
    from fla.ops.attn.backends.varlen import TorchVarlenBackend
    from fla.ops.attn.backends.xformers import XFormersBackend

    vendors = (FlashAttention2Backend, FlashAttention3Backend, FlashInferBackend, XFormersBackend)
    ours = (AttentionTileLang, TorchVarlenBackend)
    available = {'sdpa', 'default', *(backend.backend_type for backend in vendors + ours if backend.is_available()[0])}
    backends = [name for name in chosen.backend or BACKENDS if name in available]
    about = machine(packages=('flash-attn', 'flash-attn-3', 'flashinfer-python', 'xformers', 'tilelang'))
    results = ResultFile(chosen.json, 'attention', **about, command=command('attention', chosen, 'case', 'backend'))
    cases = chosen.case or (['one step, one row', 'float32'] if chosen.quick else list(CASES))
    for row in rows(cases, backends):
        results.add(row)
    results.complete()


if __name__ == '__main__':
    main()
