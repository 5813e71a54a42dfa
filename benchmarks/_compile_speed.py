"""The times in `compile_breaks.py`: tracing a dispatched call, and running a compiled model that makes some."""

from __future__ import annotations

import itertools
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from _changes import First, Op, fresh, inputs, undispatched
from _timing import Burst, Samples, quiet, timed
from torch import Tensor, nn

from fla.ops.backends import BackendRegistry, BaseBackend, dispatch


def refuses(V: int) -> Callable[..., Any]:
    """A narrow verifier that looks at what `First` looks at, and says no at the last test."""

    def chunk_op_verifier(self, q, v, safe_gate):
        if safe_gate or torch.is_grad_enabled() or q.dtype is not torch.float32 or q.shape[-1] != 16:
            return False, 'elsewhere'
        return (True, None) if v.shape[-1] == V else (False, 'another V')

    return chunk_op_verifier


def rejecting(n: int) -> Op:
    """A dispatched operation of n backends, none of which takes the call."""
    operation = f'compile_bench_{next(fresh)}'
    registry = BackendRegistry(operation)
    for i in range(n):
        facts = {'backend_type': f'backend{i}', 'priority': i}
        body = {**facts, 'chunk_op': First.chunk_op, 'chunk_op_verifier': refuses(V=17 + i)}
        registry.register(types.new_class(f'Refuses{i}', (BaseBackend,), {}, lambda ns, body=body: ns.update(body))())

    def chunk_op(q, k, v, g, beta, scale=None, initial_state=None, safe_gate=False, cu_seqlens=None):
        return q.new_full((), 0)

    return dispatch(operation)(chunk_op)


def trace_ms(op: Op, calls: int) -> float:
    """CPU time of the first run of a compiled caller: Dynamo's work, as the backend is `eager`."""

    def caller(**tensors: Any) -> Tensor:
        total = tensors['q'].new_full((), 0)
        for _ in range(calls):
            total = total + op(**tensors)
        return total

    torch._dynamo.reset()
    compiled = torch.compile(caller, backend='eager', fullgraph=True)
    tensors = inputs()
    start = time.thread_time_ns()
    total = compiled(**tensors)
    spent = time.thread_time_ns() - start
    if int(total) != 0:
        raise AssertionError('not the default served')
    return spent / 1e6


@torch.no_grad()
def trace_times(repeats: int, calls: int = 32) -> list[dict[str, Any]]:
    ops = {'undispatched': undispatched} | {f'{n} narrow verifiers': rejecting(n) for n in (0, 1, 3)}
    for op in ops.values():
        trace_ms(op, 1)  # the plan is made outside the clock
    empty: list[float] = []
    whole: dict[str, list[float]] = {name: [] for name in ops}
    with quiet():
        for _ in range(repeats):
            empty.append(trace_ms(undispatched, 0))
            for name, op in ops.items():
                whole[name].append(trace_ms(op, calls))
    per_call = {name: (min(ms) - min(empty)) / calls for name, ms in whole.items()}
    base = per_call['undispatched']
    return [
        {
            'name': name,
            'ms_per_call': round(ms, 3),
            'over_undispatched_ms': round(ms - base, 3),
            'ratio': round(ms / base, 2),
        }
        for name, ms in per_call.items()
    ]


def mix(q, k, v, g, beta, scale=None, initial_state=None, safe_gate=False, cu_seqlens=None):
    """Stands in for a linear-attention operation: so cheap that the cost of reaching it would show."""
    return torch.sigmoid(g) * (q * k) * beta.unsqueeze(-1) + v


class MixRefused(BaseBackend):
    backend_type = 'refuses'
    priority = 1

    def mix(self, q, k, v, g, beta, scale=None, initial_state=None, safe_gate=False, cu_seqlens=None):
        raise AssertionError('this backend refuses the call')

    def mix_verifier(self, q):
        return (True, None) if q.dtype is torch.float64 else (False, 'float64 only')


