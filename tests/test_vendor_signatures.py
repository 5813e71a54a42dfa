"""Installed vendors' packages have the signatures that our backends rely on."""

import re
import sys
import types

import pytest

from fla.ops.attn.backends.varlen import TorchVarlenBackend
from tests import vendor_signatures
from tests.vendor_signatures import CONSTANTS, SIGNATURES, difference, found, installed


@pytest.mark.parametrize('path', SIGNATURES)
def test_signature(path):
    if not installed(path):
        pytest.skip(f'{path.partition(".")[0]} is not installed')
    if path.startswith('torch.'):
        able, why = TorchVarlenBackend.is_available()
        if not able:
            pytest.skip(why[0] % why[1:])  # this PyTorch is too old, which the backend detects
    assert difference(path) is None


@pytest.mark.parametrize('path', CONSTANTS)
def test_constant(path):
    if not installed(path):
        pytest.skip(f'{path.partition(".")[0]} is not installed')
    value = found(path)
    assert getattr(value, 'value', value) == CONSTANTS[path]


@pytest.mark.parametrize(
    ('function', 'message'),
    [
        (lambda x, y: 0, None),
        (lambda x, y, z=0, **more: 0, None),
        (lambda y, x: 0, "takes .'y', 'x'., not .'x', 'y'."),
        (lambda x: 0, "takes .'x',., not"),
        (lambda x, y, z: 0, "also needs .'z'."),
    ],
)
def test_differences_are_found(monkeypatch, function, message):
    stub = types.ModuleType('some_vendor')
    stub.function = function
    monkeypatch.setitem(sys.modules, 'some_vendor', stub)
    monkeypatch.setitem(vendor_signatures.SIGNATURES, 'some_vendor.function', ('x', 'y'))
    text = difference('some_vendor.function')
    assert text is None if message is None else re.search(message, text)
