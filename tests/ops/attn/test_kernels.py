"""The Triton kernels of attention under the interpreter, forward and backward, against the formula in float64."""

import pytest
import torch

pytest.importorskip('triton')
from fla.backends import trace
from fla.ops.attn import autograd, parallel_attn
from fla.ops.attn.kernels.launch import attention_backward, attention_forward
from fla.ops.attn.naive import naive_parallel_attn
from tests import bounds
from tests.ops.attn.attention import BF16, FP16, FP32, check, check_apart, exact, inputs, results, upstream
from tests.ops.delta_rules import apart

pytestmark = pytest.mark.interpreted

EVERYTHING = ('g', 'sink_bias')
CU = torch.tensor([0, 0, 1, 40, 40, 70, 70])


CASES = {
    'grouped': ((), {'length': 40, 'heads': 3, 'kv_heads': 1, 'dim': 20, 'value_dim': 36}, {'scale': 0.3}),
    'negative scale': (('g',), {'length': 40, 'heads': 1, 'kv_heads': 1}, {'scale': -2.0}),
    'scale of 0': ((), {'length': 40, 'heads': 1, 'kv_heads': 1}, {'scale': 0}),
    'short window': ((), {'length': 140, 'heads': 1, 'kv_heads': 1, 'batch': 1}, {'window_size': 20}),
    'long window': ((), {'length': 140, 'heads': 1, 'kv_heads': 1, 'batch': 1}, {'window_size': 100}),
    'cached': ((), {'length': 140, 'queries': 40, 'heads': 1, 'kv_heads': 1}, {}),
    'one query': ((), {'length': 100, 'queries': 1, 'heads': 2}, {}),
    'few queries': (('sink_bias',), {'length': 100, 'queries': 5, 'heads': 2}, {'window_size': 37}),
    'everything': (EVERYTHING, {'length': 70, 'heads': 2, 'kv_heads': 1, 'batch': 1}, {'window_size': 37}),
    'packed': (EVERYTHING, {'length': 70, 'batch': 1, 'heads': 2, 'kv_heads': 1}, {'cu_seqlens': CU}),
    'packed, window': (
        *((), {'length': 70, 'batch': 1, 'heads': 2}),
        {'cu_seqlens': apart(CU.int()), 'window_size': 9},
    ),
}


@pytest.mark.parametrize('case', CASES)
def test_against_the_formula(case):
    names, shapes, options = CASES[case]
    check('default', inputs(*names, dtype=FP32, **shapes), **options)


@pytest.mark.pairwise
@pytest.mark.parametrize('dtype', [BF16, FP16], ids=['bf16', 'fp16'])
@pytest.mark.parametrize('case', ['grouped', 'long window', 'everything', 'packed'])
def test_half_precision(case, dtype):
    names, shapes, options = CASES[case]
    check('default', inputs(*names, dtype=dtype, **shapes), **options)


@pytest.mark.parametrize(('dim', 'value_dim'), [(128, 128), (256, 96), (1, 5), (100, 256)])
@pytest.mark.parametrize('dtype', [FP32, BF16], ids=['fp32', 'bf16'])
def test_sizes(dim, value_dim, dtype):
    check('default', inputs(dtype=dtype, batch=1, length=20, heads=1, kv_heads=1, dim=dim, value_dim=value_dim))


@pytest.mark.parametrize('strength', [1e-4, 20.0, 1000.0])
def test_decays(strength):
    """The last digits of weak decays are not lost in the sums, also after a strong decay."""
    given = inputs('g', dtype=FP32, batch=1, length=50, heads=1, kv_heads=1, strength=strength)
    check('default', given)
    given['g'][:, 5:40] *= 1e-3
    check('default', given)
    given['g'][0, 20] = -torch.inf
    check('default', given)


def test_sinks_that_are_not_there():
    given = inputs('sink_bias', dtype=FP32)
    given['sink_bias'].fill_(-torch.inf)
    with_sinks = results('default', given)
    del given['sink_bias']
    without = results('default', given)
    assert all(torch.equal(x, with_sinks[name]) for name, x in without.items())
    assert with_sinks['dsink_bias'].eq(0).all()


