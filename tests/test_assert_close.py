"""`fla.utils.assert_close`: what passes, what raises, what warns."""

import math

import pytest
import torch

from fla.utils import assert_close

REF = torch.tensor([3.0, -4.0])


@pytest.mark.parametrize(
    ('result', 'options'),
    [
        (REF.clone(), {}),
        (REF.double() + 0.01, {}),
        (REF + 0.5, {'err_atol': 0.5}),
    ],
)
def test_passes(result, options):
    assert_close('o', REF, result, 0.01, **options)


def test_an_empty_tensor_passes():
    assert_close('o', REF[:0], REF[:0], 0.0)


WRONG = {
    'too far': (REF + 0.5, r'o: max \|difference\| 0.5, relative RMS error 0.141, bound 0.01'),
    'NaN': (torch.tensor([3.0, math.nan]), 'NaN in tri'),
    'infinite': (torch.tensor([3.0, -math.inf]), 'relative RMS error inf'),
}


@pytest.mark.parametrize('name', WRONG)
def test_raises_or_warns(name):
    result, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        assert_close('o', REF, result, 0.01)
    with pytest.warns(UserWarning, match=message):
        assert_close('o', REF, result, 0.01, warning=True)


def test_another_shape_always_raises():
    with pytest.raises(AssertionError, match=r'o: shapes differ, \(2,\) and \(1,\)'):
        assert_close('o', REF, REF[:1], 10.0, warning=True, err_atol=10.0)
