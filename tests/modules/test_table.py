"""The tables of docs/modules.md agree with the backends."""

import importlib
import inspect

import pytest
import torch

from fla.modules.backends import modules_registry
from tests.markdown import ROOT

from .test_paths import CALLS

SHORT = {torch.float16: 'fp16', torch.bfloat16: 'bf16', torch.float32: 'fp32'}
TEXT = (ROOT / 'docs/modules.md').read_text(encoding='utf-8').partition('## Times')[0]


def tables():
    """The cells of every table with one column per backend, by row and backend."""
    found, names = [], None
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.split('|')[1:-1]]
        if line.startswith('| |'):
            names = [name.strip('`') for name in cells[1:]]
            found.append({})
        elif cells and not cells[0].startswith('--'):
            found[-1][cells[0].strip('`')] = dict(zip(names, cells[1:], strict=True))
    return found


PACKAGES, *TOPICS = tables()
modules_registry.import_paths()
BACKENDS = {backend.backend_type: backend for backend in modules_registry if backend.backend_type != 'reference'}
FUNCTIONS = [name.split('.')[1] for name in CALLS]
SAID = {function: cells for table in TOPICS for function, cells in table.items() if function != 'dtypes'}


def test_every_function_and_backend_is_there():
    assert set(PACKAGES['toggle']) == BACKENDS.keys()
    assert set(SAID) == set(FUNCTIONS)


@pytest.mark.parametrize('name', BACKENDS)
def test_package(name):
    backend, said = BACKENDS[name], {row: cells[name] for row, cells in PACKAGES.items()}
    distribution, _, least = backend.package_version.partition('>=')
    assert said['toggle'] == f'`{backend.env_var}=1`'
    assert said['package'] == f'{distribution} {least} or later'
    assert bool(said['run on an H200 with']) == backend.verified
    assert backend.default_enable is False


# how the tables say that an argument is not supported
MISSING = {
    'residual': 'no residual',
    'bias': 'no bias',
    'is_rms_norm': 'no `is_rms_norm`',
    'logit_scale': 'no `logit_scale`',
    'process_group': 'no `process_group`',
    'interleaved': 'halves',
    'cu_seqlens': 'not packed',
    'initial_state': 'no states',
    'output_final_state': 'no states',
}


@pytest.mark.parametrize('name', BACKENDS)
@pytest.mark.parametrize('function', CALLS)
def test_who_serves_what(function, name):
    module, _, short = function.partition('.')
    backend, said = BACKENDS[name], SAID[short].get(name, '')
    assert bool(said) == hasattr(backend, short)
    if said:
        only_inference = backend.grad == 'none' or short == 'causal_conv1d_update'
        assert said.endswith('inference') == only_inference
        public = inspect.signature(getattr(importlib.import_module(f'fla.modules.{module}'), short)).parameters
        takes = inspect.signature(getattr(backend, short)).parameters
        assert [one for one in public if one not in takes and MISSING[one] not in said] == []
        assert [one for one in public if one in takes and MISSING.get(one, '?') in said] == []


@pytest.mark.parametrize('name', BACKENDS)
def test_dtypes(name):
    dtypes = BACKENDS[name].dtypes
    dtypes = dtypes['x'] if isinstance(dtypes, dict) else dtypes
    for table in TOPICS:
        if name in table.get('dtypes', {}):
            assert set(table['dtypes'][name].split(', ')) == {SHORT[one] for one in dtypes}
