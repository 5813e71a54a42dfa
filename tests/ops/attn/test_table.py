"""The table of docs/attention.md agrees with the backends."""

import inspect

import pytest
import torch

from fla.ops.attn.backends import attn_registry
from fla.ops.attn.parallel import parallel_attn
from tests.markdown import ROOT


def table():
    """The cells of the table, by row and backend."""
    lines = (ROOT / 'docs/attention.md').read_text(encoding='utf-8').splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith('| |'))
    rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in lines[begin : lines.index('', begin)]]
    names = [name.strip('`') for name in rows[0][1:]]
    return {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows[2:]}


TABLE = table()
attn_registry.import_paths()
BACKENDS = {backend.backend_type: backend for backend in attn_registry}
PLACES = {None: 'everything', (8, 0): 'NVIDIA from 8.0', (9, 0): 'NVIDIA 9.x'}
SHORT = {torch.float16: 'fp16', torch.bfloat16: 'bf16'}


def test_every_backend_has_a_column():
    assert set(TABLE['what']) == {*BACKENDS, 'default'}


@pytest.mark.parametrize('name', BACKENDS)
def test_column(name):
    backend = BACKENDS[name]
    said = {row: cells[name] for row, cells in TABLE.items()}
    takes = set(inspect.signature(backend.parallel_attn).parameters)
    assert said['toggle'].strip('`') == (backend.env_var or '')
    assert said['on by default'] == ('yes' if backend.default_enable is True else '')
    assert set(said['dtypes'].split(', ')) == ({SHORT[dtype] for dtype in backend.dtypes} if backend.dtypes else {'all'})
    assert said['runs on'] == PLACES[backend.min_capability]
    assert bool(said['window']) == ('window_size' in takes)
    assert bool(said['packed']) == ('cu_seqlens' in takes) == ('chunk_indices' in takes)
    assert bool(said['decay, sinks']) == ('g' in takes) == ('sink_bias' in takes)
    assert (said['gradients'] == 'inference') == (backend.grad == 'none')
    assert bool(said['compiled code']) == backend.traceable
    if backend.package_version and name != 'tilelang':  # docs/backends.md has its
        assert said['what'] == backend.package_version


def test_what_is_unverified_is_said_and_off():
    text = (ROOT / 'docs/attention.md').read_text(encoding='utf-8')
    unverified = [name for name in TABLE['what'] if name in BACKENDS and not BACKENDS[name].verified]
    assert f'on a GPU ({", ".join(f"`{name}`" for name in unverified)})' in ' '.join(text.split())
    assert not any(BACKENDS[name].default_enable for name in unverified)


def test_the_function_takes_what_its_callers_pass():
    parameters = list(inspect.signature(parallel_attn).parameters.values())
    assert [one.name for one in parameters] == (
        ['q', 'k', 'v', 'g', 'scale', 'window_size', 'cu_seqlens', 'chunk_indices', 'sink_bias']
    )
    assert [one.default for one in parameters] == [inspect.Parameter.empty] * 3 + [None] * 6
    assert [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY] == ['sink_bias']