class MixServed(BaseBackend):
    backend_type = 'serves'
    priority = 2

    def mix(self, q, k, v, g, beta, scale=None, initial_state=None, safe_gate=False, cu_seqlens=None):
        return torch.sigmoid(g) * (q * k) * beta.unsqueeze(-1) + v

    def mix_verifier(self, q, v):
        return (True, None) if q.shape[-1] == 16 and v.shape[-1] == 16 else (False, 'K = V = 16')


def dispatched_mix() -> Op:
    """`mix` from the second backend of two; the default raises, so that nothing else can have served."""
    operation = f'compile_bench_{next(fresh)}'
    registry = BackendRegistry(operation)
    registry.register(MixRefused())
    registry.register(MixServed())

    def mix(q, k, v, g, beta, scale=None, initial_state=None, safe_gate=False, cu_seqlens=None):
        raise AssertionError('the default must not serve')

    return dispatch(operation)(mix)


class Layer(nn.Module):
    def __init__(self, op: Op, width: int) -> None:
        super().__init__()
        self.op = op
        self.proj, self.beta, self.out = nn.Linear(width, 4 * width), nn.Linear(width, 2), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, g = (part.unflatten(-1, (2, -1)) for part in self.proj(x).chunk(4, -1))
        mixed = self.op(q, k, v, g, self.beta(x).sigmoid(), scale=None, safe_gate=False)
        return x + self.out(mixed.flatten(-2))


def model(op: Op, width: int = 32, depth: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(op, width) for _ in range(depth))).eval()


def compiled_model(op: Op, fullgraph: bool) -> Callable[[Tensor], Tensor]:
    layers = model(op)

    def forward(x: Tensor) -> Tensor:
        return layers(x)

    # a code object of its own: Dynamo keeps its entries per code, and each model would walk the guards of the others
    own = types.FunctionType(forward.__code__.replace(), forward.__globals__, 'forward', None, forward.__closure__)
    return torch.compile(own, fullgraph=fullgraph)


@torch.no_grad()
def steady_state(rounds: int, copies: int) -> list[dict[str, Any]]:
    """The same model with and without dispatch, several copies of each.

    Two copies of the *same* program differ by some percent for where their code and weights happen to lie: the best
    copy of each round counts, and how far the copies lie apart is shown beside.
    """
    torch._dynamo.reset()
    torch.set_num_threads(1)  # one thread, so that its CPU clock sees all of the work
    x = torch.randn(1, 32, 32)
    expected = model(mix)(x)
    makers: dict[str, Callable[[], Op]] = {
        'undispatched': lambda: mix,
        'dispatched': dispatched_mix,
        'control: behind compiler.disable': lambda: torch.compiler.disable(dispatched_mix()),
    }
    bursts: dict[str, Burst] = {}
    for copy in range(copies):
        for name, make in makers.items():
            run = compiled_model(make(), fullgraph=not name.startswith('control'))
            torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-4)
            bursts[f'{name} {copy}'] = burst_of(run, x)
    samples = timed(bursts, rounds=rounds, burst_ms=3.0)
    best, spread = {}, {}
    for name in makers:
        mine = [samples[f'{name} {copy}'] for copy in range(copies)]
        best[name] = Samples(tuple(min(ns) for ns in zip(*(sample.ns for sample in mine), strict=True)))
        spread[name] = max(sample.min for sample in mine) / min(sample.min for sample in mine)
    base = best['undispatched']
    return [
        {
            'name': name,
            'us_min': round(sample.min / 1e3, 1),
            'us_median': round(sample.median / 1e3, 1),
            'ratio_min': round(sample.min / base.min, 3),
            'ratio_median': round(sample.median / base.median, 3),
            'copies_differ_by': round(spread[name], 3),
            'target': 1.02 if name == 'dispatched' else None,
        }
        for name, sample in best.items()
    ]


def burst_of(run: Callable[[Tensor], Tensor], x: Tensor) -> Burst:
    def burst(n: int) -> None:
        for _ in itertools.repeat(None, n):
            run(x)

    return burst
