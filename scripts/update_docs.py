"""Write the parts of README.md and docs/ that are generated from code and from benchmark results.

    python scripts/update_docs.py            # write them
    python scripts/update_docs.py --check    # exit 1 if one is out of date

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`. Sources: the registries of backends and `explain`,
`fla.backends.policy.environment.VARIABLES`, `fla.backends.lint.RULES`, and `benchmarks/results/*.json`, by their key
`benchmark`; each file is one run. The figure of README.md is drawn by `scripts/draw_figures.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fla.backends import BackendRegistry, BaseBackend, Decision, explain
from fla.backends.lint import RULES
from fla.backends.policy.environment import VARIABLES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'

_PART = re.compile(r'(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)', re.DOTALL)

Result = dict[str, Any]

_PHASES = ('forward', 'both')

_WHEN = {
    'import': 'at import of `fla.backends`',
    'policy': 'with the policy',
    'first call': 'at the first call',
}


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. Columns of numbers are aligned to the right."""
    lines = [[re.sub(r'([|*])', r'\\\1', '' if cell is None else str(cell)) for cell in row] for row in (header, *rows)]
    numeric = [all(re.fullmatch(r'[\d.x%/+ -]*', line[i]) for line in lines[1:]) for i in range(len(header))]
    rule = ['--:' if right else '--' for right in numeric]
    return '\n'.join(f'| {" | ".join(line)} |' for line in (lines[0], rule, *lines[1:]))


def environment() -> str:
    """Every policy variable: when it is read, and its effect."""
    rows = [(f'`FLA_{name}`', _WHEN[when], text) for name, (when, text) in VARIABLES.items()]
    return table(['variable', 'read', 'meaning'], rows)


def _calls() -> dict[str, tuple[str, partial[Any]]]:
    """Name of a function → its operation, and an ordinary call in bfloat16."""
    from fla.modules import (
        activations,
        convolution,
        fused_cross_entropy,
        fused_linear_cross_entropy,
        fused_norm_gate,
        l2norm,
        layernorm,
        rotary,
    )
    from fla.ops import attn, gated_delta_rule, kda

    q = torch.zeros(1, 64, 2, 128, dtype=torch.bfloat16)
    gate, x = q[..., 0], torch.zeros(2, 8, 128, dtype=torch.bfloat16)
    row, target = x[0, 0], torch.zeros(8, dtype=torch.long)
    filters, angles = torch.zeros(128, 4, dtype=torch.bfloat16), torch.zeros(64, 64)
    delta, kimi = {'q': q, 'k': q, 'v': q, 'g': gate, 'beta': gate}, {'q': q, 'k': q, 'v': q, 'g': q, 'beta': gate}
    calls = [
        ('gated_delta_rule', partial(gated_delta_rule.chunk_gated_delta_rule, **delta)),
        ('gated_delta_rule', partial(gated_delta_rule.fused_recurrent_gated_delta_rule, **delta)),
        ('kda', partial(kda.chunk_kda, **kimi)),
        ('kda', partial(kda.fused_recurrent_kda, **kimi)),
        ('attn', partial(attn.parallel_attn, q, q, q)),
        ('modules', partial(layernorm.rms_norm, x, row)),
        ('modules', partial(layernorm.layer_norm, x, row)),
        ('modules', partial(layernorm.group_norm, x, row)),
        ('modules', partial(fused_norm_gate.rms_norm_gated, x, x, row)),
        ('modules', partial(l2norm.l2norm, x)),
        ('modules', partial(activations.swiglu, x, x)),
        ('modules', partial(activations.silu_and_mul, x)),
        ('modules', partial(activations.swiglu_linear, x, x, x[0], None)),
        ('modules', partial(rotary.rotary_embedding, q, angles, angles)),
        ('modules', partial(convolution.causal_conv1d, x, filters)),
        ('modules', partial(convolution.causal_conv1d_update, x[:, 0], x[:, :4].transpose(1, 2).clone(), None, filters)),
        ('modules', partial(fused_cross_entropy.cross_entropy_loss, x[0], target)),
        ('modules', partial(fused_linear_cross_entropy.fused_linear_cross_entropy_loss, x[0], target, x[1])),
    ]
    return {call.func.__name__: (operation, call) for operation, call in calls}


