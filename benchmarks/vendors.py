"""Measures vendors' kernels, FlashQLA and FlashKDA, on a GPU: errors beside those of the default backend, then times.

    pip install -e '.[vendor]'
    python benchmarks/vendors.py --json benchmarks/results/vendors.json
    python benchmarks/vendors.py --only qla.packed kda              # cases whose names begin so

Each case runs in a separate process, several at a time because most of a case is compilation. Times follow when all cases
are done. An error beyond the bound of tests/bounds.py is marked `!!`; the exit status is 1 if there is one or if a case
fails. Cases of a package that is not installed are left out, which is printed. Inputs are normal, never zeros.

The JSON holds `cases` and `times`. A case has `errors` as [vendor, default, bound] (relative RMS errors against float64),
`same_bits` (two calls gave the same bits), `others` (whether compiled code, a CUDA graph and an exported program equal eager
code), and the seconds of the probe and of the first use. A row of `times` has GPU times in ms and peak memory in MiB, of the
vendor's backend or of the default. --quick: the cases of one step, without times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from _gpu import time_call
from _results import ROOT, error_line, has_gpu, machine, parser, without_json, write_json

# for the bounds of the tests
sys.path.insert(1, str(ROOT))

from fla.backends import explain, trace, use_backend
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
from tests import bounds

FUNCTIONS = {'qla': chunk_gated_delta_rule, 'kda': chunk_kda}
OPERATIONS = {'qla': 'gated_delta_rule', 'kda': 'kda'}
VENDORS = {'qla': 'flash_qla', 'kda': 'flash_kda'}
DISTRIBUTIONS = {'qla': 'flash-qla', 'kda': 'tokenspeed-flashkda'}
TOGGLES = {'FLA_FLASH_QLA': '1', 'FLA_FLASH_KDA': '1'}
TYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}
FLOATS = ('q', 'k', 'v', 'g', 'beta', 'initial_state', 'A_log', 'dt_bias')
# the only size that both kernels support
DIM = 128
# FlashQLA compiles anew for each number of heads
HEADS = 4
PACKED, EMPTY = [64, 1, 300, 65, 128], [0, 64, 0, 1, 300, 65, 0]

CASES: dict[str, dict[str, Any]] = {
    'qla.dense': {'B': 2, 'T': 777, 'initial': 'fp32', 'l2norm': True},
    'qla.one': {'B': 2, 'T': 1, 'initial': 'fp32'},
    'qla.vfirst.bf16gates': {'B': 2, 'T': 200, 'initial': 'fp32', 'v_first': True, 'gates': 'bf16', 'l2norm': True},
    'qla.fp16': {'B': 2, 'T': 512, 'dtype': 'fp16'},
    'qla.strong': {'B': 2, 'T': 300, 'strength': 20.0, 'initial': 'fp32'},
    # one sequence, which FlashQLA splits over the GPU
    'qla.long': {'T': 8192, 'initial': 'fp32'},
    'qla.long.weak': {'T': 8192, 'strength': 1e-3, 'initial': 'fp32'},
    'qla.grouped': {'B': 2, 'T': 256, 'HV': 8},
    'qla.packed': {'lens': PACKED, 'initial': 'fp32'},
    'qla.packed.empty': {'lens': EMPTY, 'initial': 'fp32', 'l2norm': True},
    'kda.dense': {'B': 2, 'T': 777, 'initial': 'fp32', 'v_first': True},
    'kda.one': {'B': 3, 'T': 1, 'initial': 'fp32', 'v_first': True},
    'kda.kv.bf16state': {'B': 2, 'T': 200, 'initial': 'bf16'},
    'kda.plain': {'B': 2, 'T': 512, 'v_first': True},
    'kda.norate': {'B': 2, 'T': 300, 'rate': False, 'bias': False, 'v_first': True},
    'kda.bound1': {'B': 2, 'T': 300, 'lower': -1.0, 'v_first': True},
    'kda.long': {'T': 8192, 'initial': 'fp32', 'v_first': True},
    'kda.long.weak': {'T': 8192, 'shift': -8.0, 'initial': 'fp32', 'v_first': True},
    'kda.packed': {'lens': PACKED, 'initial': 'fp32', 'v_first': True},
    'kda.packed.empty': {'lens': EMPTY, 'initial': 'fp32', 'v_first': True},
    'kda.packed.empty.nostate': {'lens': EMPTY, 'v_first': True},
}
# B, T, heads
SHAPES = ((4, 2048, 16), (1, 8192, 96))


def family(name: str) -> str:
    return name.split('.')[0]


def arguments(
    kind: str,
    *,
    B: int = 1,
    T: int = 64,
    HV: int | None = None,
    lens: list[int] | None = None,
    dtype: str = 'bf16',
    initial: str | None = None,
    v_first: bool = False,
    l2norm: bool = False,
    gates: str = 'fp32',
    strength: float | None = None,
    rate: bool = True,
    bias: bool = True,
    lower: float = -5.0,
    shift: float = 0.0,
    heads: int = HEADS,
) -> dict[str, Any]:
    """Returns arguments of the public function, on the GPU: raw gates and logits for FlashKDA, finished ones for
    FlashQLA."""
    generator = torch.Generator('cuda').manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device='cuda')

    B, T, N = (1, sum(lens), len(lens)) if lens else (B, T, B)
    HV, half = HV or heads, TYPES[dtype]
    q, k, v = normal(B, T, heads, DIM), normal(B, T, heads, DIM), normal(B, T, HV, DIM)
    given: dict[str, Any] = {'output_final_state': True, 'state_v_first': v_first}
    if kind == 'kda':
        given |= {'g': (normal(B, T, HV, DIM) + shift).to(half), 'beta': normal(B, T, HV).to(half)}
        given |= {f'use_{what}_in_kernel': True for what in ('gate', 'qk_l2norm', 'beta_sigmoid')}
        given |= {'safe_gate': True, 'lower_bound': lower}
        given |= {'A_log': normal(HV) * 0.3} if rate else {}
        given |= {'dt_bias': normal(HV * DIM) * 0.5} if bias else {}
    else:
        k = k if l2norm else F.normalize(k, dim=-1)
        uniform = torch.rand((2, B, T, HV), generator=generator, device='cuda')
        g = F.logsigmoid(normal(B, T, HV)) if strength is None else -strength * uniform[0]
        given |= {'g': g.to(TYPES[gates]), 'beta': uniform[1].to(TYPES[gates]), 'use_qk_l2norm_in_kernel': l2norm}
    given |= {'q': q.to(half), 'k': k.to(half), 'v': v.to(half)}
    if lens:
        cu_seqlens = torch.tensor([0, *lens]).cumsum(0).int()
        given |= {'cu_seqlens': cu_seqlens.cuda(), 'cu_seqlens_cpu': cu_seqlens}
    if initial:
        given['initial_state'] = normal(N, HV, DIM, DIM).to(TYPES[initial])
    return given


def results(kind: str, backend: str, given: dict[str, Any], wide: bool = False) -> dict[str, torch.Tensor]:
    """Returns o, the final state and, for FlashQLA's operation, gradients. FlashKDA has no backward."""
    backward = kind == 'qla'
    tensors = {name: x.double() if wide else x.clone() for name, x in given.items() if name in FLOATS}
    leaves = {name: x.requires_grad_(backward) for name, x in tensors.items()}
    operation = OPERATIONS[kind]
    with use_backend(backend, op=operation), torch.set_grad_enabled(backward), trace() as recorded:
        o, final = FUNCTIONS[kind](**{**given, **leaves})
    assert recorded.last_backend(operation) == backend, recorded.last_backend(operation)
    found = {'o': o.detach(), 'final': final.detach()}
    if backward:
        generator = torch.Generator('cuda').manual_seed(1)
        upstream = [torch.randn(x.shape, generator=generator, device='cuda').to(given['v'].dtype) for x in (o, final)]
        got = torch.autograd.grad(
            [o, final], list(leaves.values()), [x.to(y) for x, y in zip(upstream, (o, final), strict=True)]
        )
        found |= {f'd{name}': x for name, x in zip(leaves, got, strict=True)}
    return found


