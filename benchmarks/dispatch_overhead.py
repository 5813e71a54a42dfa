"""Measures the cost of a dispatched call over calling the function directly, as a ratio to `torch.empty(0)`. Needs no GPU.

    python benchmarks/dispatch_overhead.py [--quick] [--explain-costs] [--json PATH]
    python benchmarks/dispatch_overhead.py --beside CHECKOUT [--quick] [--json PATH]

The wide operation has five tensors and eleven options (`chunk_kda` has eighteen) and is called with five positional
arguments and ten keywords. The small one has the signature of `l2norm`. Each case first asserts which implementation serves
it. The ceilings are the budgets of the design; the table says which are met, and no case fails for being slow.

--explain-costs adds the cost of a dispatcher's primitives on this machine and the generated code of each case above its
ceiling. Together they show what bounds the case.

--beside compares with another checkout of this repository: both are loaded into one process and timed in the same rounds, in
shuffled order. It prints the ratio of this checkout to the other, of the overheads (minima of all rounds) and of whole calls
(median and percentiles of the rounds). `--beside .` compares this checkout with itself, which shows the noise. Imports and
first plans are measured in alternating fresh processes.

The JSON holds `machine`, `command`, `rounds`, `yardstick_ns` (`torch.empty(0)`), `direct_ns`, and a row for each case:
`dispatch` (this package), `peers` (other dispatchers) and `once` (imports and first plans); with --beside `cases` and
`once`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _cases import Case, direct_cases, fla_cases, generated_source, resolved_case
from _checkouts import Checkout, spread
from _costs import one_off_costs, primitive_bursts
from _peers import peer_cases
from _results import ROOT, parser, write_json
from _timing import Cost, Samples, command, machine, table, timed

METHOD = 'thread CPU time, cases interleaved and shuffled per round; the median is of paired differences'


@dataclass(frozen=True)
class Result:
    case: Case
    cost: Cost
    ratio: Cost

    @property
    def met(self) -> bool | None:
        """Whether the quickest rounds keep the ceiling. They show the cost of the code rather than the machine's load."""
        return None if self.case.ceiling is None else self.ratio.min <= self.case.ceiling

    def as_json(self) -> dict[str, Any]:
        case = {
            'name': self.case.name,
            'serves': self.case.serves,
            'over': self.case.base,
            'ceiling': self.case.ceiling,
        }
        return {**case, 'met': self.met, 'ns': self.cost.as_json(), 'ratio': self.ratio.as_json()}

    def as_cells(self) -> list[str]:
        ceiling = '' if self.case.ceiling is None else f'{self.case.ceiling:.2f}'
        ns, ratio = self.cost, self.ratio
        cells = [f'{ns.min:.0f}', f'{ns.median:.0f}', f'{ratio.min:.2f}', f'{ratio.p20:.2f}', f'{ratio.median:.2f}']
        return [self.case.name, *cells, ceiling, verdict(self.met)]


def verdict(met: bool | None) -> str:
    return {None: '', True: 'yes', False: 'NO'}[met]


def loop(n: int) -> None:
    for _ in itertools.repeat(None, n):
        pass


def empty(n: int) -> None:
    for _ in itertools.repeat(None, n):
        torch.empty(0)


def measure(cases: list[Case], rounds: int) -> tuple[list[Result], dict[str, Samples], Cost]:
    """Returns the cost of each case over its base, all samples, and the cost of the yardstick over an empty loop."""
    bursts = {'loop': loop, 'torch.empty(0)': empty} | {case.name: case.burst for case in cases}
    samples = timed(bursts, rounds=rounds)
    yardstick = samples['torch.empty(0)'].over(samples['loop'])
    results = []
    for case in cases:
        if case.base != case.name:
            cost = samples[case.name].over(samples[case.base])
            results.append(Result(case, cost, cost.ratio(yardstick)))
    return results, samples, yardstick


def main() -> None:
    options = parser(__doc__)
    options.add_argument('--explain-costs', action='store_true', help='print primitive costs and the code of slow cases')
    options.add_argument('--beside', type=Path, metavar='CHECKOUT', help='compare with this checkout of the repository')
    arguments = options.parse_args()
    rounds, repeats = (15, 3) if arguments.quick else (151, 15)
    with torch.no_grad():
        if arguments.beside:
            report = compare(arguments.beside, rounds, repeats)
        else:
            report = measure_this(rounds, repeats, arguments.explain_costs)
    about = {'benchmark': 'dispatch_overhead', 'command': command(), 'machine': machine(), 'method': METHOD}
    write_json(arguments.json, {**about, 'rounds': rounds, **report})


