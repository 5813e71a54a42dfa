"""Chooses how much of each test's grid runs: `--grids=pairs` (the default), `one` or `all`.

`pairs` is what `make test` runs. Every test runs, but not every case of an expensive one:

- marked `slow` (a case takes more than about 3 s): the first case;
- marked `pairwise` (the grid takes more than about 3 s): a subset of the grid. With three or more axes it holds every pair
  of values of two axes; with two axes, or with `pairwise(pairs=False)`, every value of each. An axis is one name in
  `parametrize`, or a parametrised fixture.

`one` is what the leg with an older Triton runs: one case of each interpreted test, since the interpreter's own tests cover
what depends on Triton's version; everything that compiles, with the subsets of `pairs`, slow cases included.

`all` runs everything (`make test-full`). A test named on the command line (`file.py::test_name`) and the tests of a file
named by `--whole` run everything in every tier.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import pytest

INTERPRETERS_OWN = 'tests/triton_support/'
_left_out = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--whole', action='append', default=[], metavar='FILE', help='run all tests and grids of a test file')
    parser.addoption(
        '--grids', choices=('pairs', 'one', 'all'), default='pairs', help='how much of each grid runs: see tests/tiers.py'
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption('grids')
    named = tuple(argument.removeprefix('./') for argument in config.args if '::' in argument)
    named += tuple(f'{file}::' for file in config.getoption('whole'))
    if tier == 'all':
        return
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition('[')[0]].append(item)
    kept = {item for cases in functions.values() for item in _chosen(cases, tier)}
    kept.update(item for item in items if named and item.nodeid.startswith(named))
    left_out = [item for item in items if item not in kept]
    config.stash[_left_out] = len(left_out)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]


def _chosen(items: list[pytest.Item], tier: str) -> list[pytest.Item]:
    """The cases of one test function that run."""
    test = items[0]
    if tier == 'one' and test.get_closest_marker('interpreted') and not test.nodeid.startswith(INTERPRETERS_OWN):
        return items[:1]
    marker = test.get_closest_marker('pairwise')
    if marker:
        items = [items[index] for index in covering([_axes(item) for item in items], **marker.kwargs)]
    slow = [item for item in items if item.get_closest_marker('slow')] if tier == 'pairs' else []
    return [item for item in items if item not in slow[1:]]


def _axes(item: pytest.Item) -> tuple[str, ...]:
    """The value of each axis."""
    callspec = getattr(item, 'callspec', None)
    return tuple(map(repr, callspec.params.values())) if callspec else ()


def covering(rows: Sequence[tuple[object, ...]], pairs: bool = True) -> list[int]:
    """Indices of rows that together hold every pair of values of two axes; with two axes, or without `pairs`, every value.

    Greedy: the row that adds most comes next, the first of equals, so that the choice is always the same.
    """
    # Names that change together are one axis: each value becomes the place where it first occurs.
    columns = [tuple(map(column.index, column)) for column in zip(*rows, strict=True)]
    columns = [column for column in dict.fromkeys(columns) if any(column)]
    if not columns:
        return list(range(len(rows)))
    size = 2 if pairs and len(columns) > 2 else 1
    axes = list(itertools.combinations(range(len(columns)), size))
    held = [{(axis, tuple(columns[i][row] for i in axis)) for axis in axes} for row in range(len(rows))]
    missing = set[object]().union(*held)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda row: len(held[row] & missing))
        chosen.append(best)
        missing -= held[best]
    return sorted(chosen)


# -- what the last lines say ------------------------------------------------------------------------------------------------


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, 'workeroutput', None)
    if output is not None:
        output['left_out'] = session.config.stash.get(_left_out, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Takes the number from a worker of xdist; all of them collect the same tests."""
    config: pytest.Config = node.config  # type: ignore[attr-defined]
    config.stash[_left_out] = getattr(node, 'workeroutput', {}).get('left_out', 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash.get(_left_out, 0)
    if left_out:
        terminalreporter.write_line(
            f'{left_out} tests were left out: slow cases, and parts of grids. --grids=all runs them (`make test-full`).'
        )
