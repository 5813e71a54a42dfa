"""The TileLang kernel of attention: what its source says, interpreted, against the formula in float64; it compiles for
Hopper."""

import pytest
import torch

pytest.importorskip('triton')
from fla.ops.attn.backends.tilelang import AttentionTileLang
from fla.ops.attn.kernels.launch import attention_forward
from tests import bounds
from tests.ops.attn.attention import BF16, FP16, FP32, check_results, inputs, results
from tests.ops.delta_rules import apart
from tests.tilelang_support.backends import interpreted, no_compiler

ONE_HEAD = {'batch': 1, 'heads': 1, 'kv_heads': 1}
CU = torch.tensor([0, 0, 1, 131, 131, 200])


def given(dim=64, **shapes):
    return inputs(**{'dtype': BF16, 'dim': dim, 'value_dim': dim, 'heads': 2, 'kv_heads': 1, **shapes})


CASES = {
    'plain': ({'length': 140}, {}),
    'grouped, scaled': ({'length': 20, 'heads': 6, 'kv_heads': 2}, {'scale': 0.3}),
    'negative scale': ({'length': 40}, {'scale': -2.0}),
    'scale of 0': ({'length': 40}, {'scale': 0}),
    'float16, wide heads': ({'length': 130, 'dim': 128, 'dtype': FP16, **ONE_HEAD}, {}),
    'wide heads': ({'length': 130, 'dim': 128, **ONE_HEAD}, {'window_size': 100}),
    'window of one': ({'length': 140, **ONE_HEAD}, {'window_size': 1}),
    'window of two, over the edge of a block': ({'length': 140, **ONE_HEAD}, {'window_size': 2}),
    'short window': ({'length': 400, **ONE_HEAD}, {'window_size': 20}),
    'long window': ({'length': 400, **ONE_HEAD}, {'window_size': 200}),
    'window longer than T': ({'length': 140, **ONE_HEAD}, {'window_size': 1000}),
    'cached': ({'length': 200, 'queries': 70}, {}),
    'cached, window': ({'length': 400, 'queries': 150, **ONE_HEAD}, {'window_size': 129}),
    'one query': ({'length': 150, 'queries': 1}, {}),
    'packed': ({'length': 200, 'batch': 1}, {'cu_seqlens': CU}),
    'packed, window': ({'length': 200, **ONE_HEAD}, {'cu_seqlens': apart(CU.int()), 'window_size': 37}),
}


@pytest.mark.pairwise
@pytest.mark.interpreted
@pytest.mark.parametrize('case', CASES)
def test_against_the_formula(monkeypatch, case):
    """Also the gradients of the Triton backward from its results."""
    interpreted(monkeypatch, 'attn')
    shapes, options = CASES[case]
    tensors = given(**shapes)
    found = results(None, tensors, reference=AttentionTileLang().parallel_attn, **options)
    check_results(found, tensors, **options)


@pytest.mark.interpreted
@pytest.mark.parametrize('length', [1, 127, 128, 129, 257])
def test_lengths(monkeypatch, length):
    interpreted(monkeypatch, 'attn')
    tensors = given(length=length, **ONE_HEAD)
    check_results(results(None, tensors, False, AttentionTileLang().parallel_attn), tensors, False)


@pytest.mark.interpreted
@pytest.mark.parametrize(('shapes', 'lens', 'window'), [({'queries': 70}, None, 0), ({'batch': 1}, CU, 50)])
def test_the_normaliser_is_the_default_s(monkeypatch, shapes, lens, window):
    launch = interpreted(monkeypatch, 'attn')
    q, k, v = given(length=200, **shapes).values()
    o, lse = launch.attention_forward(q, k, v, lens, 0.1, window)
    wanted, of_default = attention_forward(q, k, v, None, None, lens, 0.1, window)
    assert (lse.shape, lse.dtype) == (of_default.shape, FP32)
    assert bounds.relative_rms(of_default, lse) <= bounds.elementwise(FP32)
    assert bounds.relative_rms(wanted, o) < bounds.ROUNDING[BF16]


@pytest.mark.interpreted
@pytest.mark.parametrize('bad', [torch.nan, torch.inf])
@pytest.mark.parametrize('lens', [None, [0, 70, 90]], ids=['rows of a batch', 'packed'])
def test_what_stands_behind_a_sequence_does_not_matter(monkeypatch, lens, bad):
    """The last block of keys reads past the end, where values may be NaN."""
    interpreted(monkeypatch, 'attn')
    tensors = given(length=70 if lens is None else 90, batch=1 if lens else 2)
    cu_seqlens = None if lens is None else torch.tensor(lens)
    spoiled = {name: x.clone() for name, x in tensors.items()}
    for x in spoiled.values():
        (x[1:] if lens is None else x[:, 70:]).fill_(bad)
    clean, found = (
        results(None, x, False, AttentionTileLang().parallel_attn, cu_seqlens=cu_seqlens)['o'][:1, :70]
        for x in (tensors, spoiled)
    )
    assert clean.isfinite().all()
    assert torch.equal(clean, found)


@pytest.mark.interpreted
def test_bad_lengths_stay_within_the_tensors(monkeypatch):
    """The interpreter raises for a store out of bounds."""
    launch = interpreted(monkeypatch, 'attn')
    q, k, v = given(length=140, **ONE_HEAD).values()
    for lens in ([0, 130, 20, 140], [-5, 10, 150], [0, 300, 600], [200, 300]):
        launch.attention_forward(q, k, v, torch.tensor(lens), 1.0, 0)


@pytest.mark.interpreted
def test_strides_and_broadcasts(monkeypatch):
    interpreted(monkeypatch, 'attn')
    method = AttentionTileLang().parallel_attn
    tensors = given(length=20)
    tensors['k'] = tensors['k'][:1].expand_as(tensors['k'])
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in tensors.items()}
    first, second = (results(None, x, reference=method) for x in (tensors, strided))
    check_results(first, tensors)
    assert all(torch.equal(x, second[name]) for name, x in first.items())


@pytest.mark.interpreted
def test_operator(monkeypatch):
    """PyTorch's checks of schema, fake results, gradients under tracing and dynamic shapes."""
    launch = interpreted(monkeypatch, 'attn')
    q, k, v = (x.requires_grad_() for x in given(length=9, batch=1).values())
    torch.library.opcheck(launch.kernel.op, (q, k, v, None, None, None, 0.3, 4))


KERNELS = {
    'plain': (128, 'bfloat16', 'int32', False, False),
    'window': (64, 'bfloat16', 'int32', False, True),
    'packed': (64, 'float16', 'int32', True, False),
    'packed, window': (128, 'float16', 'int64', True, True),
}


@pytest.mark.tilelang
@pytest.mark.slow
@pytest.mark.parametrize('name', KERNELS)
def test_compiles_for_hopper(name):
    if why := no_compiler():
        pytest.skip(why)
    from fla.ops.attn.backends.tilelang.kernels import forward
    from fla.ops.launch.tilelang_call import compiled_for_hopper

    source = compiled_for_hopper(forward(*KERNELS[name])).get_kernel_source()
    # the copy of values must be complete before zeros are written over them
    zeros, product = source.index('if (keys < '), source.index('wgmma_rs')
    assert 'V_s' in source[zeros:product]
    assert '.wait(' not in source[zeros:product]
