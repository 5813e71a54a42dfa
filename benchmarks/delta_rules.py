"""Times of the gated delta rule and KDA on a GPU: forward, forward with backward, peak memory, decoding, first call.

    python benchmarks/delta_rules.py --json benchmarks/results/delta_rules.json

Each shape is first compared with the reference in float64 (a slice of it, over heads), so that no time stands beside a wrong
result. Inputs: q and v normal, k normal and of length 1, gates logsigmoid(normal), beta uniform; bfloat16.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fla.ops.backends import explain, use_backend
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda, fused_recurrent_kda

SHAPES = ((4, 2048, 16, 128), (1, 8192, 96, 128))
DECODE = (1, 32, 256)
CHUNKED = {'gated_delta_rule': chunk_gated_delta_rule, 'kda': chunk_kda}


def inputs(op: str, batch: int, length: int, heads: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta of one distribution for every implementation."""
    generator = torch.Generator('cuda').manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device='cuda')

    q, k, v = (normal(batch, length, heads, dim) for _ in range(3))
    g = F.logsigmoid(normal(batch, length, heads, *([dim] if op == 'kda' else [])))
    beta = torch.rand((batch, length, heads), generator=generator, device='cuda')
    half = torch.bfloat16
    return q.to(half), F.normalize(k, dim=-1).to(half), v.to(half), g, beta


def relative(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative RMS error."""
    return float((result.double() - exact.double()).norm() / exact.double().norm())


def errors(op: str, shape: tuple[int, ...]) -> dict[str, float]:
    """Errors of outputs and gradients against the float64 reference, on the first two heads and 1024 steps."""
    batch, length, heads, dim = shape
    batch, length, heads = 1, min(length, 1024), min(heads, 2)
    args = inputs(op, batch, length, heads, dim)
    do = torch.randn(batch, length, heads, dim, device='cuda', generator=torch.Generator('cuda').manual_seed(1))
    found = []
    for backend, dtype in (('default', None), ('reference', torch.float64)):
        leaves = [(x if dtype is None else x.to(dtype)).requires_grad_() for x in (a.detach().clone() for a in args)]
        with use_backend(backend, op=op):
            o, state = CHUNKED[op](*leaves, output_final_state=True)
        ((o * do.to(o.dtype)).sum() + state.sum()).backward()
        found.append([o, state, *(leaf.grad for leaf in leaves)])
    names = ('o', 'state', 'dq', 'dk', 'dv', 'dg', 'dbeta')
    return {name: relative(ours, exact) for name, ours, exact in zip(names, *found, strict=True)}


def milliseconds(function: Any, repeats: int = 30) -> float:
    """Median of GPU times."""
    for _ in range(3):
        function()
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
    flush = torch.empty(64 << 20, dtype=torch.int32, device='cuda')
    for start, end in zip(starts, ends, strict=True):
        flush.zero_()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    times = sorted(s.elapsed_time(e) for s, e in zip(starts, ends, strict=True))
    return times[repeats // 2]


def chunked(op: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """One shape: times in ms, peak memory of forward and backward in MiB beyond the inputs."""
    args = inputs(op, *shape)
    began = time.perf_counter()
    with torch.no_grad():
        CHUNKED[op](*args)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    leaves = [a.requires_grad_() for a in args]
    do = torch.randn_like(args[2])

    def forward() -> None:
        with torch.no_grad():
            CHUNKED[op](*args)

    def both() -> None:
        torch.autograd.grad(CHUNKED[op](*leaves)[0], leaves, do)

    began = time.perf_counter()
    both()
    torch.cuda.synchronize()
    first_both = time.perf_counter() - began
    row = {'op': op, 'shape': shape, 'backend': explain(CHUNKED[op], *args).winner, 'errors': errors(op, shape)}
    row |= {'first_forward_s': first, 'first_backward_s': first_both}
    row |= {'forward_ms': milliseconds(forward), 'both_ms': milliseconds(both)}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    row['peak_mib'] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return row


def decoding(op: str, batch: int, heads: int = 16, dim: int = 128) -> dict[str, Any]:
    """One decode step: GPU time by graph replay, wall time of calls in a row, in µs."""
    q, k, v, g, beta = inputs(op, batch, 1, heads, dim)
    state = torch.randn(batch, heads, dim, dim, device='cuda')

    def step() -> Any:
        if op == 'kda':
            return fused_recurrent_kda(q, k, v, g, beta, initial_state=state, output_final_state=True)
        return fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=state, output_final_state=True)

    with torch.no_grad():
        o, _ = step()
        with use_backend('reference', op=op):
            exact = (
                fused_recurrent_kda(*(x.double() for x in (q, k, v, g, beta)), initial_state=state.double())
                if op == 'kda'
                else fused_recurrent_gated_delta_rule(
                    *(x.double() for x in (q, k, v, g)), beta=beta.double(), initial_state=state.double()
                )
            )[0]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                step()
        gpu = milliseconds(graph.replay) / 20 * 1000
        best = float('inf')
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(500):
                step()
            best = min(best, (time.perf_counter() - began) / 500)
            torch.cuda.synchronize()
    return {'op': op, 'batch': batch, 'gpu_us': gpu, 'wall_us': best * 1e6, 'error': relative(o, exact)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path)
    options = parser.parse_args()
    import triton

    result: dict[str, Any] = {
        'card': torch.cuda.get_device_name(),
        'versions': {'torch': torch.__version__, 'triton': triton.__version__, 'python': platform.python_version()},
        'command': ' '.join(['python', *sys.argv]),
        'chunked': [],
        'decoding': [],
    }
    print(result['card'], result['versions'])
    for op in CHUNKED:
        for shape in SHAPES:
            row = chunked(op, shape)
            result['chunked'].append(row)
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        for batch in DECODE:
            row = decoding(op, batch)
            result['decoding'].append(row)
            print(row, flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
    main()
