"""Cases of `dispatch_overhead.py`: operations, verifiers and checks like real ones, and the backend that must serve each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import linecache
import os
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from _timing import Burst
from torch import Tensor

from fla.backends import BackendRegistry, BaseBackend, Dispatcher, Policy, Rule, dispatch, set_policy, telemetry

OUT = [torch.tensor(i) for i in range(4)]
"""Results of the implementations: 0 from the default, 1 to 3 from the first, second and third backend."""


def wide_function(out: Tensor) -> Callable[..., Tensor]:
    """A function with five tensors and eleven options; `chunk_kda` has eighteen."""

    def chunk_op(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        return out

    return chunk_op


def wide_method(out: Tensor) -> Callable[..., Tensor]:
    def chunk_op(
        self,
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False,
        safe_gate=False,
        lower_bound=None,
        state_v_first=False,
        cu_seqlens=None,
    ):
        return out

    return chunk_op


def small_function(out: Tensor) -> Callable[..., Tensor]:
    """A function with the signature of `l2norm`."""

    def small_op(x: Tensor, eps: float = 1e-5, output_dtype: torch.dtype | None = None) -> Tensor:
        return out

    return small_op


def small_method(out: Tensor) -> Callable[..., Tensor]:
    def small_op(self, x, eps=1e-5, output_dtype=None):
        return out

    return small_op


@dataclass(frozen=True)
class Call:
    """Tensors of a call of the wide operation, which has five positional arguments and ten keywords."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None = None

    def burst(self, op: Callable[..., Any]) -> Burst:
        q, k, v, g, beta, state = self.q, self.k, self.v, self.g, self.beta, self.initial_state

        def run(n: int) -> Any:
            for _ in itertools.repeat(None, n):
                out = op(
                    q,
                    k,
                    v,
                    g,
                    beta,
                    scale=None,
                    initial_state=state,
                    output_final_state=False,
                    use_qk_l2norm_in_kernel=True,
                    use_gate_in_kernel=False,
                    use_beta_sigmoid_in_kernel=False,
                    allow_neg_eigval=False,
                    safe_gate=False,
                    lower_bound=None,
                    cu_seqlens=None,
                )
            return out

        return run


@dataclass(frozen=True)
class SmallCall:
    """Tensor of a call of the small operation, which has three positional arguments."""

    x: Tensor

    def burst(self, op: Callable[..., Any]) -> Burst:
        x = self.x

        def run(n: int) -> Any:
            for _ in itertools.repeat(None, n):
                out = op(x, 1e-6, None)
            return out

        return run


def wide_call(T: int, *, K: int = 128, V: int = 128, initial_state: Tensor | None = None) -> Call:
    new = functools.partial(torch.zeros, dtype=torch.bfloat16)
    q, k, v, beta = new(1, T, 2, K), new(1, T, 2, K), new(1, T, 2, V), new(1, T, 2)
    return Call(q, k, v, torch.zeros(1, T, 2, K), beta, initial_state)


CHUNK = wide_call(64)
DECODE = wide_call(1, initial_state=torch.zeros(1, 2, 128, 128))
SMALL = SmallCall(torch.zeros(2, 128, dtype=torch.bfloat16))

GATE, GRAD = 'the gate is fused elsewhere', 'inference only'
DTYPE, HEAD_DIM = 'bfloat16 only', 'head dimension 128 only'


def accepts(self, q, v, use_gate_in_kernel, safe_gate, output_final_state):
    """Tests flags, grad mode, dtype and two shapes, the cheapest first. `CHUNK` passes all of them."""
    if use_gate_in_kernel or safe_gate or output_final_state:
        return False, GATE
    if torch.is_grad_enabled():
        return False, GRAD
    if q.dtype is not torch.bfloat16:
        return False, DTYPE
    if q.shape[-1] != 128 or v.shape[-1] != 128:
        return False, HEAD_DIM
    return True, None


def wants_the_gate(self, use_gate_in_kernel):
    return (True, None) if use_gate_in_kernel else (False, GATE)


