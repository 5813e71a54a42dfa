"""Dispatch on one small operation, on a CPU, in plain PyTorch: `python examples/dispatch.py`.

It checks every claim that it prints, and exits with status 1 at the first one that is false.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fla.backends import BackendRegistry, BaseBackend, NoBackendError, dispatch, explain, trace, use_backend
from fla.utils.testing import relative_rms

TOGGLE = 'FLA_DEMO_CHUNKED'


@dispatch('demo')
def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None = None) -> Tensor:
    """Computes S[t] = exp(g[t]) S[t-1] + k[t] v[t]^T and o[t] = q[t]^T S[t], step by step.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        g: log decay, [B, T, H], at most 0.
        initial_state: [B, H, K, V]. Default: zero.

    Returns:
        o: [B, T, H, V].
    """
    (B, T, H, K), V = q.shape, v.shape[-1]
    state = q.new_zeros(B, H, K, V) if initial_state is None else initial_state
    outputs = []
    for t in range(T):
        update = torch.einsum('bhk,bhv->bhkv', k[:, t], v[:, t])
        state = state * g[:, t, :, None, None].exp() + update
        outputs.append(torch.einsum('bhk,bhkv->bhv', q[:, t], state))
    return torch.stack(outputs, 1)


class ChunkedBackend(BaseBackend):
    """Computes whole chunks with matrix products. It has no `initial_state`, so it does not serve calls that pass one."""

    backend_type = 'chunked'
    kind = 'native'
    env_var = TOGGLE
    priority = 3
    dtypes = (torch.float32,)
    chunk = 32

    def gated_linear_attention_verifier(self, q: Tensor) -> tuple[bool, object]:
        if q.shape[1] % 32 != 0:
            return False, ('T must be a multiple of 32, got %s', q.shape[1])
        return True, None

    def gated_linear_attention(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        (B, T, H, K), V, C = q.shape, v.shape[-1], self.chunk
        # [chunks, B, H, C, ...]
        q, k, v = (x.reshape(B, T // C, C, H, -1).permute(1, 0, 3, 2, 4) for x in (q, k, v))
        total = g.reshape(B, T // C, C, H).permute(1, 0, 3, 2).cumsum(-1)
        # Masked before exp, which would overflow in the upper triangle: the gradient of 0 times infinity is NaN.
        decay = total[..., :, None] - total[..., None, :]
        decay = decay.masked_fill(torch.ones(C, C, dtype=torch.bool).triu(1), float('-inf')).exp()
        inside = (q @ k.transpose(-1, -2) * decay) @ v
        update = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2) @ v
        state, outputs = q.new_zeros(B, H, K, V), []
        for n in range(T // C):
            outputs.append(inside[n] + (q[n] * total[n].exp()[..., None]) @ state)
            state = state * total[n][..., -1, None, None].exp() + update[n]
        return torch.stack(outputs, 1).permute(0, 1, 3, 2, 4).reshape(B, T, H, V)


class ReferenceBackend(BaseBackend):
    """Computes all pairs of time steps at once, without the recurrence, in plain PyTorch, for every argument."""

    backend_type = 'reference'
    kind = 'reference'

    def gated_linear_attention(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None = None
    ) -> Tensor:
        T, total = q.shape[1], g.cumsum(1)
        decay = total[:, :, None] - total[:, None, :]
        future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
        decay = decay.masked_fill(future[None, :, :, None], float('-inf')).exp()
        o = torch.einsum('bthk,bshk,btsh,bshv->bthv', q, k, decay, v)
        if initial_state is not None:
            o = o + torch.einsum('bthk,bth,bhkv->bthv', q, total.exp(), initial_state)
        return o


registry = BackendRegistry('demo')
registry.register(ChunkedBackend())
registry.register(ReferenceBackend())


def oracle(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Computes the definition in float64, one product at a time."""
    q, k, v, g = (x.double() for x in (q, k, v, g))
    state = (k[:, 0, :, :, None] * v[:, 0, :, None, :]) * 0
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(outputs, 1)


def inputs(T: int, *, B: int = 2, H: int = 2, K: int = 32, V: int = 32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(T)
    q, k = (torch.randn(B, T, H, K, generator=generator) / K**0.5 for _ in range(2))
    g = -torch.rand(B, T, H, generator=generator) / 4
    return [q, k, torch.randn(B, T, H, V, generator=generator), g]


def section(title: str) -> None:
    print(f'\n{title}\n{"-" * len(title)}')


def claim(text: str, holds: bool) -> None:
    """Prints a claim, and exits if it does not hold."""
    print(f'{"ok   " if holds else "FALSE"} {text}', flush=True)
    if not holds:
        sys.exit(1)


def show_decision(what: str, expected: str, *args: Tensor, **kwargs: Tensor) -> None:
    decision = explain(gated_linear_attention, *args, **kwargs)
    print(f'\n{what}:\n{decision}')
    with trace() as t:
        gated_linear_attention(*args, **kwargs)
    claim(f'explain says {expected!r}, and {expected!r} ran', decision.winner == t.last_backend('demo') == expected)


def numbers() -> None:
    section('1. Three implementations of one operation, against the definition in float64')
    tensors = inputs(128)

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        o = function(*leaves)
        o.backward(torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o))
        return [o.detach(), *(x.grad for x in leaves if x.grad is not None)]

    exact = run(oracle)
    for name in ('default', 'chunked', 'reference'):
        with use_backend(name, op='demo'):
            results = run(gated_linear_attention)
        errors = [relative_rms(a, b) for a, b in zip(exact, results, strict=True)]
        text = ', '.join(f'{what} {error:.1e}' for what, error in zip(('o', 'dq', 'dk', 'dv', 'dg'), errors, strict=True))
        claim(f'{name:<9} relative RMS errors below 1e-5: {text}', len(errors) == 5 and max(errors) < 1e-5)


