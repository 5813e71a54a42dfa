"""Times for `compile_breaks.py`: tracing a dispatched call, and running a compiled model with dispatched calls."""

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

from fla.backends import BackendRegistry, BaseBackend, dispatch


def refuses(V: int) -> Callable[..., Any]:
    """Returns a narrow verifier that tests what the verifier of `First` tests, and rejects at the last test."""

    def chunk_op_verifier(self, q, v, safe_gate):
        if safe_gate or torch.is_grad_enabled() or q.dtype is not torch.float32 or q.shape[-1] != 16:
            return False, 'another call'
        return (True, None) if v.shape[-1] == V else (False, 'another V')

    return chunk_op_verifier


def rejecting(n: int) -> Op:
    """Returns a dispatched operation with n backends, all of which reject the call."""
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
    """CPU time of a compiled caller's first run, which is Dynamo's work: the backend is `eager`."""

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
        raise AssertionError('the default did not serve')
    return spent / 1e6


@torch.no_grad()
def trace_times(repeats: int, calls: int = 32) -> list[dict[str, Any]]:
    """Returns a row per operation: Dynamo's milliseconds for a call, in all and over an undispatched call."""
    ops = {'undispatched': undispatched} | {f'{n} narrow verifiers': rejecting(n) for n in (0, 1, 3)}
    for op in ops.values():
        trace_ms(op, 1)  # makes the plan before the measurement
    empty: list[float] = []
    total: dict[str, list[float]] = {name: [] for name in ops}
    with quiet():
        for _ in range(repeats):
            empty.append(trace_ms(undispatched, 0))
            for name, op in ops.items():
                total[name].append(trace_ms(op, calls))
    per_call = {name: (min(ms) - min(empty)) / calls for name, ms in total.items()}
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
    """A stand-in for a linear-attention operation, cheap enough for the cost of dispatch to show."""
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
    """Returns `mix`, served by the second of two backends; the first rejects and the default raises."""
    operation = f'compile_bench_{next(fresh)}'
    registry = BackendRegistry(operation)
    registry.register(MixRefused())
    registry.register(MixServed())

    def mix(q, k, v, g, beta, scale=None, initial_state=None, safe_gate=False, cu_seqlens=None):
        raise AssertionError('the default must not serve')

    return dispatch(operation)(mix)


class Layer(nn.Module):
    def __init__(self, op: Op, weights: nn.ModuleDict) -> None:
        super().__init__()
        self.op = op
        self.proj, self.beta, self.out = weights['proj'], weights['beta'], weights['out']

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, g = (part.unflatten(-1, (2, -1)) for part in self.proj(x).chunk(4, -1))
        mixed = self.op(q, k, v, g, self.beta(x).sigmoid(), scale=None, safe_gate=False)
        return x + self.out(mixed.flatten(-2))


def make_weights(width: int, depth: int) -> list[nn.ModuleDict]:
    torch.manual_seed(0)
    shapes = {'proj': (width, 4 * width), 'beta': (width, 2), 'out': (width, width)}
    return [nn.ModuleDict({name: nn.Linear(*shape) for name, shape in shapes.items()}) for _ in range(depth)]


def model(op: Op, weights: list[nn.ModuleDict]) -> nn.Module:
    return nn.Sequential(*(Layer(op, one) for one in weights)).eval()


def compiled_model(layers: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return layers(x)

    # a new code object: Dynamo caches by code, and each model would otherwise walk the guards of the others
    copy = types.FunctionType(forward.__code__.replace(), forward.__globals__, 'forward', None, forward.__closure__)
    return torch.compile(copy, **options)


def no_op_compiler(graph: Any, examples: list[Tensor]) -> Callable[..., tuple[Tensor]]:
    """A compiler whose programs do nothing: a call costs what Dynamo's guards and entry cost."""
    result = torch.zeros_like(examples[0])
    return lambda *_: (result,)


@torch.no_grad()
def steady_state(rounds: int, copies: int) -> list[dict[str, Any]]:
    """Returns times of a model with and without dispatch, and of the guards alone.

    The compiled program is identical with and without dispatch, so the difference is guards. Alone, their data stays in the
    CPU's caches; between real work it does not, and the whole model shows two to three times the difference.

    All models share their weights, because the place of weights in memory makes 10 % between two copies of one program. The
    best copy of each round counts; `copies_differ_by` is the remaining difference between copies.
    """
    torch._dynamo.reset()
    torch.set_num_threads(1)  # so that this thread's CPU clock sees all work
    x, weights = torch.randn(1, 32, 32), make_weights(width=32, depth=8)
    expected = model(mix, weights)(x)
    fullgraph, disable = {'fullgraph': True}, torch.compiler.disable
    programs: dict[str, tuple[Callable[[], Op], dict[str, Any]]] = {
        'undispatched': (lambda: mix, fullgraph),
        'dispatched': (dispatched_mix, fullgraph),
        'control: behind compiler.disable': (lambda: disable(dispatched_mix()), {}),
        'guards alone: undispatched': (lambda: mix, {**fullgraph, 'backend': no_op_compiler}),
        'guards alone: dispatched': (dispatched_mix, {**fullgraph, 'backend': no_op_compiler}),
    }
    bursts: dict[str, Burst] = {}
    for copy in range(copies):
        for name, (make, options) in programs.items():
            run = compiled_model(model(make(), weights), **options)
            result = run(x)
            if 'backend' not in options:
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
            bursts[f'{name} {copy}'] = burst_of(run, x)
    samples = timed(bursts, rounds=rounds, burst_ms=3.0)
    rows, best = [], {}
    for name in programs:
        own = [samples[f'{name} {copy}'] for copy in range(copies)]
        best[name] = Samples(tuple(min(ns) for ns in zip(*(sample.ns for sample in own), strict=True)))
        base = best['guards alone: undispatched' if name.startswith('guards') else 'undispatched']
        spread = max(sample.min for sample in own) / min(sample.min for sample in own)
        rows.append(
            {
                'name': name,
                'us_min': round(best[name].min / 1e3, 1),
                'us_median': round(best[name].median / 1e3, 1),
                'ratio_min': round(best[name].min / base.min, 3),
                'ratio_median': round(best[name].median / base.median, 3),
                'copies_differ_by': round(spread, 3),
                'target': 1.02 if name == 'dispatched' else None,
            }
        )
    return rows


def burst_of(run: Callable[[Tensor], Tensor], x: Tensor) -> Burst:
    def burst(n: int) -> None:
        for _ in itertools.repeat(None, n):
            run(x)

    return burst
