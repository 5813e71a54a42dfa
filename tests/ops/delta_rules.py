"""The four functions of the gated delta rule and of Kimi delta attention on generated inputs, beside the step-by-step
definition in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fla.ops.gated_delta_rule import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    naive_gdn_gate,
    naive_recurrent_gated_delta_rule,
)
from fla.ops.kda import (
    chunk_kda,
    fused_recurrent_kda,
    naive_kda_gate,
    naive_kda_lowerbound_gate,
    naive_recurrent_kda,
)
from tests import bounds

GDN = (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule)
KDA = (chunk_kda, fused_recurrent_kda)
CHUNKED = (chunk_gated_delta_rule, chunk_kda)
FUNCTIONS = (*GDN, *KDA)


def name_of(function) -> str:
    return function.__name__


@dataclass
class Case:
    """Tensor arguments by name, those that are None left out; `cu_seqlens`; everything else."""

    tensors: dict[str, torch.Tensor]
    cu_seqlens: torch.Tensor | None
    options: dict[str, Any]
    per_channel: bool

    @property
    def count(self) -> int:
        return self.tensors['q'].shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def call(self, function, **more):
        arguments = {'output_final_state': True, 'cu_seqlens': self.cu_seqlens, **self.options, **more}
        return function(**self.tensors, **arguments)

    def with_tensors(self, **tensors) -> Case:
        return Case({**self.tensors, **tensors}, self.cu_seqlens, self.options, self.per_channel)


def gates(shape: tuple[int, ...], strength: float | str | None) -> torch.Tensor:
    """None: log(sigmoid(normal)). A number: that, everywhere. 'spread': evenly over the orders of magnitude from -1e-4 to
    -20. 'switch': one half of the steps -20, the others -1e-4. 'reset': a few are -inf."""
    if strength is None:
        return torch.nn.functional.logsigmoid(torch.randn(shape))
    if strength == 'spread':
        return -(torch.rand(shape) * 12.2 - 9.21).exp()
    if strength == 'switch':
        return torch.where(torch.rand(shape) < 0.5, -20.0, -1e-4)
    if strength == 'reset':
        return torch.where(torch.rand(shape) < 0.05, -torch.inf, -torch.rand(shape))
    return torch.full(shape, strength)


def case(
    function,
    *,
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype | None = None,
    B: int = 1,
    T: int = 70,
    H: int = 1,
    HV: int = 1,
    K: int = 24,
    V: int = 20,
    lens: list[int] | None = None,
    index: torch.dtype = torch.int32,
    strength: float | str | None = None,
    initial: bool = True,
    A_log: bool = True,
    dt_bias: bool = True,
    device: str = 'cpu',
    draw: int = 0,
    **options: Any,
) -> Case:
    """Normal q and v, unit k. The gate tensors are float32 unless the rest is float64, or `gate_dtype`."""
    torch.manual_seed(T + 7 * K + 1000 * draw)
    per_channel = function in KDA
    raw = options.get('use_gate_in_kernel', False)
    cu_seqlens = None
    if lens is not None:
        B, T = 1, sum(lens)
        cu_seqlens = torch.tensor([0, *lens]).cumsum(0).to(index).to(device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    gate_dtype = gate_dtype or wide
    q, k, v = torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.randn(B, T, HV, V)
    if not options.get('use_qk_l2norm_in_kernel'):
        k = torch.nn.functional.normalize(k, dim=-1)
    shape = (B, T, HV, K) if per_channel else (B, T, HV)
    g = torch.randn(shape) if raw else gates(shape, strength)
    beta = torch.randn(B, T, HV) if options.get('use_beta_sigmoid_in_kernel') else torch.rand(B, T, HV)
    tensors = {'q': q.to(dtype), 'k': k.to(dtype), 'v': v.to(dtype), 'g': g.to(gate_dtype), 'beta': beta.to(gate_dtype)}
    if raw and A_log:
        tensors['A_log'] = torch.randn(HV).to(wide)
    if raw and dt_bias:
        tensors['dt_bias'] = torch.randn(HV * K if per_channel else HV).to(wide)
    if initial:
        count = B if lens is None else len(lens)
        dims = (V, K) if options.get('state_v_first') else (K, V)
        tensors['initial_state'] = torch.randn(count, HV, *dims).to(wide)
    return Case({name: x.to(device) for name, x in tensors.items()}, cu_seqlens, options, per_channel)


def like(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, NaN in the gaps."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    room = x.detach().new_full((span if x.numel() else 0,), float('nan'))
    return room.as_strided(x.shape, x.stride()).copy_(x.detach())


def strided(given: Case) -> Case:
    """The same numbers in tensors that are not contiguous: heads before steps, gaps of NaN around every row and between
    the lengths."""
    found = {}
    for name, x in given.tensors.items():
        if x.dim() == 4 and name != 'initial_state':
            room = x.new_full((x.shape[0], x.shape[2], x.shape[1] + 1, x.shape[3] + 3), float('nan'))
            found[name] = room[:, :, 1:, 2:-1].transpose(1, 2).copy_(x)
        elif x.dim() == 3:
            found[name] = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif x.dim() == 4:
            found[name] = x.transpose(2, 3).contiguous().transpose(2, 3)
        else:
            found[name] = x
    ends = None if given.cu_seqlens is None else apart(given.cu_seqlens)
    return replace(given.with_tensors(**found), cu_seqlens=ends)


def apart(lens: torch.Tensor) -> torch.Tensor:
    """The same lengths, two numbers apart in memory."""
    return torch.stack([lens, torch.full_like(lens, -1)], 1)[:, 0]


def normalised(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def prepare(given: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the definition takes: norms, gates, sigmoids and layouts undone."""
    options, out = given.options, {name: tensors[name] for name in ('q', 'k', 'v', 'g', 'beta')}
    A_log, dt_bias, state = (tensors.get(name) for name in ('A_log', 'dt_bias', 'initial_state'))
    if options.get('use_qk_l2norm_in_kernel'):
        out['q'], out['k'] = normalised(out['q']), normalised(out['k'])
    if options.get('use_gate_in_kernel'):
        if options.get('lower_bound') is not None:
            out['g'] = naive_kda_lowerbound_gate(out['g'], A_log, dt_bias, options['lower_bound'])
        else:
            out['g'] = (naive_kda_gate if given.per_channel else naive_gdn_gate)(out['g'], A_log, dt_bias)
    if options.get('use_beta_sigmoid_in_kernel'):
        out['beta'] = torch.sigmoid(out['beta']) * (2 if options.get('allow_neg_eigval') else 1)
    if state is not None:
        out['initial_state'] = state.transpose(-1, -2) if options.get('state_v_first') else state
    return out