def case(name: str) -> dict[str, Any]:
    """Returns the measurements of one case; see the module's docstring."""
    kind = family(name)
    given = arguments(kind, **CASES[name])
    vendor = VENDORS[kind]
    began = time.perf_counter()
    with torch.no_grad():
        candidate = explain(FUNCTIONS[kind], **given)[vendor]
    if candidate.verdict not in ('chosen', 'eligible'):
        return {'refused': f'{candidate.verdict}: {candidate.reason}'}
    probed = time.perf_counter()
    exact = results(kind, 'reference', given, wide=True)
    compiling = time.perf_counter()
    mine = results(kind, vendor, given)
    torch.cuda.synchronize()
    done = time.perf_counter()
    again, default = results(kind, vendor, given), results(kind, 'default', given)
    errors = {}
    for what, right in exact.items():
        bound = bounds.of_kernel(what, given['q'].dtype)[0]
        # the terms of the gates' gradient cancel, see tests/bounds.py
        terms = (given['q'].double() * exact['dq']).sum(-1) if what == 'dg' else right.new_zeros(1)
        floor = bounds.GATE_FLOOR * float(terms.square().mean().sqrt())
        errors[what] = [*(bounds.relative_rms(right, found[what], floor) for found in (mine, default)), bound]
    return {
        'errors': errors,
        'same_bits': all(torch.equal(mine[what], again[what]) for what in mine),
        'probe_s': probed - began,
        'first_s': done - compiling,
        'others': elsewhere(kind, vendor, given, every=name.endswith('.dense')),
    }


