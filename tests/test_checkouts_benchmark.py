"""benchmarks/_checkouts.py: two checkouts of this repository in one process."""

import importlib
import os
import sys
from unittest import mock

import pytest
import torch

from tests.markdown import ROOT


@pytest.fixture
def checkouts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks'))
    return importlib.import_module('_checkouts')


@pytest.fixture
def older(tmp_path):
    """A checkout with the older layout, whose framework has a function that imports when it is called."""
    folder = tmp_path / 'fla' / 'ops' / 'backends'
    folder.mkdir(parents=True)
    (tmp_path / 'fla' / '__init__.py').write_text('')
    (tmp_path / 'fla' / 'ops' / '__init__.py').write_text('')
    (folder / 'late.py').write_text('value = 7')
    (folder / '__init__.py').write_text('def late():\n    from fla.ops.backends.late import value\n    return value')
    return tmp_path


def test_older_layout_is_found_beside_this_one(checkouts, older, monkeypatch, tmp_path):
    scripts = tmp_path / 'scripts'
    scripts.mkdir()
    (scripts / 'a_script.py').write_text('from fla.backends import late')
    monkeypatch.syspath_prepend(str(scripts))
    before = {name: module for name, module in sys.modules.items() if name.split('.')[0] == 'fla'}
    checkout = checkouts.Checkout(older, 'a_script')
    script = checkout.load('a_script')
    assert 'a_script' not in sys.modules
    assert {name: module for name, module in sys.modules.items() if name.split('.')[0] == 'fla'} == before
    with checkout.active():
        assert script.late() == 7
    assert 'fla.ops.backends.late' in checkout.modules
    assert 'fla.ops.backends.late' not in sys.modules


def test_other_folders_are_refused(checkouts, tmp_path):
    with pytest.raises(ValueError, match='is not a checkout of this repository'):
        checkouts.Checkout(tmp_path)


def test_cases_run_on_two_copies_of_this_checkout(checkouts):
    """Each copy has its own framework, and serves its own cases."""
    loaded = [checkouts.Checkout(ROOT, '_cases') for _ in range(2)]
    first, second = (checkout.load('_cases') for checkout in loaded)
    assert first.dispatch is not second.dispatch
    for checkout, module in zip(loaded, (first, second), strict=True):
        with checkout.active(), torch.no_grad(), mock.patch.dict(os.environ):
            for case in module.fla_cases():
                case.assert_served()


def test_spread(checkouts):
    assert checkouts.spread([1.0, 2.0, 3.0]) == {'p10': 1.0, 'median': 2.0, 'p90': 3.0}
    assert checkouts.spread([float(i) for i in range(11)]) == {'p10': 1.0, 'median': 5.0, 'p90': 9.0}
