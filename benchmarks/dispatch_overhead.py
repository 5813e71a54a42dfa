"""What a dispatched call costs over calling the function directly, as a ratio to `torch.empty(0)` in the same process.

    python benchmarks/dispatch_overhead.py [--quick] [--explain-costs] [--json PATH]

The wide operation has five tensors and eleven options, of the eighteen that `chunk_kda` has, and is called with five
positional arguments and ten keywords; the small one is like `l2norm`. Every case first shows which implementation serves
it, so that none is timed vacuously. The ceilings are the budgets of the design: the table says which are met, and nothing
fails for being slow. `--explain-costs` adds what the primitives of a dispatcher cost on this machine, and the generated
code of every case above its ceiling: the two together say what bounds it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from _cases import Case, direct_cases, fla_cases, generated_source, resolved_case
from _costs import one_off_costs, primitive_bursts
from _peers import peer_cases
from _timing import Cost, Samples, command, machine, parser, table, timed, write_json


@dataclass(frozen=True)
class Result:
    case: Case
    cost: Cost
    ratio: Cost

    @property
    def met(self) -> bool | None:
        """Whether the quickest rounds keep the ceiling: what the code costs, not what else the machine is doing."""
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
    """The cost of each case over its base, and of the yardstick over an empty loop, all from the same rounds."""
    bursts = {'loop': loop, 'torch.empty(0)': empty} | {case.name: case.burst for case in cases}
    samples = timed(bursts, rounds=rounds)
    yardstick = samples['torch.empty(0)'].over(samples['loop'])
    results = []
    for case in cases:
        if case.base != case.name:
            cost = samples[case.name].over(samples[case.base])
            results.append(Result(case, cost, cost.ratio(yardstick)))
    return results, samples, yardstick


@torch.no_grad()
def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument('--explain-costs', action='store_true', help='primitive costs, and the code of what is too slow')
    arguments = options.parse_args()
    rounds = 15 if arguments.quick else 151

    skipped: list[str] = []
    direct, ours, peers = direct_cases(), fla_cases(), peer_cases(skipped)
    if hasattr(ours[0].op, 'resolve'):
        ours.append(resolved_case())
    else:
        skipped.append('op.resolve(…): not there yet')
    for case in (*direct, *ours, *peers):
        case.assert_served()
    results, samples, yardstick = measure([*direct, *ours, *peers], rounds)
    one_off = one_off_costs(3 if arguments.quick else 15, skipped)

    print(f'{command()}\n{machine()}')
    calls = ', '.join(f'{case.name} call {samples[case.name].min:.0f}' for case in direct)
    print(f'ns: torch.empty(0) {yardstick.min:.0f} (median {yardstick.median:.0f}), {calls}')
    header = ['over a direct call', 'ns min', 'median', 'ratio min', 'p20', 'median', 'ceiling', 'met']
    ours_at = len(ours)
    title = 'Dispatch, as a ratio to torch.empty(0); the min decides'
    print(table(header, [result.as_cells() for result in results[:ours_at]], title))
    print(table(header[:6], [result.as_cells()[:6] for result in results[ours_at:]], 'Peers'))
    once = [[row['name'], row['ms_min'], row['ms_median'], row['ceiling_ms'], verdict(row['met'])] for row in one_off]
    print(table(['in fresh processes', 'ms min', 'median', 'ceiling', 'met'], once, 'Once'))
    for reason in skipped:
        print(f'SKIPPED {reason}')

    report = {
        'benchmark': 'dispatch_overhead',
        'command': command(),
        'machine': machine(),
        'method': 'thread CPU time, cases interleaved and shuffled per round; the median is of paired differences',
        'rounds': rounds,
        'yardstick_ns': yardstick.as_json(),
        'direct_ns': {case.name: round(samples[case.name].min, 1) for case in direct},
        'dispatch': [result.as_json() for result in results[:ours_at]],
        'peers': [result.as_json() for result in results[ours_at:]],
        'once': one_off,
        'skipped': skipped,
    }
    over = [result for result in results if result.met is False]
    if arguments.explain_costs:
        report['primitives_ns'] = explain_costs(over, rounds, yardstick)
    elif over:
        print(f'\n{len(over)} above the ceiling; --explain-costs shows what bounds them.')
    write_json(arguments.json, report)


def explain_costs(over: list[Result], rounds: int, yardstick: Cost) -> dict[str, float]:
    samples = timed(primitive_bursts(), rounds=rounds, burst_ms=0.3)
    empty_loop = samples.pop('pass')
    ns = {statement: round(sample.over(empty_loop).min, 1) for statement, sample in samples.items()}
    rows = [[statement, f'{cost:.0f}', f'{cost / yardstick.min:.2f}'] for statement, cost in ns.items()]
    print(table(['primitive', 'ns min', 'ratio'], rows, 'What the parts cost'))
    for result in over:
        print(f'\nThe code of "{result.case.name}":\n{generated_source(result.case.op) or "no generated source known"}')
    return ns


if __name__ == '__main__':
    main()