@pytest.mark.parametrize('length', [1, 16, 17, 33])
def test_lengths(length):
    check('default', inputs('g', 'sink_bias', dtype=FP32, batch=1, length=length, heads=1, kv_heads=1))


def test_half_companions_strides_and_broadcasts():
    given = inputs('g', 'sink_bias', dtype=BF16, length=20)
    check('default', given)
    strided = {n: x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in given.items() if n != 'sink_bias'}
    strided['sink_bias'] = given['sink_bias'][:, None].expand(-1, 3)[:, 0]
    same = results('default', given)
    again = results('default', strided)
    assert all(torch.equal(x, again[name]) for name, x in same.items())
    given['k'] = given['k'][:1, :, :1].expand_as(given['k'])
    given['v'] = given['v'][:1].expand_as(given['v'])
    given['g'] = given['g'][:1, :, :1].expand_as(given['g'])
    check('default', given)


@pytest.mark.parametrize('dtype', [BF16, FP16], ids=['bf16', 'fp16'])
def test_companions_in_float32(dtype):
    given = inputs('g', 'sink_bias', dtype=dtype, length=20)
    given.update(g=given['g'].float(), sink_bias=given['sink_bias'].float())
    check('default', given)
    given['g'] = given['g'].to(dtype)  # dtypes differ
    check('default', given)


def test_laid_out_chunks_change_nothing():
    given = inputs('g', dtype=FP32, batch=1, length=70, heads=2, kv_heads=1)
    without = results('default', given, cu_seqlens=CU)
    found = results('default', given, cu_seqlens=CU, chunk_indices=torch.zeros(6, 2, dtype=torch.int32))
    assert all(torch.equal(x, without[name]) for name, x in found.items())


def test_scores_of_minus_infinity():
    """A whole block of keys that have decayed away has no weight."""
    given = inputs(dtype=BF16, batch=1, length=140, queries=10, heads=1, kv_heads=1)
    given['q'].abs_()
    given['k'][:, :70] = -3e38
    check('default', given, False)
    assert all(x.isfinite().all() for x in results('default', given).values())


def test_decays_beyond_the_strongest_have_no_gradient():
    given = inputs('g', dtype=FP32, batch=1, length=20, heads=1, kv_heads=1)
    given['g'][0, 7], given['g'][0, 9] = -1e6, -torch.inf
    dg = check('default', given)['dg']
    assert dg[0, [7, 9]].eq(0).all()
    assert dg[0, [6, 8]].ne(0).all()


@pytest.mark.parametrize('name', ['q', 'k', 'v', 'g'])
def test_what_is_no_number_stays_in_its_sequence(name):
    given = inputs('g', 'sink_bias', dtype=FP32, batch=1, length=70)
    given[name][0, 3] = torch.nan
    check_apart(results('default', given, cu_seqlens=CU))


def test_steps_far_apart():
    """Row strides above 2^31 / 127: offsets in a block of 128 rows overflow 32 bits. Little of the memory is touched."""
    given = inputs(dtype=BF16, batch=1, length=130, heads=1, kv_heads=1)
    same = results('default', given, False)
    step = 2**24 + 2**18
    given['q'] = torch.empty(130 * step, dtype=BF16).as_strided((1, 130, 1, 8), (0, step, 8, 1)).copy_(given['q'])
    assert torch.equal(same['o'], results('default', given, False)['o'])


def test_gradients_that_are_broadcast():
    given = {name: x.requires_grad_() for name, x in inputs(dtype=FP32).items()}
    parallel_attn.bind(backend='default')(**given).sum().backward()
    wide = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    naive_parallel_attn(**wide).sum().backward()
    for name, x in given.items():
        assert bounds.relative_rms(wide[name].grad, x.grad) <= bounds.EXACT[FP32], name