def selection() -> None:
    section('2. Which one runs, and why')
    tensors = inputs(64)
    show_decision('T = 64', 'chunked', *tensors)
    show_decision('T = 65', 'default', *inputs(65))
    show_decision('float64', 'default', *(x.double() for x in tensors))
    state = torch.zeros(2, 2, 32, 32)
    show_decision('an argument that the chunked backend does not have', 'default', *tensors, initial_state=state)
    os.environ[TOGGLE] = '0'
    show_decision(f'{TOGGLE}=0', 'default', *tensors)
    del os.environ[TOGGLE]
    print(f'\nforced to run on T = 65, the chunked backend cannot: {refusal(inputs(65))}')


def refusal(tensors: list[Tensor]) -> NoBackendError | None:
    with use_backend('chunked', op='demo'):
        try:
            gated_linear_attention(*tensors)
        except NoBackendError as error:
            return error
    claim('a forced backend that cannot serve the call raises NoBackendError', False)
    return None


def compiled() -> None:
    from torch._dynamo.utils import counters  # here, because it imports all of Dynamo

    section('3. Inside torch.compile(fullgraph=True)')
    graphs: list[torch.fx.GraphModule] = []
    ran: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        """Runs Dynamo's graph without Inductor, and records which graph runs."""
        graphs.append(graph)
        number = len(graphs) - 1

        def run(*args: Tensor) -> object:
            ran.append(number)
            return graph(*args)

        return run

    def caller(*tensors: Tensor) -> Tensor:
        return gated_linear_attention(*tensors) * 2

    model = torch.compile(caller, backend=backend, fullgraph=True, dynamic=False)
    even, odd = inputs(32), inputs(9)
    counters.clear()
    with trace() as t:
        for toggle in ('1', '0', '1', '0', '1', '0'):
            os.environ[TOGGLE] = toggle
            torch.testing.assert_close(model(*even), oracle(*even).float() * 2)
        del os.environ[TOGGLE]
        torch.testing.assert_close(model(*odd), oracle(*odd).float() * 2)
        traced = [record.backend for record in t]
    breaks = sum(counters['graph_break'].values())
    claim(f'{breaks} graph breaks', breaks == 0)
    claim(
        f'{len(graphs)} compilations, one per case (toggle on, toggle off, T = 9), for {", ".join(traced)}',
        traced == ['chunked', 'default', 'default'],
    )
    names = [traced[number] for number in ran]
    claim(
        f'with the toggle on, off, on, off, on, off, and for T = 9, these ran: {", ".join(names)}',
        names == ['chunked', 'default'] * 3 + ['default'],
    )


def best_ms(function: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


@torch.no_grad()
def speed() -> None:
    section('4. What a backend gains, and what dispatch costs')
    tensors = inputs(512)
    times = {}
    for name in ('default', 'chunked'):
        bound = gated_linear_attention.bind(backend=name)
        bound(*tensors)
        times[name] = best_ms(lambda bound=bound: bound(*tensors))
    gain = times['default'] / times['chunked']
    claim(f'T = 512: default {times["default"]:.1f} ms, chunked {times["chunked"]:.1f} ms, {gain:.1f}x faster', gain > 1)

    ratio = overhead()
    print('Overhead of a dispatched call over a direct one, for one backend that checks a dtype and a verifier that reads a')
    print(f'shape: {ratio:.2f} x torch.empty(0). `python benchmarks/dispatch_overhead.py` measures this with more care.')
    claim('dispatch costs less than 4 x torch.empty(0) per call', ratio < 4)


class NothingBackend(BaseBackend):
    """Does nothing, so that only dispatch takes time."""

    backend_type = 'nothing'
    dtypes = (torch.float32,)

    def nothing_verifier(self, x: Tensor) -> tuple[bool, str | None]:
        return (True, None) if x.shape[-1] == 8 else (False, 'the last dimension must be 8')

    def nothing(self, x: Tensor) -> Tensor:
        return x


@dispatch('demo')
def nothing(x: Tensor) -> Tensor:
    """Returns its argument."""
    return x


registry.register(NothingBackend())


def overhead() -> float:
    """Returns dispatched minus direct time, relative to `torch.empty(0)`, each the fastest of interleaved bursts."""
    x, direct = torch.zeros(8), NothingBackend().nothing
    cases = {
        'dispatched': lambda: nothing(x),
        'direct': lambda: direct(x),
        'empty': lambda: torch.empty(0),
        'loop': lambda: None,
    }
    fastest = dict.fromkeys(cases, float('inf'))
    for _ in range(100):
        for name, call in cases.items():
            start = time.thread_time_ns()
            for _ in range(200):
                call()
            fastest[name] = min(fastest[name], time.thread_time_ns() - start)
    return (fastest['dispatched'] - fastest['direct']) / (fastest['empty'] - fastest['loop'])


def main() -> None:
    started = time.perf_counter()
    torch.set_num_threads(1)
    print('fla-dispatch: one public function, several implementations, one chosen for each call.')
    print('This example has made-up backends in plain PyTorch; it needs no GPU.')
    numbers()
    selection()
    compiled()
    speed()
    print(f'\nEvery claim holds. {time.perf_counter() - started:.1f} s.')


if __name__ == '__main__':
    main()