def wants_grad_mode(self, use_gate_in_kernel, safe_gate):
    if use_gate_in_kernel or safe_gate:
        return False, GATE
    return (True, None) if torch.is_grad_enabled() else (False, GRAD)


def wants_float32(self, q):
    return (True, None) if q.dtype is torch.float32 else (False, DTYPE)


def wants_head_dim_64(self, q):
    return (True, None) if q.shape[-1] == 64 else (False, HEAD_DIM)


def reads_two_shapes(self, q, v):
    return (True, None) if q.shape[-1] == 128 and v.shape[-1] == 128 else (False, HEAD_DIM)


def small_accepts(self, x):
    if x.dtype is not torch.bfloat16:
        return False, DTYPE
    return (True, None) if x.shape[-1] == 128 else (False, HEAD_DIM)


FLOATING = (torch.bfloat16, torch.float16, torch.float32)


def check_chunk(q, k, v, g, beta):
    """Checks rank, shape, dtype and device of five tensors. Reads each attribute once, and formats messages only for
    errors."""
    shape, v_shape, dtype, device = q.shape, v.shape, q.dtype, q.device
    if len(shape) != 4 or len(v_shape) != 4:
        raise ValueError(f'q and v must be [B, T, H, K] and [B, T, HV, V], got {shape} and {v_shape}')
    # unpacked: a slice of a torch.Size costs as much as reading the shape
    B, T, H, K = shape
    v_B, v_T, HV, _ = v_shape
    if k.shape != shape or v_B != B or v_T != T or HV % H or g.shape != (B, T, HV, K) or beta.shape != (B, T, HV):
        raise ValueError(f'q, k, v, g, beta do not fit: {shape}, {k.shape}, {v_shape}, {g.shape}, {beta.shape}')
    if k.dtype is not dtype or v.dtype is not dtype or dtype not in FLOATING:
        raise TypeError(f'q, k, v must share one of {FLOATING}, got {dtype}, {k.dtype}, {v.dtype}')
    if g.dtype not in FLOATING or beta.dtype not in FLOATING:
        raise TypeError(f'g and beta must be one of {FLOATING}, got {g.dtype}, {beta.dtype}')
    if k.device != device or v.device != device or g.device != device or beta.device != device:
        devices = ', '.join(str(tensor.device) for tensor in (q, k, v, g, beta))
        raise ValueError(f'q, k, v, g, beta must be on one device, are on {devices}')


def check_decode(q, k, v, beta, initial_state):
    """Checks a decode step: shapes that index memory, dtypes of products, and the state that comes from a cache."""
    shape, v_shape, dtype = q.shape, v.shape, q.dtype
    if len(shape) != 4 or len(v_shape) != 4:
        raise ValueError(f'q and v must be [B, T, H, K] and [B, T, HV, V], got {shape} and {v_shape}')
    B, T, _, K = shape
    _, _, HV, V = v_shape
    if k.shape != shape or beta.shape != (B, T, HV):
        raise ValueError(f'q, k, v, beta do not fit: {shape}, {k.shape}, {v_shape}, {beta.shape}')
    if k.dtype is not dtype or v.dtype is not dtype:
        raise TypeError(f'q, k, v must share one dtype, got {dtype}, {k.dtype}, {v.dtype}')
    if initial_state is not None and (initial_state.shape != (B, HV, K, V) or initial_state.device != q.device):
        raise ValueError(f'initial_state must be {(B, HV, K, V)} on {q.device}, got {initial_state.shape}')