def test_bad_lengths_stay_within_the_tensors():
    """The interpreter raises for an access out of bounds."""
    given = inputs('g', 'sink_bias', dtype=FP32, batch=1, length=40, heads=1, kv_heads=1)
    for lens in ([0, 30, 20, 40], [-5, 10, 50], [0, 100, 200]):
        # without the check of values
        fresh = torch.tensor(lens)
        tensors = [given[name] for name in ('q', 'k', 'v', 'g', 'sink_bias')]
        o, lse = attention_forward(*tensors, fresh, 1.0, 0)
        attention_backward(*tensors, fresh, 1.0, 0, o, lse, torch.ones_like(o))


def test_no_steps():
    for shape in ((0, 4), (2, 0)):
        given = {'q': torch.zeros(*shape, 4, 8), 'k': torch.zeros(*shape, 2, 8), 'v': torch.zeros(*shape, 2, 6)}
        found = results('default', given)
        assert [tuple(x.shape) for x in found.values()] == [(*shape, 4, 6), *(tuple(x.shape) for x in given.values())]
    cached = inputs('sink_bias', dtype=FP32)
    cached['q'] = cached['q'][:, :0]
    found = results('default', cached)
    assert all(x.eq(0).all() for x in found.values())
    none = {name: torch.zeros(1, 0, 2, 8) for name in ('q', 'k', 'v')}
    for lens in ([0], [0, 0]):
        assert results('default', none, cu_seqlens=torch.tensor(lens))['o'].shape == (1, 0, 2, 8)


def test_same_bits_twice_and_the_road_of_compiled_code():
    given = inputs('g', 'sink_bias', dtype=BF16, length=20)
    first, second = results('default', given), results('default', given)
    assert all(torch.equal(x, second[name]) for name, x in first.items())
    bound = parallel_attn.bind(backend='default')
    compiled = torch.compile(lambda *a: bound(*a[:4], sink_bias=a[4]), fullgraph=True, backend='aot_eager')
    leaves = [x.requires_grad_() for x in given.values()]
    with trace() as recorded:
        o = compiled(*leaves)
    assert recorded.last_backend('attn.parallel_attn') == 'default'
    assert torch.equal(o, first['o'])
    got = torch.autograd.grad(o, leaves, upstream(o))
    assert all(torch.equal(x, first[f'd{name}']) for name, x in zip(given, got, strict=True))


def test_operator():
    """PyTorch's checks of schema, fake results, gradients under tracing and dynamic shapes; and an exported program."""
    q, k, v, g, sink = (
        x.requires_grad_() for x in inputs('g', 'sink_bias', dtype=FP32, length=9, batch=1, heads=2).values()
    )
    torch.library.opcheck(autograd._attention.op, (q, k, v, g, sink, None, 0.3, 4))

    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return parallel_attn.bind(backend='default')(q, k, v, window_size=3)

    tensors = [x.detach() for x in (q, k, v)]
    exported = torch.export.export(Attention(), tuple(tensors))
    assert 'fla.parallel_attn.default' in {str(node.target) for node in exported.graph.nodes}
    assert torch.equal(exported.module()(*tensors), Attention()(*tensors))
    lens = torch.tensor([0, 4, 9], dtype=torch.int32)
    torch.library.opcheck(autograd._attention.op, (q, k, v, g, sink, lens, 0.3, 0))


def test_second_derivatives_are_refused():
    given = {name: x.requires_grad_() for name, x in inputs(dtype=FP32).items()}
    o = parallel_attn.bind(backend='default')(**given)
    with pytest.raises(RuntimeError, match='create_graph=True reached the backward of fla::parallel_attn'):
        torch.autograd.grad(o.sum(), given['q'], create_graph=True)


def test_autocast_leaves_it_alone():
    given = inputs(dtype=FP32)
    with torch.autocast('cpu', BF16):
        found = results('default', given)
    wanted = exact(given)
    assert bounds.relative_rms(wanted['o'], found['o']) <= bounds.EXACT[FP32]