class FunctionModule(torch.nn.Module):
    """A function as a module, with some arguments bound."""

    def __init__(self, function: Callable[..., Any], rest: dict[str, Any]) -> None:
        super().__init__()
        self.function, self.rest = function, rest

    def forward(self, **tensors: torch.Tensor) -> Any:
        return self.function(**tensors, **self.rest)


def elsewhere(kind: str, vendor: str, given: dict[str, Any], every: bool) -> dict[str, str]:
    """Compares eager code with a compiled caller, a CUDA graph and, if `every`, code compiled to CUDA graphs and an exported
    program. Returns 'equal', 'differs' or an error for each."""
    function, operation = FUNCTIONS[kind], OPERATIONS[kind]
    tensors = {name: x for name, x in given.items() if name in FLOATS}
    rest = {name: x for name, x in given.items() if name not in FLOATS}

    def eager() -> tuple[torch.Tensor, ...]:
        return tuple(function(**given))

    def compiled() -> tuple[torch.Tensor, ...]:
        return tuple(torch.compile(lambda **t: function(**t, **rest), fullgraph=True, backend='aot_eager')(**tensors))

    def captured() -> tuple[torch.Tensor, ...]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = eager()
        for x in out:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        return out

    def compiled_to_graphs() -> tuple[torch.Tensor, ...]:
        run = torch.compile(lambda **t: function(**t, **rest), fullgraph=True, mode='reduce-overhead')
        # the first call warms up, the second captures, the third replays
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            out = run(**tensors)
        return tuple(x.clone() for x in out)

    def exported() -> tuple[torch.Tensor, ...]:
        return tuple(torch.export.export(FunctionModule(function, rest), (), tensors, strict=False).module()(**tensors))

    ways = {'compiled': compiled, 'captured': captured}
    if every:
        ways |= {'reduce-overhead': compiled_to_graphs, 'exported': exported}
    found = {}
    # the cases of a process would exceed Dynamo's limit of recompilations
    torch.compiler.reset()
    with use_backend(vendor, op=operation), torch.no_grad():
        right = eager()
        for what, run in ways.items():
            try:
                found[what] = 'equal' if all(map(torch.equal, right, run())) else 'differs'
            except Exception as error:
                found[what] = error_line(error)
    return found