@dataclass(frozen=True)
class Case:
    """One way to call one operation.

    Attributes:
        serves: index in OUT of the implementation that must serve the call.
        ceiling: budget, as a ratio to `torch.empty(0)`; None without one.
        base: name of the case whose time is subtracted.
        refuses: a call that the operation's `check` must refuse.
    """

    name: str
    call: Call | SmallCall
    op: Callable[..., Any]
    serves: int = 0
    ceiling: float | None = None
    base: str = 'direct'
    refuses: Call | None = None
    burst: Burst = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, 'burst', self.call.burst(self.op))

    def assert_served(self) -> None:
        """Raises AssertionError unless the expected implementation serves the call. Also makes the plan."""
        got = int(self.burst(1))
        if got != self.serves:
            raise AssertionError(f'{self.name}: served by implementation {got}, expected {self.serves}')
        if self.refuses is not None:
            try:
                self.refuses.burst(self.op)(1)
            except ValueError:
                return
            raise AssertionError(f'{self.name}: the check accepted a call that it must refuse')


fresh = itertools.count()


def dispatched(
    backends: list[dict[str, Any]], *, small: bool = False, operation: str | None = None, **options: Any
) -> Callable[..., Any]:
    """Returns a dispatched operation with its own registry; each backend is given as a dict of its class attributes."""
    operation = operation or f'bench_{next(fresh)}'
    registry = BackendRegistry(operation, options.get('dispatcher'))
    name, method, function = (
        ('small_op', small_method, small_function) if small else ('chunk_op', wide_method, wide_function)
    )
    for i, facts in enumerate(backends, 1):
        body = {'backend_type': f'backend{i}', 'package_name': 'torch', 'priority': i, name: method(OUT[i]), **facts}
        if 'verifier' in body:
            body[f'{name}_verifier'] = body.pop('verifier')
        registry.register(types.new_class(f'Backend{i}', (BaseBackend,), {}, lambda ns, body=body: ns.update(body))())
    return dispatch(operation, **options)(function(OUT[0]))


def toggled(*verifiers: Callable[..., Any]) -> list[dict[str, Any]]:
    """Returns backends that have a toggle in the environment, as most real backends have."""
    n = next(fresh)
    return [{'verifier': verifier, 'env_var': f'FLA_BENCH_{n}_{i}'} for i, verifier in enumerate(verifiers)]