def operations(results: Path = RESULTS) -> str:
    """Every function: what serves an ordinary call on each kind of hardware, optional backends, and one measured time."""
    measured = _measured(results)
    rows = []
    for name, (operation, call) in _calls().items():
        cpu, cuda, *others = (
            _served(explain(call.func, *call.args, **call.keywords, platform=platform))
            for platform in ('cpu', 'cuda', 'rocm', 'xpu')
        )
        registry = BackendRegistry(operation)
        registry.import_paths()
        optional = [
            f'`{backend.backend_type}` ({"if installed" if _is_on(backend) else f"`{backend.env_var}=1`"})'
            for backend in registry
            if hasattr(backend, name) and backend.backend_type not in _ALWAYS
        ]
        time = measured.get(name, ['', '', ''])
        rows.append([f'`{name}`', cpu, cuda, ' / '.join(dict.fromkeys(others)), ', '.join(optional), *time])
    return table(['function', 'CPU', 'NVIDIA', 'AMD, Intel', 'optional', 'size', 'H200: ms', 'quickest other: ms'], rows)


# Backends that need no package of their own, and implementations of other packages that results compare with.
_ALWAYS = ('sdpa', 'default', 'reference')
_PEERS = ('flash-linear-attention', 'liger-kernel', 'torch', 'torch.compile')


def _is_on(backend: BaseBackend) -> bool:
    return backend.default_enable is True


def _served(decision: Decision) -> str:
    """What can serve the call without an optional package, in order; `reference` only where it is alone."""
    able = [one.name for one in decision.candidates if one.name in _ALWAYS and one.verdict in ('chosen', 'eligible')]
    return ', '.join(f'`{name}`' for name in able if name != 'reference' or len(able) == 1)


def _measured(results: Path) -> dict[str, list[str]]:
    """Function → size, milliseconds on an H200 with the backward if there is one, and the quickest other of the same run."""
    found: dict[str, list[str]] = {}

    def add(function: str, rows: list[Result], key: str, size: str, ours: str = 'default') -> None:
        times = {row['backend']: row[key] / (1e3 if key.endswith('_us') else 1) for row in rows if key in row}
        peers = {name: time for name, time in times.items() if name in _PEERS}
        if ours in times and peers:
            quickest = min(peers, key=peers.__getitem__)
            found[function] = [size, f'{times[ours]:.3g}', f'{quickest} {peers[quickest]:.3g}']

    def size(rows: list[Result]) -> str:
        return ', '.join(map(str, rows[0]['shape'])) if rows else ''

    for result in _load('delta_rules', results):
        for op in ('gated_delta_rule', 'kda'):
            of = [row for row in result['rows'] if row['op'] == op and not row.get('bounded') and not row.get('packed')]
            chunked = [row for row in of if row.get('shape', [None])[0] == 4]
            add(f'chunk_{op}', chunked, 'both_ms', size(chunked))
            add(f'fused_recurrent_{op}', [row for row in of if row.get('decode') == 32], 'gpu_us', '32, 1, 16, 128')
    for result in _load('attention', results):
        rows = [row for row in result['rows'] if row['case'] == 'causal']
        add('parallel_attn', rows, 'both_ms', size(rows), ours='sdpa')
    for result in _load('modules', results):
        for module in dict.fromkeys(row['module'] for row in result['rows']):
            rows = [row for row in result['rows'] if row['module'] == module and row['size'] == 'large']
            key = 'forward_ms' if module.endswith('_update') else 'both_ms'
            add(f'{module}_loss' if module.endswith('cross_entropy') else module, rows, key, size(rows))
    return found


