"""FlashQLA and FlashKDA themselves, where they are installed: the cases of benchmarks/vendors.py, each against float64,
twice for the same bits, from compiled code and from a captured graph."""

import importlib
import importlib.util

import pytest

from tests.markdown import ROOT

pytestmark = pytest.mark.gpu


def load(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks'))
    return importlib.import_module('vendors')


def names() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        return list(load(patch).CASES)


# What a vendor's kernel rounds too much for, which docs/kernels.md says.
BEYOND = {'kda.long.weak': {'o', 'final'}}


@pytest.mark.parametrize('name', names())
def test_the_package(monkeypatch, name):
    vendors = load(monkeypatch)
    package = vendors.VENDORS[vendors.family(name)]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f'needs {package}')
    for toggle, value in vendors.TOGGLES.items():
        monkeypatch.setenv(toggle, value)
    row = vendors.case(name)
    assert 'refused' not in row, row['refused']
    beyond = {what: mine for what, (mine, _, bound) in row['errors'].items() if not mine <= bound}
    assert set(beyond) == BEYOND.get(name, set()), beyond
    assert row['same_bits']
    every = {'reduce-overhead', 'exported'} if name.endswith('.dense') else set()
    right = dict.fromkeys({'compiled', 'captured'} | every, 'equal')
    if vendors.family(name) == 'qla' and 'packed' in name:
        refused = row['others'].pop('captured')
        assert 'which a CUDA graph capture refuses' in refused, refused
        del right['captured']
    assert row['others'] == right