def definition(given: Case, tensors: dict[str, torch.Tensor], recurrence=None):
    """o, the final state as the function lays it out, and the q that the recurrence saw. `recurrence` may stand for the
    step-by-step one, which is slow for long sequences."""
    ready = prepare(given, tensors)
    run = recurrence or (naive_recurrent_kda if given.per_channel else naive_recurrent_gated_delta_rule)
    o, state = run(**ready, scale=given.options.get('scale'), output_final_state=True, cu_seqlens=given.cu_seqlens)
    return o, state.transpose(-1, -2) if given.options.get('state_v_first') else state, ready['q']


def measure(
    given: Case, run, recurrence=None, gradients: bool = True, blocks: bool = False, seed: int = 5, scale: float = 1.0
) -> dict[str, tuple[float, float, torch.dtype]]:
    """(relative RMS error, worst row, dtype) of every output and gradient of `run(tensors)`, which returns o and the final
    state; `recurrence` as for `definition`. With `blocks`, rows are those of `bounds` off the grid. The gradients of o and
    of the final state are drawn with `seed`, times `scale`."""
    leaves = {name: like(x).requires_grad_(gradients) for name, x in given.tensors.items()}
    exact = {name: x.detach().double().requires_grad_(gradients) for name, x in given.tensors.items()}
    o, final = run(leaves)
    expected_o, expected_final, seen = definition(given, exact, recurrence)
    assert o.shape == expected_o.shape
    assert final.shape == expected_final.shape
    assert o.is_contiguous()
    for name, x in leaves.items():
        assert torch.equal(x, given.tensors[name]), f'{name} was changed'
    if not gradients:
        pairs = {'o': (expected_o, o), 'final': (expected_final, final)}
        return {
            n: (bounds.relative_rms(*xs), bounds.worst_row(*rows(n, blocks, *xs)), xs[1].dtype) for n, xs in pairs.items()
        }
    torch.manual_seed(seed)
    do, d_final = torch.randn_like(o) * scale, torch.randn_like(final) * scale
    loss = (expected_o * do.double()).sum() + (expected_final * d_final.double()).sum()
    *wanted, d_seen = torch.autograd.grad(loss, [*exact.values(), seen])
    floor = gate_floor(given, seen, d_seen, expected_final, d_final.double())
    summed = float(wanted[3].norm()) / max(1, leaves.get('dt_bias', leaves['beta'][0, :1]).numel()) ** 0.5
    got = torch.autograd.grad([o, final], list(leaves.values()), [do, d_final])
    pairs = {'o': (expected_o, o), 'final': (expected_final, final)}
    for name, right, gradient in zip(leaves, wanted, got, strict=True):
        assert (gradient.shape, gradient.dtype) == (leaves[name].shape, leaves[name].dtype)
        pairs[f'd{name}'] = (right, gradient)
    found = {}
    for name, (right, gradient) in pairs.items():
        least = {'dg': floor, 'dA_log': summed, 'ddt_bias': summed}.get(name, 0.0)
        right, gradient = right.detach(), gradient.detach()
        row_least = bounds.GATE_ROW_FLOOR / bounds.GATE_FLOOR * least if name == 'dg' else least
        worst = bounds.worst_row(*rows(name, blocks, right, gradient), row_least)
        found[name] = bounds.relative_rms(right, gradient, least), worst, gradient.dtype
    return found