def overhead(results: list[Result]) -> str:
    """The cost of a dispatched call."""
    return '\n\n'.join(_overhead(result) for result in results) or _nothing('benchmarks/dispatch_overhead.py')


def _overhead(result: Result) -> str:
    def cells(case: Result, *, ceiling: bool) -> list[str]:
        ns, ratio = case['ns'], case['ratio']
        shown = [case['name'], f'{ns["min"]:.0f}', f'{ratio["min"]:.2f}', f'{ratio["median"]:.2f}']
        return [*shown, *_verdict(case['ceiling'], case['met'])] if ceiling else shown

    yardstick = result['yardstick_ns']
    head = ['over a direct call', 'ns (min)', 'ratio (min)', 'ratio (median)']
    parts = [
        f'{_origin(result)} Ratios are to `torch.empty(0)` in the same process, here {yardstick["min"]:.0f} ns.',
        table([*head, 'ceiling', 'met'], [cells(case, ceiling=True) for case in result['dispatch']]),
    ]
    if result['peers']:
        parts += ['Other dispatchers, in the same rounds:', table(head, [cells(c, ceiling=False) for c in result['peers']])]
    if result['once']:
        rows = [[*_fixed(r, 'ms_min', 'ms_median'), *_verdict(r['ceiling_ms'], r['met'])] for r in result['once']]
        parts += ['Once per process:', table(['', 'ms (min)', 'ms (median)', 'ceiling', 'met'], rows)]
    return '\n\n'.join(parts)


def _verdict(ceiling: float | None, met: bool | None) -> list[str]:
    return ['' if ceiling is None else f'{ceiling:.2f}', {None: '', True: 'yes', False: 'no'}[met]]


def lint() -> str:
    """The rules of the lint for backend authors."""
    return table(['rule', 'finding'], [(f'`{name}`', text) for name, text in RULES.items()])


def breaks(results: list[Result]) -> str:
    """The cost of dispatch in a compiled program."""
    return '\n\n'.join(_breaks(result) for result in results) or _nothing('benchmarks/compile_breaks.py')


def _breaks(result: Result) -> str:
    backends = list(dict.fromkeys(row['backend'] for row in result['changes']))
    rows = []
    for name in dict.fromkeys(row['name'] for row in result['changes']):
        of = [row for row in result['changes'] if row['name'] == name]
        counted = [_same(of, key) for key in ('breaks', 'graphs', 'undispatched')]
        rows.append([name, *counted, sum(len(row['wrong']) for row in of)])
    parts = [
        f'{_origin(result)} Backends of `torch.compile`: {", ".join(backends)}. `a / b / c` where they differ.',
        table(['one compiled caller, under', 'graph breaks', 'compilations', 'undispatched', 'served wrong'], rows),
        'Trace time of a call, Dynamo alone:',
        table(['', 'ms', 'ratio'], [_fixed(r, 'ms_per_call', 'ratio') for r in result['trace_time']]),
        'Steady state, a model of 8 layers under Inductor:',
        table(
            ['', 'us (min)', 'ratio (min)', 'ratio (median)', 'two copies of one model differ by'],
            [_fixed(r, 'us_min', 'ratio_min', 'ratio_median', 'copies_differ_by') for r in result['steady_state']],
        ),
    ]
    return '\n\n'.join(parts)


def _stopped_and_note(result: Result) -> str:
    stopped = '' if result.get('complete', True) else ' The run is incomplete: missing values were not measured.'
    return f'{stopped} {result["note"]}' if 'note' in result else stopped


def _on_one_card(result: Result) -> str:
    """The command, the machine and the versions, except Python's, which no kernel sees."""
    versions = ', '.join(f'{name} {version}' for name, version in result['versions'].items() if name != 'python')
    return f'`{result["command"]}` on one {result["card"]}, {result["cores"]} cores, {versions}.'


def delta_rules(results: list[Result]) -> str:
    """Times of the delta rules on GPUs."""
    return '\n\n'.join(_delta_rules(result) for result in results) or _nothing('benchmarks/delta_rules.py')


