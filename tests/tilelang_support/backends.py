"""TileLang backends without TileLang: which calls they serve, and their launchers with interpreted kernels."""

import importlib
import importlib.util
import os
import shutil
import sys

from fla.backends import default_dispatcher
from fla.ops.launch import tilelang_call
from tests.ops.vendors import H100, install, pretend
from tests.tilelang_support.interpreter import load


def switched_on(monkeypatch, folder, *backends):
    """Makes TileLang appear installed, working and enabled, on a machine with an H100. Importing it fails."""
    for name in [n for n in os.environ if n.startswith('FLA_')]:
        monkeypatch.delenv(name)
    default_dispatcher().reset()
    install(monkeypatch, folder, 'tilelang', 'tilelang', '0.1.15')
    monkeypatch.setitem(sys.modules, 'tilelang', None)
    monkeypatch.setattr(tilelang_call, 'check_package', lambda module, version: (True, None))
    for backend in backends:
        monkeypatch.setattr(backend, 'probe', lambda self, device: (True, None))
    for name in ('FLA_TILELANG', 'FLA_TILELANG_ATTN'):
        monkeypatch.setenv(name, '1')
    pretend(monkeypatch, H100)


def unusable(monkeypatch, backend):
    """Makes TileLang appear installed but unable to compile, as without nvcc or with a newer apache-tvm-ffi."""

    def broken(device):
        raise ImportError('cannot import name from tvm_ffi')

    monkeypatch.undo()
    pretend(monkeypatch, H100)
    monkeypatch.setattr(tilelang_call, 'check_package', lambda module, version: (True, None))
    monkeypatch.setattr(sys.modules[backend.__module__], '_one_step', broken)
    for name in ('FLA_TILELANG', 'FLA_TILELANG_ATTN'):
        monkeypatch.setenv(name, '1')


def no_compiler():
    """Returns why TileLang cannot compile here, or None."""
    if importlib.util.find_spec('tilelang') is None:
        return 'TileLang is not installed: make test-tilelang'
    if not (shutil.which('nvcc') or shutil.which('/usr/local/cuda/bin/nvcc')):
        return 'no nvcc'
    return None


def interpreted(monkeypatch, op):
    """Returns the module that launches the kernels of an operation, with kernels that run on CPU tensors."""
    package = f'fla.ops.{op}.backends.tilelang'
    # monkeypatch restores the modules that were imported before.
    monkeypatch.setitem(sys.modules, f'{package}.launch', None)
    del sys.modules[f'{package}.launch']
    holder = importlib.import_module(package)
    monkeypatch.delattr(holder, 'kernels', raising=False)
    monkeypatch.setitem(sys.modules, f'{package}.kernels', load(f'{package}.kernels'))
    launch = importlib.import_module(f'{package}.launch')
    monkeypatch.setattr(launch, 'kernels_of', lambda *recipes: [make(*values) for make, values in recipes])
    return launch
