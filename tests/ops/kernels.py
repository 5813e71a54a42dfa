"""The Triton kernels of both delta rules, called as users call them, against the definition in float64. Interpreted on a CPU
and compiled on a GPU, they are held to the same bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fla.backends import trace, use_backend
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
from tests import bounds
from tests.ops.delta_rules import CHUNKED, FLAGS, KDA, RAW, Case, case, measure, on_grid

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Above as many numbers in the states of all steps, the step-by-step definition needs too much memory and time.
MOST_STATES = 2**24
EVERYTHING: dict[str, Any] = dict(**RAW, **FLAGS, allow_neg_eigval=True, state_v_first=True)


def operation(function) -> str:
    return 'kda' if function in KDA else 'gated_delta_rule'


def call(function, given: Case, backend: str = 'default', **more):
    """o and the final state, from that backend and no other."""
    with use_backend(backend, op=operation(function)), trace() as recorded:
        out = given.call(function, **more)
    assert recorded.last_backend(f'{operation(function)}.{function.__name__}') == backend
    return out


def by_chunks(function):
    """For `definition`: the recurrence on the reference backend, which in float64 differs from the steps by 1e-10."""
    chunked = chunk_kda if function in KDA else chunk_gated_delta_rule

    def recurrence(**arguments):
        with use_backend('reference', op=operation(function)):
            return chunked(**arguments)

    return recurrence


def bound(name: str, operands: torch.dtype, result: torch.dtype, decodes: bool) -> tuple[float, float]:
    """Of the relative RMS and of the worst row. A kernel that decodes multiplies in float32, and rounds its results once."""
    if decodes and result != FP32:
        return bounds.of_reference(result)
    return bounds.of_kernel(name, FP32 if decodes else operands)


def beyond(function, given: Case, *, rows: bool = False, **more) -> list[str]:
    """What is outside its bounds: of every result and every gradient, where the function is chunked, else of the results of
    the kernel that decodes, which has no gradient. With `rows` row by row, as on the grid. `more` goes to the call."""
    decodes = function not in CHUNKED

    def run(tensors):
        with torch.set_grad_enabled(not decodes):
            return call(function, given.with_tensors(**tensors), **more)

    q, v = given.tensors['q'], given.tensors['v']
    steps = None if v.numel() * q.shape[-1] <= MOST_STATES else by_chunks(function)
    emulated = {} if rows or decodes or q.dtype in bounds.EXACT else emulate(function, given, steps)
    found = []
    for name, (rms, row, dtype) in measure(given, run, steps, not decodes, blocks=not rows).items():
        most_rms, most_row = bound(name, q.dtype, dtype, decodes)
        if name in emulated:
            most_rms, most_row = bounds.off_grid(name, q.dtype, emulated[name])
        if not (rms <= most_rms and row <= most_row):
            found.append(f'{name}: RMS {rms:.1e} (bound {most_rms:.1e}), worst row {row:.1e} (bound {most_row:.1e})')
    return found


def emulate(function, given: Case, recurrence=None) -> dict[str, tuple[float, float]]:
    """Relative RMS and worst row of the reference multiplying what the algorithm does, rounded to the dtype of q, for some
    gradients of o."""

    def run(tensors):
        return call(function, given.with_tensors(**tensors), 'reference')

    largest: dict[str, tuple[float, float]] = {}
    # a dispatch mode holds on its own thread, and the backward of a GPU runs on another one
    rounded = bounds.AlgorithmOperands(given.tensors['q'].dtype, given.per_channel)
    with rounded, torch.autograd.set_multithreading_enabled(False):
        for seed, scale in bounds.DRAWS:
            for name, (rms, row, _) in measure(given, run, recurrence, blocks=True, seed=seed, scale=scale).items():
                old = largest.get(name, (0.0, 0.0))
                largest[name] = max(old[0], rms), max(old[1], row)
    return largest


def check(function, given: Case, **more) -> None:
    """Every result of the kernels is within its bounds; `more` are arguments of the call."""
    wrong = beyond(function, given, **more)
    assert not wrong, '; '.join(wrong)


def check_on_grid(function, name: str, **more) -> None:
    """`check` of a case that the bounds were measured on, row by row; `more` are options of the case."""
    wrong = beyond(function, on_grid(function, name, **more), rows=True)
    assert not wrong, '; '.join(wrong)


def check_each(function, options: Mapping[str, Mapping[str, Any]], **common: Any) -> None:
    """`check` of several cases that the same compiled kernels serve: as one test, so that one process compiles them once."""
    wrong = {name: beyond(function, case(function, **{**common, **one})) for name, one in options.items()}
    assert not any(wrong.values()), '\n'.join(f'{name}: {"; ".join(text)}' for name, text in wrong.items() if text)


def everything(function, given: Case, backend: str = 'default', **more) -> dict[str, torch.Tensor]:
    """o and the final state and, where the function is chunked, the gradient of each tensor for fixed gradients of those."""
    decodes = function not in CHUNKED
    leaves = {name: x.detach().requires_grad_(not decodes) for name, x in given.tensors.items()}
    with torch.set_grad_enabled(not decodes):
        o, final = call(function, given.with_tensors(**leaves), backend, **more)
    found = {'o': o.detach(), 'final': final.detach()}
    if not decodes:
        got = torch.autograd.grad([o, final], list(leaves.values()), upstream(o, final))
        found |= {f'd{name}': x for name, x in zip(leaves, got, strict=True)}
    return found


def upstream(*results: torch.Tensor) -> list[torch.Tensor]:
    """Normal gradients of some results, the same on every device."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(x.shape, generator=generator).to(x) for x in results]


def assert_same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
    """The same bits, on whatever devices."""
    assert first.keys() == second.keys()
    differ = [name for name, x in first.items() if not torch.equal(x.cpu(), second[name].cpu())]
    assert not differ