def _delta_rules(result: Result) -> str:
    chunked = [row for row in result['rows'] if 'shape' in row]
    decoded = [row for row in result['rows'] if 'decode' in row]
    head = ['', 'B, T, H, K = V', 'backend', 'forward ms', 'with backward ms', 'peak MiB', 'largest error', 'first calls s']
    rows = [[row['op'], _shape(row), row['backend'], *_times(row), _first_calls(row)] for row in chunked]
    parts = [
        _on_one_card(result) + _stopped_and_note(result),
        *([table(head, rows)] if chunked else []),
    ]
    if decoded:
        rows = [[r['op'], r['decode'], r['backend'], *_refused_or(r, 'gpu_us', 'wall_us')] for r in decoded]
        parts += ['Decoding, 16 heads, K = V = 128:', table(['', 'B', 'backend', 'GPU us', 'wall us'], rows)]
    return '\n\n'.join(parts)


def _shape(row: Result) -> str:
    return ', '.join(map(str, row['shape'])) + ''.join(f' {kind}' for kind in ('packed', 'bounded') if row.get(kind))


def _first_calls(row: Result) -> str:
    """Seconds of the first forward, and of the first forward with backward."""
    return ' + '.join(f'{row[f"{name}_first_s"]:.1f}' for name in _PHASES if f'{name}_first_s' in row)


def accuracy(results: list[Result]) -> str:
    """Errors of the delta rules beside a peer's."""
    return '\n\n'.join(_accuracy(result) for result in results) or _nothing('benchmarks/accuracy.py')


def _accuracy(result: Result) -> str:
    """Means over seeds, in thousandths: the default and flash-linear-attention."""
    found: dict[tuple[str, str, float], dict[str, list[dict[str, float]]]] = {}
    for row in result['rows']:
        case = found.setdefault((row['op'], row['dtype'], row['strength']), {})
        case.setdefault(row['backend'], []).append(row['errors'])
    names = list(result['rows'][0]['errors'])

    def mean(errors: list[dict[str, float]], name: str) -> str:
        return f'{sum(error[name] for error in errors) / len(errors) * 1e3:.2f}'

    rows = [
        [*case, *[' / '.join(mean(errors, name) for errors in backends.values()) for name in names]]
        for case, backends in found.items()
    ]
    who = ' / '.join(dict.fromkeys(row['backend'] for row in result['rows']))
    pairs = [
        (ours[name] / theirs[name], f'{name} of {case[0]} in {case[1]} at {case[2]}')
        for case, backends in found.items()
        if len(backends) == 2
        for ours, theirs in zip(*backends.values(), strict=True)
        for name in names
    ]
    ratios = sorted(ratio for ratio, _ in pairs)
    single = ''
    if ratios:
        single = (
            f' In {len(ratios)} errors of single inputs the first is {ratios[0]:.2f} to {ratios[-1]:.2f} times the second, '
            f'{ratios[len(ratios) // 2]:.2f} in the median, and above 1.1 times in {sum(ratio > 1.1 for ratio in ratios)}: '
            f'{", ".join(f"{name} ({ratio:.2f})" for ratio, name in sorted(pairs) if ratio > 1.1)}.'
        )
    versions, shape = result['versions'], ', '.join(map(str, result['shape']))
    peer = ''.join(f', {name} {versions[name]}' for name in versions if name in who)
    return '\n\n'.join(
        [
            f'`{result["command"]}`, in the interpreter of Triton {versions["triton"]}, torch {versions["torch"]}{peer}: '
            f'B, T, H, K = V of {shape}; relative RMS in thousandths, {who}, means of inputs from several seeds.{single}',
            table(['', 'dtype', 'gates', *names], rows),
        ]
    )


def clients(results: list[Result]) -> str:
    """Times of transformers' models on a CPU."""
    return '\n\n'.join(_clients(result) for result in results) or _nothing('benchmarks/clients.py')


