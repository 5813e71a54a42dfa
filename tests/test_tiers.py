"""Which cases of a grid each tier runs."""

import itertools

import pytest

from tests import process
from tests.tiers import covering

GRIDS = {
    'one axis': [(x,) for x in range(5)],
    'two axes': list(itertools.product(range(3), range(4))),
    'three axes': list(itertools.product(range(4), range(3), range(2))),
    'five axes': list(itertools.product(range(3), repeat=5)),
    'an axis with holes': [row for row in itertools.product(range(4), range(3), range(3)) if row[0] != row[1]],
    'axes that go together': [(x, str(x), y) for x in range(3) for y in range(3)],
    'one case': [('a', 'b', 'c')],
    'no axis': [()],
}


@pytest.mark.parametrize('grid', GRIDS)
def test_every_value_and_every_pair_is_covered(grid):
    rows = GRIDS[grid]
    chosen = [rows[index] for index in covering(rows)]
    columns = [i for i in range(len(rows[0])) if len({row[i] for row in rows}) > 1]
    if grid == 'axes that go together':
        columns = columns[1:]
    for axes in itertools.combinations(columns, 2 if len(columns) > 2 else 1):
        pick = [tuple(row[i] for i in axes) for row in rows]
        assert {tuple(row[i] for i in axes) for row in chosen} == set(pick)
    assert covering(rows) == covering(list(rows)) == sorted(set(covering(rows)))


def test_subsets_are_small():
    assert {grid: len(covering(rows)) for grid, rows in GRIDS.items()} == {
        'one axis': 5,
        'two axes': 4,
        'three axes': 12,
        'five axes': 15,
        'an axis with holes': 12,
        'axes that go together': 3,
        'one case': 1,
        'no axis': 1,
    }
    assert len(covering(GRIDS['five axes'], pairs=False)) == 3


TESTS = """
import pytest

def grid(function):
    for name in 'abc':
        function = pytest.mark.parametrize(name, range(3))(function)
    return function

@grid
@pytest.mark.pairwise
def test_pairs(a, b, c):
    pass

@grid
def test_all(a, b, c):
    pass

@grid
@pytest.mark.interpreted
@pytest.mark.pairwise
def test_kernel(a, b, c):
    pass

@pytest.mark.slow
@pytest.mark.parametrize('a', range(4))
def test_slow(a):
    pass
"""


@pytest.mark.parametrize('workers', [[], ['-n', '1']], ids=['one process', 'worker'])
def test_tiers(tmp_path, workers):
    (tmp_path / 'test_some.py').write_text(TESTS)
    (tmp_path / 'pytest.ini').write_text('[pytest]\nmarkers =\n  pairwise: x\n  slow: x\n  interpreted: x\n')
    (tmp_path / 'conftest.py').write_text("pytest_plugins = ['tests.tiers']\n")

    def passed(*options):
        done = process.run_module('pytest', '-q', '-p', 'no:cacheprovider', *workers, *options, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ('--grids=all runs them' in done.stdout) == ('were left out' in done.stdout)
        left_out = int(done.stdout.split(' tests were left out')[0].split()[-1]) if 'were left out' in done.stdout else 0
        return int(done.stdout.split(' passed')[0].split()[-1]), left_out

    assert passed() == (10 + 27 + 10 + 1, 17 + 17 + 3)
    if workers:
        return
    assert passed('--grids=one') == (10 + 27 + 1 + 4, 17 + 26)
    assert passed('--grids=all') == (27 * 3 + 4, 0)
    assert passed('test_some.py::test_slow', 'test_some.py::test_kernel') == (31, 0)
    assert passed('test_some.py::test_pairs[0-0-0]') == (1, 0)
    assert passed('--whole=test_some.py') == (27 * 3 + 4, 0)
    assert passed('--whole=test_other.py') == passed()