def measure_this(rounds: int, repeats: int, explain: bool) -> dict[str, Any]:
    """Measures this checkout and the peers; prints tables and returns the JSON's fields."""
    skipped: list[str] = []
    direct, ours, peers = direct_cases(), [*fla_cases(), resolved_case()], peer_cases(skipped)
    for case in (*direct, *ours, *peers):
        case.assert_served()
    results, samples, yardstick = measure([*direct, *ours, *peers], rounds)
    (once,) = one_off_costs(repeats)

    print(f'{command()}\n{machine()}')
    calls = ', '.join(f'{case.name} call {samples[case.name].min:.0f}' for case in direct)
    print(f'ns: torch.empty(0) {yardstick.min:.0f} (median {yardstick.median:.0f}), {calls}')
    header = ['over a direct call', 'ns min', 'median', 'ratio min', 'p20', 'median', 'ceiling', 'met']
    dispatch, others = results[: len(ours)], results[len(ours) :]
    title = 'Dispatch, as a ratio to torch.empty(0); the min decides'
    print(table(header, [result.as_cells() for result in dispatch], title))
    print(table(header[:6], [result.as_cells()[:6] for result in others], 'Peers'))
    cells = [[row['name'], row['ms_min'], row['ms_median'], row['ceiling_ms'], verdict(row['met'])] for row in once]
    print(table(['in fresh processes', 'ms min', 'median', 'ceiling', 'met'], cells, 'One-off costs'))
    for reason in skipped:
        print(f'SKIPPED {reason}')

    report = {
        'yardstick_ns': yardstick.as_json(),
        'direct_ns': {case.name: round(samples[case.name].min, 1) for case in direct},
        'dispatch': [result.as_json() for result in dispatch],
        'peers': [result.as_json() for result in others],
        'once': once,
        'skipped': skipped,
    }
    over = [result for result in results if result.met is False]
    if explain:
        report['primitives_ns'] = explain_costs(over, rounds, yardstick)
    elif over:
        print(f'\n{len(over)} above the ceiling; --explain-costs shows what bounds them.')
    return report


def explain_costs(over: list[Result], rounds: int, yardstick: Cost) -> dict[str, float]:
    samples = timed(primitive_bursts(), rounds=rounds, burst_ms=0.3)
    empty_loop = samples.pop('pass')
    ns = {statement: round(sample.over(empty_loop).min, 1) for statement, sample in samples.items()}
    rows = [[statement, f'{cost:.0f}', f'{cost / yardstick.min:.2f}'] for statement, cost in ns.items()]
    print(table(['primitive', 'ns min', 'ratio'], rows, 'Cost of primitives'))
    for result in over:
        print(f'\nThe code of "{result.case.name}":\n{generated_source(result.case.op) or "(no generated source)"}')
    return ns


def compare(other: Path, rounds: int, repeats: int) -> dict[str, Any]:
    """Measures this checkout and another one in the same rounds; prints tables and returns the JSON's fields."""
    bursts = {}
    bases: dict[str, str] = {}
    for side, root in (('this', ROOT), ('other', other)):
        checkout = Checkout(root, '_cases')
        module = checkout.load('_cases')
        with checkout.active():
            cases = [*module.direct_cases(), *module.fla_cases(), module.resolved_case()]
            for case in cases:
                case.assert_served()
                bursts[f'{side}: {case.name}'] = case.burst
                bases[case.name] = case.base
    samples = timed(bursts, rounds=rounds)
    rows = []
    for name, base in bases.items():
        this, that = (samples[f'{side}: {name}'] for side in ('this', 'other'))
        row = {'name': name, 'over': base, 'calls': spread([a / b for a, b in zip(this.ns, that.ns, strict=True)])}
        if base != name:
            ours, theirs = this.over(samples[f'this: {base}']), that.over(samples[f'other: {base}'])
            row |= {'ns': ours.as_json(), 'other_ns': theirs.as_json(), 'overheads': round(ours.min / theirs.min, 4)}
        rows.append(row)
    once = [
        {
            'name': ours['name'],
            'ms_min': ours['ms_min'],
            'other_ms_min': theirs['ms_min'],
            'ratio_min': round(ours['ms_min'] / theirs['ms_min'], 4),
            'ratio_median': round(ours['ms_median'] / theirs['ms_median'], 4),
        }
        for ours, theirs in zip(*one_off_costs(repeats, (ROOT, other)), strict=True)
    ]

    print(f'{command()}\n{machine()}')
    header = ['this checkout / the other', 'ns min', 'other', 'ratio', 'calls: median', 'p10', 'p90']
    cells = [
        [
            row['name'],
            *([f'{row["ns"]["min"]:.0f}', f'{row["other_ns"]["min"]:.0f}', row['overheads']] if 'ns' in row else [''] * 3),
            *(row['calls'][name] for name in ('median', 'p10', 'p90')),
        ]
        for row in rows
    ]
    print(table(header, cells, 'Overhead over a direct call, and ratio of whole calls'))
    header = ['in fresh processes', 'ms min', 'other', 'ratio min', 'ratio median']
    print(table(header, [list(row.values()) for row in once], 'One-off costs'))
    return {'cases': rows, 'once': once}


if __name__ == '__main__':
    main()