def _clients(result: Result) -> str:
    rows = []
    for row in result['rows']:
        times = [f'{row[who]:.0f}' if row[who] >= 100 else f'{row[who]:.3g}' for who in ('fla', 'transformers')]
        faster = ' / '.join(f'{ratio:.2f}x' for ratio in row['faster'])
        rows.append([f'{row["model"]}: {row["phase"]}', row['unit'], *times, faster])
    return (
        f'{_origin(result)[:-1]}, transformers {result["machine"]["transformers"]}. `faster` is the least, '
        'median and largest ratio of several processes.\n\n'
        + table(['', 'unit', 'these operations', "transformers' own path", 'faster'], rows)
    )


def modules(results: list[Result]) -> str:
    """Times of the modules on GPUs."""
    return '\n\n'.join(_modules(result) for result in results) or _nothing('benchmarks/modules.py')


def _modules(result: Result) -> str:
    """Rows where both forward and backward were refused are left out."""
    made = ''
    if parts := result.get('earlier'):
        rates = ', '.join(f'{part["copy_gbs"]:.0f}' for part in parts)
        made = f' It was made in {len(parts) + 1} parts; in the earlier ones the copy ran at {rates} GB/s.'
    both = ['forward ms', 'GB/s', 'of a copy', 'with backward ms', 'GB/s', 'of a copy']
    rows = []
    for row in result['rows']:
        if not {'forward_ms', 'both_ms'} & row.keys():
            continue
        error = f'{max(row["errors"].values()):.1e}' if 'errors' in row else ''
        cells = [*_bandwidth(row, 'forward'), *_bandwidth(row, 'both'), error]
        rows.append([f'`{row["module"]}`', ', '.join(map(str, row['shape'])), row['backend'], *cells])
    return (
        f'{_on_one_card(result)} A copy of a gigabyte ran at {result["copy_gbs"]:.0f} GB/s; `of a copy` compares with '
        f'the time of a copy of as many bytes as the call must move.{made}{_stopped_and_note(result)}\n\n'
        + table(['', 'size', 'backend', *both, 'largest error'], rows)
    )


def attention(results: list[Result]) -> str:
    """Times of attention on GPUs."""
    return '\n\n'.join(_attention(result) for result in results) or _nothing('benchmarks/attention.py')


def _attention(result: Result) -> str:
    """Rows where both forward and backward were refused are left out; the chosen backend is marked."""
    rows = []
    for row in result['rows']:
        if {'forward_ms', 'both_ms'} & row.keys():
            ratios = [f'{row[key]:.2f}' if key in row else '' for key in ('forward_over_torch', 'both_over_torch')]
            backend = f'{row["backend"]}, chosen' if row['chosen'] else row['backend']
            new = [f'{row["new_keys_wall_ms"]:.3f}'] if 'new_keys_wall_ms' in row else []
            rows.append([row['case'], ', '.join(map(str, row['shape'])), backend, *_times(row), *ratios, *new])
    head = ['', 'B, T, S, HQ, H, K, V', 'backend', 'forward ms', 'with backward ms', 'peak MiB', 'largest error']
    last, meant = ['forward', 'with backward'], 'the last columns are ratios to its time'
    if any('new_keys_wall_ms' in row for row in result['rows']):
        last += ['new S: wall ms']
        meant = 'the two columns after the error are ratios to its time, the last is a step with a new number of keys'
        rows = [row + [''] * (len(head) + len(last) - len(row)) for row in rows]
    return (
        f"{_on_one_card(result)} `torch` is PyTorch's attention called directly, {meant}. "
        f'`chosen` marks the backend that `parallel_attn` picks.{_stopped_and_note(result)}\n\n'
        + table([*head, *last], rows)
    )


def qwen3_next(results: list[Result]) -> str:
    """Times of transformers' Qwen3-Next on GPUs."""
    return '\n\n'.join(_qwen3_next(result) for result in results) or _nothing('benchmarks/qwen3_next.py')


