"""A table runs all its rows, and names every one that fails."""

import pytest
import torch

from tests.tables import table

drawn = []


@pytest.fixture
def ten():
    return 10


@table('x', [1, 2, 3])
def test_rows_share_fixtures_and_random_numbers(ten, x):
    drawn.append((x + ten, float(torch.rand(()))))


def test_every_row_ran():
    assert [x for x, _ in drawn] == [11, 12, 13]
    assert len({number for _, number in drawn}) == 1


def test_each_failing_row_is_reported():
    @table(('x', 'kind'), [(0, ValueError), (1, ValueError), (2, KeyError), (3, None)], ids=str)
    def check(x, kind):
        if kind is None:
            pytest.skip('not here')
        with pytest.raises(kind, match='odd' if x % 2 else None):
            raise ValueError(f'{x} is even')

    with pytest.raises(pytest.fail.Exception) as caught:
        check()
    first, *lines = str(caught.value).splitlines()
    assert first == '3 of 4 rows failed:'
    assert [line.split(':')[0] for line in lines if line.startswith('row')] == [
        "row 1, 1-<class 'ValueError'>",
        "row 2, 2-<class 'KeyError'>",
        'row 3, 3-None',
    ]