def times(kind: str, shape: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    """Yields times of one shape, of the vendor and of the default. FlashQLA is also measured without norms in the kernel."""
    batch, length, heads = shape
    operation = OPERATIONS[kind]
    for l2norm in (True, False) if kind == 'qla' else (True,):
        given = arguments(kind, B=batch, T=length, heads=heads, l2norm=l2norm, v_first=kind == 'kda')
        do = torch.randn_like(given['v'])
        for backend in (VENDORS[kind], 'default'):
            row: dict[str, Any] = {'op': operation, 'backend': backend, 'shape': shape, 'l2norm': l2norm}
            with use_backend(backend, op=operation):
                row |= measured(FUNCTIONS[kind], given, do, backward=kind == 'qla')
            yield row


def measured(function: Callable[..., Any], given: dict[str, Any], do: torch.Tensor, backward: bool) -> dict[str, Any]:
    """Returns times and peak memory of forward and, with `backward`, of forward with backward."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if name in FLOATS}

    def forward() -> None:
        with torch.no_grad():
            function(**given)

    def both() -> None:
        torch.autograd.grad(function(**{**given, **leaves})[0], list(leaves.values()), do)

    row: dict[str, Any] = {}
    for name, run in (('forward', forward), *([('both', both)] if backward else [])):
        row |= time_call(name, run)
    return row


def case_in_process(name: str, seconds: float) -> dict[str, Any]:
    """Runs `case(name)` in a child process; returns {'failed': the end of its output} if that fails."""
    command = [sys.executable, __file__, '--case', name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env={**os.environ, **TOGGLES}, check=False
        )
    except subprocess.TimeoutExpired:
        return {'failed': f'took more than {seconds:.0f} s'}
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith('{"')), None)
    if done.returncode or line is None:
        return {'failed': '\n'.join((done.stdout + done.stderr).splitlines()[-12:])}
    return dict(json.loads(line))


def line_of(row: dict[str, Any]) -> str:
    """Formats a case as a line."""
    if 'errors' not in row:
        return next(f'{what} {row[what]}' for what in ('failed', 'refused') if what in row)
    cells = [
        f'{what} {mine:.1e}/{ours:.1e}{"" if mine <= bound else "!!"}' for what, (mine, ours, bound) in row['errors'].items()
    ]
    others = ', '.join(f'{what} {text}' for what, text in row['others'].items())
    seconds = f'probe {row["probe_s"]:.1f} s, first {row["first_s"]:.1f} s'
    return f'vendor/default: {"  ".join(cells)} | same bits: {row["same_bits"]}, {others} | {seconds}'


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether a case failed, was refused or has an error beyond its bound."""
    return 'errors' not in row or any(not mine <= bound for mine, _, bound in row['errors'].values())


def main() -> int:
    options = parser(__doc__)
    options.add_argument('--only', nargs='+', default=[''], metavar='NAME', help=f'beginnings of names: {", ".join(CASES)}')
    options.add_argument('--no-times', action='store_true', help='measure only errors')
    options.add_argument('--jobs', type=int, default=6, help='cases at a time (default: 6)')
    options.add_argument('--timeout', type=float, default=600, metavar='S', help='seconds for a case (default: 600)')
    options.add_argument('--case', choices=list(CASES), help='run this case in this process and print its JSON')
    chosen = options.parse_args()
    if not has_gpu():
        return 0
    if chosen.case:
        os.environ.update(TOGGLES)
        print(json.dumps(case(chosen.case)))
        return 0
    if chosen.quick:
        chosen.only, chosen.no_times = ['qla.one', 'kda.one'], True
    names = [name for name in CASES if name.startswith(tuple(chosen.only))]
    if not names:
        options.error(f'no case begins with {" or ".join(chosen.only)}')
    about = machine(packages=tuple(DISTRIBUTIONS.values()))
    missing = [kind for kind in VENDORS if DISTRIBUTIONS[kind] not in about['versions']]
    for kind in missing:
        print(f'{DISTRIBUTIONS[kind]} is not installed: its cases are left out')
    names = [name for name in names if family(name) not in missing]
    result: dict[str, Any] = {
        'benchmark': 'vendors',
        **about,
        'command': ' '.join(['python', 'benchmarks/vendors.py', *without_json(sys.argv[1:])]),
        'cases': {},
        'times': [],
    }
    print(about['card'], about['versions'], flush=True)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        measurements = pool.map(lambda name: case_in_process(name, chosen.timeout), names)
        for name, row in zip(names, measurements, strict=True):
            result['cases'][name] = {'options': CASES[name], **row}
            print(f'{name:<26} {line_of(row)}', flush=True)
            write_json(chosen.json, result)
    if not chosen.no_times:
        os.environ.update(TOGGLES)
        for kind in {family(name): None for name in names}:
            for shape in SHAPES:
                for row in times(kind, shape):
                    result['times'].append(row)
                    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                    write_json(chosen.json, result)
    bad = [name for name in names if is_wrong(result['cases'][name])]
    print(f'beyond a bound, refused or failed: {", ".join(bad) or "none"}')
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main())