def _qwen3_next(result: Result) -> str:
    """Refused rows are marked; a row of a process that ended has no phase."""
    rows = []
    for row in result['rows']:
        backend = row['backend'] + (', modules too' if row.get('modules') else '')
        named = [row.get('phase'), ', '.join(map(str, row.get('shape', ()))), backend]
        times = [f'{row[key]:.2f}' if key in row else '' for key in ('gpu_ms', 'wall_ms', 'graph_gpu_ms', 'graph_wall_ms')]
        if 'refused' in row:
            times[:2] = ['refused', 'refused']
        if 'graph_refused' in row:
            times[2:] = ['refused', 'refused']
        peak = f'{row["peak_mib"]:.0f}' if 'peak_mib' in row else ''
        errors = ', '.join(f'{name} {error:.1e}' for name, error in row.get('errors', {}).items())
        rows.append([*named, *times, peak, errors])
    head = ['', 'B, T', 'linear attention by', 'GPU ms', 'wall ms', 'graph: GPU ms', 'graph: wall ms', 'peak MiB', 'errors']
    return f'{_on_one_card(result)}{_stopped_and_note(result)}\n\n{table(head, rows)}'


def _bandwidth(row: Result, name: str) -> list[str]:
    if f'{name}_ms' not in row:
        return [_unmeasured(row, f'{name}_refused'), '', '']
    ms = row[f'{name}_ms']
    moved = [f'{row[f"{name}_gbs"]:.0f}', f'{row[f"{name}_copy_ms"] / ms:.0%}'] if f'{name}_gbs' in row else ['', '']
    return [f'{ms:.3f}' if ms >= 0.1 else f'{ms:.4f}', *moved]


def vendors(results: list[Result]) -> str:
    """Errors and times of the vendors' kernels of the delta rules on GPUs."""
    return '\n\n'.join(_vendors(result) for result in results) or _nothing('benchmarks/vendors.py')


def _vendors(result: Result) -> str:
    versions = ', '.join(f'{name} {version}' for name, version in result['versions'].items() if version)
    errors = []
    for name, case in result['cases'].items():
        if 'errors' not in case:
            errors.append([name, '', '', '', case.get('refused', 'failed')])
            continue
        worst = max(case['errors'], key=lambda what: case['errors'][what][0] / case['errors'][what][2])
        error = [f'{number:.1e}' for number in case['errors'][worst]]
        others = ', '.join(f'{what} {text}' for what, text in {'bits': case['same_bits'], **case['others']}.items())
        errors.append(
            [f'{name}: {worst}', *error, others.replace('bits True', 'same bits').replace('bits False', 'other bits')]
        )
    times = [
        [
            row['op'],
            ', '.join(map(str, row['shape'])),
            'in the kernel' if row['l2norm'] else '',
            row['backend'],
            *_times(row)[:3],
        ]
        for row in result['times']
    ]
    parts = [
        f'`{result["command"]}` on one {result["card"]}, {result["cores"]} cores, {versions}. Each row is the '
        'result of its case nearest to the bound; the last column compares a second call, compiled code and a graph.'
        f'{_stopped_and_note(result)}',
        table(['case and result', 'vendor', 'default', 'bound', ''], errors),
        table(['', 'B, T, H', 'norms', 'backend', 'forward ms', 'with backward ms', 'peak MiB'], times),
    ]
    return '\n\n'.join(parts[: 3 if times else 2])


def gpu_tests(results: list[Result]) -> str:
    """Outcomes of the tests on GPUs."""
    return '\n\n'.join(_gpu_tests(result) for result in results) or (
        'There is no result in `benchmarks/results/` yet: see `tests/gpu_report.py`.'
    )


def _gpu_tests(result: Result) -> str:
    versions = ', '.join(f'{name} {version}' for name, version in result['versions'].items())
    rows = []
    for row in result['rows']:
        skips = '; '.join(f'{reason} ({count})' for reason, count in row.get('skips', {}).items())
        rows.append([f'`{row["file"]}`', *(row.get(name, 0) for name in ('passed', 'failed', 'skipped')), skips])
    where = f'{", ".join(result["cards"])}, {result["cores"]} cores, {versions}, at {result["commit"]}'
    return f'`{result["command"]}` on {where}.{_stopped_and_note(result)}\n\n' + table(
        ['', 'passed', 'failed', 'skipped', 'why'], rows
    )