def switched_off(backends: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for backend in backends:
        os.environ[backend['env_var']] = '0'
    return backends


def generated_source(op: Callable[..., Any]) -> str:
    """Returns the generated code of a dispatched operation's current plan."""
    return ''.join(linecache.getlines(op.__code__.co_filename))


# Ceiling where no backend is available. The bare code takes 0.15; asking on each call whether a profiler runs takes the
# rest.
NO_BACKEND = 0.30


def direct_cases() -> list[Case]:
    return [
        Case('direct', CHUNK, wide_function(OUT[0]), base='direct'),
        Case('direct decode', DECODE, wide_function(OUT[0]), base='direct decode'),
        Case('direct small', SMALL, small_function(OUT[0]), base='direct small'),
    ]


def fla_cases() -> list[Case]:
    missing = [{'package_name': 'a_package_that_is_not_there', 'verifier': accepts}] * 3
    elsewhere = [{'devices': ('cuda',), 'verifier': accepts}] * 3
    declared = [{'devices': ('cpu',), 'dtypes': (torch.bfloat16,), 'grad': 'none', 'verifier': reads_two_shapes}]
    small_missing = [{'package_name': 'a_package_that_is_not_there', 'verifier': small_accepts}] * 3

    off = dispatched(switched_off(toggled(accepts, accepts, accepts)))
    third = dispatched(toggled(wants_the_gate, wants_head_dim_64, accepts))
    checked = dispatched(missing, check=check_chunk)
    decode = dispatched(missing, check=check_decode)
    small = dispatched(small_missing, small=True)
    small_served = dispatched(toggled(small_accepts), small=True)
    none, none_decode = 'no backend available, three registered', 'decode: no backend available'
    mixed = dataclasses.replace(CHUNK, k=DECODE.k)
    another = wide_call(1, K=64, initial_state=DECODE.initial_state)
    served = 'one accepts: grad mode, dtype, 2 shapes'
    return [
        Case(none, CHUNK, dispatched(missing), ceiling=NO_BACKEND),
        Case('no backend for this device, three for cuda', CHUNK, dispatched(elsewhere), ceiling=NO_BACKEND),
        Case('all three toggled off', CHUNK, off, ceiling=0.30),
        Case('one rejects, on a flag', CHUNK, dispatched(toggled(wants_the_gate)), ceiling=0.45),
        Case('one rejects, on grad mode', CHUNK, dispatched(toggled(wants_grad_mode)), ceiling=0.45),
        Case('one rejects, on a dtype', CHUNK, dispatched(toggled(wants_float32)), ceiling=0.45),
        Case('one accepts, without a verifier', CHUNK, dispatched([{}]), serves=1),
        Case(served, CHUNK, dispatched(toggled(accepts)), serves=1, ceiling=1.25),
        Case('one accepts: the same, as declared facts', CHUNK, dispatched(declared), serves=1, ceiling=1.25),
        Case('three, third accepts', CHUNK, third, serves=3, ceiling=2.20),
        Case('check of 5 tensors', CHUNK, checked, ceiling=3.0, base=none, refuses=mixed),
        Case('check of a decode step', DECODE, decode, ceiling=1.5, base=none_decode, refuses=another),
        Case(none_decode, DECODE, dispatched(missing), ceiling=NO_BACKEND, base='direct decode'),
        Case('small op: no backend available', SMALL, small, ceiling=NO_BACKEND, base='direct small'),
        Case('small op: one accepts: dtype, shape', SMALL, small_served, serves=1, ceiling=1.25, base='direct small'),
        *observed_cases(base=served),
    ]


def observed_cases(base: str) -> list[Case]:
    """Returns cases with a rule, a measured choice, the breaker or telemetry in force, over `base`, which has none of them.

    Each has its own namespace, because a namespace is what these apply to.
    """

    def in_namespace(name: str) -> tuple[Dispatcher, Callable[..., Any]]:
        owner = Dispatcher(f'bench_{name}.ops', f'BENCH_{name.upper()}')
        backends = [{'verifier': accepts, 'env_var': f'BENCH_{name.upper()}_IT'}]
        return owner, dispatched(backends, operation=f'bench_{name}', dispatcher=owner)

    ruled, with_rules = in_namespace('rules')
    when = 'q.dtype == bfloat16 and q.shape[1] >= 64 and cu_seqlens is None'
    set_policy(Policy(rules=(Rule('bench_rules', 'vendor', when),)), dispatcher=ruled)
    # conditions as measure() writes them: a size and the dtype
    measured, with_choice = in_namespace('measured')
    sizes = ('q.shape[1] < 64', 'q.shape[1] >= 64 and q.dtype == bfloat16')
    getattr(measured, 'policies', measured).set_measured(
        Policy(rules=tuple(Rule(('bench_measured.chunk_op',), 'vendor', size) for size in sizes)), 'benchmark'
    )
    failing, with_breaker = in_namespace('breaker')
    set_policy(Policy(on_error='fallback'), dispatcher=failing)
    counted, with_counters = in_namespace('counters')
    telemetry(dispatcher=counted).start()
    timed, with_times = in_namespace('times')
    telemetry(timing=True, dispatcher=timed).start()
    return [
        Case('a rule in force: dtype, size, is None', CHUNK, with_rules, serves=1, ceiling=0.6, base=base),
        Case('measured choice in force: two sizes, dtype', CHUNK, with_choice, serves=1, ceiling=0.6, base=base),
        Case('breaker on (on_error=fallback)', CHUNK, with_breaker, serves=1, base=base),
        Case('telemetry on: counters', CHUNK, with_counters, serves=1, base=base),
        Case("telemetry on: counters and the host's clock", CHUNK, with_times, serves=1, base=base),
    ]


def resolved_case() -> Case:
    """Returns a case of the callable from `resolve`, which a decode loop calls without dispatch."""
    op = dispatched(toggled(accepts))
    return Case('op.resolve(…), called', CHUNK, op.resolve(**vars(CHUNK)), serves=1)