def rows(name: str, blocks: bool, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """With the rows that `bounds.worst_row` compares as the last dimension."""
    if name in ('dg', 'dbeta') or (blocks and name in ('o', 'dq', 'dk', 'dv')):
        return [bounds.in_blocks(x) for x in tensors]
    return [bounds.of_states(x) if blocks and name in ('final', 'dinitial_state') else x for x in tensors]


def gate_floor(given: Case, q: torch.Tensor, d_q: torch.Tensor, state: torch.Tensor, d_state: torch.Tensor) -> float:
    """`GATE_FLOOR` times the RMS of the terms that cancel in a gradient of a gate: q times its gradient or, where larger,
    the products of the last state and its gradient, of which one gate's gradient sums as many as it decays numbers."""
    at_end = (state * d_state).detach()
    at_end = at_end.transpose(-1, -2) if given.options.get('state_v_first') else at_end
    each = (q * d_q).detach()
    if given.per_channel:
        at_end = at_end.norm(dim=-1)
    else:
        each, at_end = each.sum(-1), at_end.flatten(2).norm(dim=-1)
    return bounds.GATE_FLOOR * max(float(x.square().mean().sqrt()) if x.numel() else 0.0 for x in (each, at_end))


# What is asked of every function and dtype: shapes, gate strengths, flags, packed sequences.
RAW = {'use_gate_in_kernel': True}
FLAGS = {'use_qk_l2norm_in_kernel': True, 'use_beta_sigmoid_in_kernel': True}
GRID = {
    'one step': {'T': 1, 'B': 2, 'H': 2, 'HV': 2},
    'two steps': {'T': 2, 'B': 2},
    'below a block': {'T': 15, 'H': 2, 'HV': 4},
    'a block': {'T': 16, 'K': 1, 'V': 1},
    'beyond a block': {'T': 17, 'K': 3, 'V': 5},
    'below a chunk': {'T': 63, 'K': 17, 'V': 33},
    'a chunk': {'T': 64, 'K': 32, 'V': 8, 'scale': 0.3},
    'beyond a chunk': {'T': 65, 'B': 2, 'initial': False},
    'three chunks': {'T': 130, 'H': 2, 'HV': 6, 'K': 12, 'V': 7},
    'wide': {'T': 20, 'K': 256, 'V': 256},
    'weak gates': {'T': 130, 'strength': -1e-4},
    'strong gates': {'T': 130, 'strength': -20.0},
    'medium gates': {'T': 130, 'strength': -3.0},
    'no gates': {'T': 100, 'strength': 0.0},
    'spread gates': {'T': 130, 'strength': 'spread', 'HV': 2},
    'switching gates': {'T': 130, 'strength': 'switch'},
    'norms and sigmoid': dict(T=70, **FLAGS),
    'negative eigenvalues': dict(T=70, HV=2, allow_neg_eigval=True, **FLAGS),
    'states turned': {'T': 66, 'state_v_first': True},
    'states turned, one step': dict(T=1, B=3, state_v_first=True, H=2, HV=4, **FLAGS),
    'raw gates': dict(T=66, HV=2, **RAW),
    'raw gates, no bias': dict(T=33, dt_bias=False, **RAW),
    'everything': dict(T=70, H=2, HV=4, allow_neg_eigval=True, state_v_first=True, scale=1.0, **RAW, **FLAGS),
    'packed': {'lens': [0, 1, 64, 0, 65, 3, 0], 'HV': 2},
    'packed int64': dict(lens=[17, 1, 1, 47], index=torch.int64, state_v_first=True, allow_neg_eigval=True, **RAW, **FLAGS),
    'packed singles': {'lens': [1] * 5, 'initial': False},
    'one sequence': {'lens': [70], 'strength': 'spread'},
}
KDA_GRID = {
    'lower bound': dict(T=66, HV=2, lower_bound=-5.0, **RAW),
    'lower bound alone': dict(T=40, HV=2, lower_bound=-2.5, A_log=False, dt_bias=False, **RAW),
    'lower bound and bias': dict(lens=[5, 0, 40], lower_bound=-5.0, A_log=False, **RAW),
}


def grid(functions=FUNCTIONS) -> list[tuple[Any, str]]:
    """(function, name of a case) of all that a function can be asked."""
    names = {f: [*GRID, *(KDA_GRID if f in KDA else {})] for f in functions}
    return [(f, name) for f in functions for name in names[f]]


def on_grid(function, name: str, **more: Any) -> Case:
    return case(function, **{**({**GRID, **KDA_GRID}[name]), **more})