def _times(row: Result) -> list[str]:
    peak = next((f'{row[key]:.0f}' for key in ('both_peak_mib', 'forward_peak_mib') if key in row), '')
    error = f'{max(row["errors"].values()):.1e}' if 'errors' in row else ''
    times = [f'{row[f"{name}_ms"]:.3f}' if f'{name}_ms' in row else _unmeasured(row, f'{name}_refused') for name in _PHASES]
    return [*times, peak, error]


def _unmeasured(row: Result, refused: str) -> str:
    """Empty where a run was stopped before this value."""
    return 'refused' if refused in row else ''


def _refused_or(row: Result, *keys: str) -> list[str]:
    return [f'{row[key]:.1f}' if key in row else _unmeasured(row, 'refused') for key in keys]


def _fixed(row: Result, *keys: str) -> list[str]:
    return [row['name'], *(f'{row[key]:.2f}' for key in keys)]


def _same(rows: list[Result], key: str) -> str:
    values = [str(row[key]) if row[key] is not None else '' for row in rows]
    return values[0] if len(set(values)) == 1 else ' / '.join(values)


def _origin(result: Result) -> str:
    machine = result['machine']
    where = f'{machine["cpu"]}, {machine["cores"]} cores, {machine["system"]}'
    return f'`{result["command"]}` on {where}, Python {machine["python"]}, torch {machine["torch"]}.'


def _nothing(script: str) -> str:
    return f'There is no result in `benchmarks/results/` yet. To measure on your machine: `python {script}`.'


# name of a part → (the benchmark that it shows, or None; the function that writes it)
PARTS: dict[str, tuple[str | None, Callable[..., str]]] = {
    'operations': (None, operations),
    'environment': (None, environment),
    'lint': (None, lint),
    'overhead': ('dispatch_overhead', overhead),
    'breaks': ('compile_breaks', breaks),
    'delta-rules': ('delta_rules', delta_rules),
    'accuracy': ('accuracy', accuracy),
    'clients': ('clients', clients),
    'modules': ('modules', modules),
    'attention': ('attention', attention),
    'qwen3-next': ('qwen3_next', qwen3_next),
    'vendors': ('vendors', vendors),
    'gpu-tests': ('gpu_tests', gpu_tests),
}


def updated(page: Path, results: Path = RESULTS) -> str:
    """The text of a page with its generated parts rewritten.

    Raises:
        ValueError: for an unknown part.
    """

    def make(match: re.Match[str]) -> str:
        name = match['name']
        if name not in PARTS:
            raise ValueError(f'{page.name}: unknown part {name!r}; known are {", ".join(PARTS)}')
        benchmark, maker = PARTS[name]
        text = maker() if benchmark is None else maker(_load(benchmark, results))
        return f'{match[1]}\n{text}\n\n{match[3]}'

    return _PART.sub(make, page.read_text(encoding='utf-8'))


def _load(benchmark: str, results: Path) -> list[Result]:
    found = [json.loads(path.read_text(encoding='utf-8')) for path in sorted(results.glob('*.json'))]
    return [result for result in found if result.get('benchmark') == benchmark]


def stale() -> list[Path]:
    """The pages whose generated parts are out of date."""
    pages = [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]
    return [page for page in pages if updated(page) != page.read_text(encoding='utf-8')]


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    options.add_argument('--check', action='store_true', help='write nothing; exit 1 if a page is out of date')
    check = options.parse_args().check
    pages = stale()
    for page in pages:
        print(f'{"out of date" if check else "written"}: {page.relative_to(ROOT)}')
        if not check:
            page.write_text(updated(page), encoding='utf-8')
    sys.exit(1 if check and pages else 0)


if __name__ == '__main__':
    main()
