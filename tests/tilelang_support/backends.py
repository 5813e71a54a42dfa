"""The launchers of TileLang backends with interpreted kernels."""

import importlib
import sys

from tests.tilelang_support.interpreter import load


def interpreted(monkeypatch, op):
    """The module that launches the kernels of an operation, which then run on CPU tensors."""
    package = f'fla.ops.{op}.backends.tilelang'
    # whatever of it was imported before is there again afterwards
    monkeypatch.setitem(sys.modules, f'{package}.launch', None)
    del sys.modules[f'{package}.launch']
    holder = importlib.import_module(package)
    monkeypatch.delattr(holder, 'kernels', raising=False)
    monkeypatch.setitem(sys.modules, f'{package}.kernels', load(f'{package}.kernels'))
    launch = importlib.import_module(f'{package}.launch')
    monkeypatch.setattr(launch, 'kernels_of', lambda *recipes: [make(*values) for make, values in recipes])
    return launch
