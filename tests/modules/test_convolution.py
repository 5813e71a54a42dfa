"""causal_conv1d, causal_conv1d_update, ShortConvolution."""

import itertools

import pytest
import torch

from fla.backends import trace
from fla.modules import ShortConvolution
from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
from tests import bounds
from tests.tables import table

from .convolution import convolved
from .oracle import DTYPES, check, error, served_by, tensor


def oracle(x, weight, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None, **_):
    """Step by step, sequence by sequence; the final state too."""
    width = weight.shape[1]
    if cu_seqlens is None:
        pieces = list(x)
    else:
        ends = cu_seqlens.tolist()
        pieces = [x[0, a:b] for a, b in itertools.pairwise(ends)]
    ys, states = [], []
    for n, piece in enumerate(pieces):
        window = list(x.new_zeros(width, x.shape[2])) if initial_state is None else list(initial_state[n].T)
        for step in piece:
            window = [*window[1:], step]
            y = sum(weight[:, w] * window[w] for w in range(width))
            y = y if bias is None else y + bias
            ys.append(y if activation is None else y / (1 + torch.exp(-y)))
        states.append(torch.stack(window, 1))
    y = torch.stack(ys).reshape(x.shape)
    return y if residual is None else y + residual, torch.stack(states)


CU = torch.tensor([0, 0, 1, 4, 11, 11])


@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
def test_two_definitions(packed):
    shape, count = ((1, 11, 3), 5) if packed else ((2, 7, 3), 2)
    x, weight, bias, residual, state = (tensor(*one) for one in (shape, (3, 4), (3,), shape, (count, 3, 4)))
    options = {'activation': 'silu', 'cu_seqlens': CU if packed else None}
    for given in ((x, weight, bias, residual, state), (x, weight)):
        for a, b in zip(oracle(*given, **options), convolved(*given, **options), strict=True):
            assert bounds.relative_rms(a, b) <= bounds.TWO_ORACLES


@served_by('reference')
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
@pytest.mark.parametrize('width', [1, 2, 4])
def test_against_the_formula(dtype, packed, width):
    batch, length, count = (1, 11, 5) if packed else (2, 7, 2)
    shapes = {
        'x': (batch, length, 3),
        'weight': (3, width),
        'bias': (3,),
        'residual': (batch, length, 3),
        'initial_state': (count, 3, width),
    }
    arguments = {name: tensor(*shape, dtype=dtype) for name, shape in shapes.items()}
    if width == 1:
        del arguments['initial_state']  # unused without steps, so it has no gradient
    options = {'activation': 'silu', 'cu_seqlens': CU if packed else None, 'output_final_state': True}
    y, final = check(causal_conv1d, oracle, arguments, bounds.of_module(dtype), **options)
    assert y.dtype == final.dtype == dtype
    assert y.is_contiguous()


@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
def test_narrow_gradients_are_rounded_once(packed):
    """Not after each tap."""
    x, weight = tensor(1, 64, 32, dtype=torch.bfloat16).requires_grad_(), tensor(32, 4, dtype=torch.bfloat16)
    options = {'cu_seqlens': torch.tensor([0, 64])} if packed else {}
    y, _ = causal_conv1d(x, weight, **options)
    do = tensor(*y.shape, dtype=torch.bfloat16)
    (dx,) = torch.autograd.grad(y, x, do)
    wide = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(oracle(wide, weight.double())[0], wide, do.double())
    rounded = bounds.relative_rms(exact, exact.bfloat16().double())
    assert bounds.relative_rms(exact, dx) < 1.05 * rounded


@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
@pytest.mark.parametrize('length', [0, 1, 3, 5])
def test_without_a_state_and_shorter_than_the_filter(packed, length):
    x, weight = tensor(1, length, 3), tensor(3, 4)
    cu = torch.tensor([0, length]) if packed else None
    y, final = causal_conv1d(x, weight, output_final_state=True, cu_seqlens=cu)
    if length:
        expected_y, expected = oracle(x, weight, cu_seqlens=cu)
        assert error(expected_y, y) <= bounds.TWO_ORACLES
        assert error(expected, final) <= bounds.TWO_ORACLES
    else:
        assert y.shape == (1, 0, 3)
        assert torch.equal(final, torch.zeros(1, 3, 4))
    assert causal_conv1d(x, weight, cu_seqlens=cu)[1] is None


@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
def test_nothing_at_all(packed):
    x = torch.zeros(1 if packed else 0, 0, 3)
    y, final = causal_conv1d(
        x, torch.ones(3, 4), output_final_state=True, cu_seqlens=torch.zeros(1, dtype=torch.int32) if packed else None
    )
    assert y.shape == x.shape
    assert final.shape == (0, 3, 4)


def test_packed_sequences_are_sequences():
    x, weight, state = tensor(1, 11, 3, dtype=torch.float32), tensor(3, 4, dtype=torch.float32), tensor(5, 3, 4).float()
    y, final = causal_conv1d(x, weight, None, None, state, True, 'swish', CU.int())
    for n, (a, b) in enumerate(itertools.pairwise(CU.tolist())):
        one, last = causal_conv1d(x[:, a:b], weight, None, None, state[n : n + 1], True, 'swish')
        assert a == b or error(one, y[:, a:b]) <= bounds.elementwise(torch.float32)
        assert torch.equal(last[0], final[n])


def test_bad_lengths_read_nothing_out_of_bounds(monkeypatch):
    import fla.ops.checks as checks

    monkeypatch.setattr(checks, 'readable', lambda lens: False)  # as for lengths on a device
    for lens in ([0, 99], [0, -3, 4], [5, 2, 6], [0, 9, 3, 6]):
        x, lens = tensor(1, 6, 3), torch.tensor(lens)
        y, final = causal_conv1d(x, tensor(3, 4), output_final_state=True, cu_seqlens=lens)
        assert y.isfinite().all()
        assert final.isfinite().all()


def test_strides_and_a_state_in_another_dtype():
    x, weight = tensor(3, 5, 2, dtype=torch.bfloat16).permute(2, 1, 0), tensor(4, 3).t()
    state = tensor(2, 4, 3, dtype=torch.float32).transpose(1, 2)
    y, final = causal_conv1d(x, weight, initial_state=state, output_final_state=True)
    expected, last = oracle(x.double(), weight.double(), initial_state=state.double())
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    assert error(expected, y) < bounds.of_module(torch.bfloat16)
    assert torch.equal(last.float(), final)


@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
def test_differentiable_twice(packed):
    x, weight, state = (tensor(*s, grad=True) for s in ((1, 4, 2), (2, 3), (2 if packed else 1, 2, 3)))
    cu = torch.tensor([0, 1, 4]) if packed else None

    def call(x, weight, state):
        return causal_conv1d(x, weight, None, None, state, True, 'silu', cu)

    assert torch.autograd.gradgradcheck(call, (x, weight, state))


@served_by('reference')
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('layout', ['n', 'batch', 'packed'])
def test_update_is_one_step(dtype, layout):
    x, cache = tensor(3, 1, 5, dtype=dtype), tensor(3, 5, 4, dtype=dtype)
    weight, bias, residual = tensor(5, 4, dtype=dtype), tensor(5, dtype=dtype), tensor(3, 1, 5, dtype=dtype)
    expected, state = oracle(*(t.double() for t in (x, weight, bias, residual, cache)), activation='silu')
    shape = {'n': (3, 5), 'batch': (3, 1, 5), 'packed': (1, 3, 5)}[layout]
    y, after = causal_conv1d_update(x.reshape(shape), cache, residual.reshape(shape), weight, bias, 'silu')
    assert (y.shape, y.dtype) == (shape, dtype)
    assert after is cache
    assert error(expected.reshape(shape), y) <= bounds.of_module(dtype)
    assert torch.equal(state.to(dtype), cache)


@served_by('reference')
def test_layer():
    layer = ShortConvolution(6, 4, bias=True, activation='silu').double()
    assert {n: tuple(p.shape) for n, p in layer.state_dict().items()} == {'weight': (6, 1, 4), 'bias': (6,)}
    x = tensor(2, 9, 6)
    weight, bias = layer.weight[:, 0], layer.bias
    y, none = layer(x)
    assert none is None
    assert error(oracle(x, weight, bias, activation='silu')[0], y) <= bounds.TWO_ORACLES
    # in parts: several steps, one step, several steps
    state, pieces = None, []
    for a, b in ((0, 3), (3, 4), (4, 5), (5, 9)):
        before = state
        piece, state = layer(x[:, a:b], cache=state, output_final_state=True)
        assert (state is before) == (b - a == 1)
        pieces.append(piece)
    assert error(y, torch.cat(pieces, 1)) <= bounds.TWO_ORACLES
    assert error(oracle(x, weight, bias)[1], state) <= bounds.TWO_ORACLES

    # padding counts as zero, whatever values it has
    padded = x.detach().clone()
    padded[0, 0], padded[0, 1] = float('nan'), float('inf')
    mask = torch.ones(2, 9)
    mask[0, :2] = 0
    for one in (mask, mask.bool(), 0.5 * mask):
        assert error(layer(x[:1, 2:])[0], layer(padded, mask=one)[0][:1, 2:]) <= bounds.TWO_ORACLES
    assert torch.equal(layer(x.reshape(1, 18, 6), cu_seqlens=torch.tensor([0, 9, 18]))[0].reshape(2, 9, 6), y)


@pytest.mark.parametrize('grad', [False, True], ids=['no grad', 'grad'])
@pytest.mark.parametrize('lens', [(1, 1, 1), (2, 0, 1)], ids=str)
@pytest.mark.parametrize('output', [False, True])
def test_packed_sequences_leave_the_cache(output, lens, grad):
    """Also where there are as many steps as sequences: lengths are on the device, and it may be the prefix of many batches,
    or learnt."""
    layer, cu = ShortConvolution(6, 4, backend='cuda').double(), torch.tensor([0, *lens]).cumsum(0)
    cache, x = tensor(3, 6, 4, grad=grad), tensor(1, 3, 6)
    before = cache.detach().clone()
    with torch.set_grad_enabled(grad):
        y, after = layer(x, cache=cache, output_final_state=output, cu_seqlens=cu)
        expected, state = oracle(x, layer.weight[:, 0], None, None, cache, 'silu', cu)
    assert error(expected, y) <= bounds.TWO_ORACLES
    assert (after is not None) == output
    assert not output or error(state, after) <= bounds.TWO_ORACLES
    assert torch.equal(cache, before)
    if grad:
        (wanted,), (got,) = torch.autograd.grad(expected.sum(), cache), torch.autograd.grad(y.sum(), cache)
        assert error(wanted, got) <= bounds.of_module(torch.float64)


@pytest.mark.parametrize('grad', [False, True], ids=['no grad', 'grad'])
def test_a_learnt_state_is_not_written(grad):
    """One step updates a cache in place, but never a parameter, with or without gradients."""
    layer, x, learnt = ShortConvolution(6, 4).double(), tensor(3, 1, 6), torch.nn.Parameter(tensor(3, 6, 4))
    before = learnt.detach().clone()
    with torch.set_grad_enabled(grad):
        y, after = layer(x, cache=learnt, output_final_state=True)
        expected, state = oracle(x, layer.weight[:, 0], None, None, learnt, 'silu')
    assert torch.equal(learnt, before)
    assert error(expected, y) <= bounds.TWO_ORACLES
    assert error(state, after) <= bounds.TWO_ORACLES
    if grad:
        assert torch.autograd.grad(y.sum(), learnt)[0].any()
    compiled = torch.compile(lambda x, cache: layer(x, cache=cache)[0], fullgraph=True, backend='aot_eager')
    assert error(expected, compiled(x, learnt)) <= bounds.TWO_ORACLES
    assert torch.equal(learnt, before)


@pytest.mark.pairwise
@pytest.mark.parametrize('compiled', [False, True], ids=['eager', 'compiled'])
@pytest.mark.parametrize('grad', [False, True], ids=['no grad', 'grad'])
@pytest.mark.parametrize(
    ('learnt', 'rows', 'stored', 'view'),
    [
        # one row of a tensor that is no parameter is an ordinary cache
        pytest.param(False, 3, (1, 6, 4), lambda state, rows: state.expand(rows, 6, 4), id='not learnt'),
        *(
            pytest.param(True, rows, stored, view, id=f'{name}, {rows}')
            for rows in (1, 3)
            for name, stored, view in (
                ('expanded', (1, 6, 4), lambda state, rows: state.expand(rows, 6, 4)),
                ('row', (6, 4), lambda state, rows: state[None].expand(rows, 6, 4)),
                ('transposed', (1, 4, 6), lambda state, rows: state.mT.expand(rows, 6, 4)),
                ('part', (3, 6, 4), lambda state, rows: state[:rows]),
            )
        ),
    ],
)
def test_an_initial_state_of_a_batch_is_not_written(learnt, stored, view, rows, grad, compiled):
    """Also for one row: a parameter is not modified, and a step gives the same as in a longer call."""
    layer, x = ShortConvolution(6, 4).double(), tensor(rows, 1, 6)
    state = torch.nn.Parameter(tensor(*stored), requires_grad=learnt)
    before = state.detach().clone()

    def step(x, state):
        return layer(x, cache=view(state, rows), output_final_state=True)

    with torch.set_grad_enabled(grad), trace() as recorded:
        y, after = step(x, state)
        expected, final = oracle(x, layer.weight[:, 0], None, None, view(state, rows), 'silu')
        if compiled:
            torch._dynamo.reset()  # each case is another variant
            y, after = torch.compile(step, fullgraph=True, backend='aot_eager')(x, state)
    assert recorded.last_backend('modules.causal_conv1d') == 'reference'
    assert torch.equal(state, before)
    assert error(expected, y) <= bounds.TWO_ORACLES
    assert error(final, after) <= bounds.TWO_ORACLES
    if grad and learnt:
        (wanted,), (got,) = (torch.autograd.grad(one.sum(), state) for one in (expected, y))
        assert error(wanted, got) <= bounds.of_module(torch.float64)


def test_a_cache_made_in_inference_mode():
    """A cache made in inference mode can also be stepped outside of it, without gradients."""
    layer, x = ShortConvolution(6, 4).double(), tensor(3, 1, 6)
    with torch.inference_mode():
        cache = tensor(3, 6, 4)
    before = cache.clone()
    with torch.no_grad():
        y, after = layer(x, cache=cache, output_final_state=True)
    expected, state = oracle(x, layer.weight[:, 0], None, None, before, 'silu')
    assert after is cache
    assert error(expected, y) <= bounds.TWO_ORACLES
    assert error(state, cache) <= bounds.TWO_ORACLES


@table(
    ('call', 'kind', 'message'),
    [
        (lambda x, w: causal_conv1d(x[0], w), ValueError, r'x must be \[B, T, D\]'),
        (lambda x, w: causal_conv1d(x.long(), w), TypeError, 'x must be float16'),
        (lambda x, w: causal_conv1d(x, w[:, None]), ValueError, r'weight must be \[D, W\]'),
        (lambda x, w: causal_conv1d(x, w[:2]), ValueError, r'weight must be \[D, W\] = \[3, 4\], got \[2, 4\]'),
        (lambda x, w: causal_conv1d(x, w, bias=w), ValueError, r'bias must be \[D\]'),
        (lambda x, w: causal_conv1d(x, w, residual=x[:1]), ValueError, 'residual must be shaped like x'),
        (lambda x, w: causal_conv1d(x, w, activation='gelu'), ValueError, "activation must be one of .* got 'gelu'"),
        (lambda x, w: causal_conv1d(x, w, initial_state=w[None]), ValueError, r'initial_state must be \[N, D, W\] = \[2'),
        (lambda x, w: causal_conv1d(x, w, cu_seqlens=torch.tensor([0, 5])), ValueError, 'batch must be 1'),
        (lambda x, w: causal_conv1d(x[:1], w, cu_seqlens=torch.tensor([0, 4])), ValueError, 'end at T = 5'),
        (lambda x, w: causal_conv1d(x[:1], w, cu_seqlens=torch.tensor([0.0, 5.0])), TypeError, 'cu_seqlens must be int32'),
        (lambda x, w: causal_conv1d(x[:1], w, cu_seqlens=torch.tensor([0])), ValueError, 'cu_seqlens holds no sequence'),
        (lambda x, w: causal_conv1d_update(x[:, 0], x), TypeError, "argument 'weight' must be a tensor, got None"),
        (
            lambda x, w: causal_conv1d(x[:1].to('meta'), w.to('meta'), cu_seqlens=torch.tensor([0, 5])),
            ValueError,
            "'cu_seqlens' is on cpu and 'x' on meta",
        ),
        (lambda x, w: causal_conv1d_update(x, x, weight=w), ValueError, 'x must be one step'),
        (lambda x, w: causal_conv1d_update(x[:, 0], x, weight=w), ValueError, r'cache must be \[N, D, W\] = \[2, 3, 4\]'),
        (lambda x, w: causal_conv1d_update(x[:, 0], w.expand(2, 3, 4), weight=w), ValueError, 'share memory'),
        (
            lambda x, w: causal_conv1d_update(x[:, 0], x.as_strided((2, 3, 4), (6, 2, 1)), weight=w),
            ValueError,
            'cache is writ',
        ),
        (lambda x, w: ShortConvolution(3, 4, activation='tanh'), ValueError, 'activation must be one of'),
        (lambda x, w: ShortConvolution(3, 0), ValueError, 'kernel_size must be at least 1, got 0'),
        (lambda x, w: ShortConvolution(0, 4), ValueError, 'hidden_size must be at least 1, got 0'),
        (lambda x, w: ShortConvolution(3, 4.0), TypeError, 'kernel_size must be an int, got float'),
        (lambda x, w: ShortConvolution(3, 4)(x, mask=[1]), TypeError, "'mask' must be a tensor, got list"),
        (lambda x, w: ShortConvolution(3, 4)(x, cache=[1]), TypeError, "'cache' must be a tensor, got list"),
        (lambda x, w: ShortConvolution(3, 4)([1]), TypeError, "'x' must be a tensor, got list"),
        (lambda x, w: ShortConvolution(3, 4)(x[0, 0]), ValueError, r'x must be \[B, T, D\] with D = 3, got shape \[3\]'),
        (lambda x, w: ShortConvolution(2, 4)(x), ValueError, r'x must be \[B, T, D\] with D = 2, got shape \[2, 5, 3\]'),
        *(
            (
                lambda x, w, T=T, change=change: ShortConvolution(3, 4)(x[:, :T], cache=change(x.new_ones(2, 3, 4))),
                kind,
                message,
            )
            for T in (1, 5)
            for change, kind, message in (
                (lambda cache: cache.to('meta'), ValueError, "'cache' is on meta and 'x' on cpu"),
                (lambda cache: cache[:1], ValueError, r'cache must be \[N, D, W\] = \[2, 3, 4\], got \[1, 3, 4\]'),
                (lambda cache: cache[..., 1:], ValueError, r'cache must be \[N, D, W\] = \[2, 3, 4\], got \[2, 3, 3\]'),
                (lambda cache: cache.int(), TypeError, 'cache must be float16'),
                (lambda cache: cache.to_sparse(), TypeError, "'cache' must be a dense tensor"),
            )
        ),
        (
            lambda x, w: ShortConvolution(3, 4)(x[:1], cache=w[None], cu_seqlens=torch.tensor([0, 2, 5])),
            ValueError,
            r'cache must be \[N, D, W\] = \[2, 3, 4\], got \[1, 3, 4\]',
        ),
        (lambda x, w: ShortConvolution(3, 4, backend='cudnn'), ValueError, 'backend must be one of'),
        (lambda x, w: ShortConvolution(3, 4)(x, mask=x), ValueError, r'mask must be \[B, T\]'),
        (
            lambda x, w: ShortConvolution(3, 4)(x, mask=x[..., 0].abs() - 9),
            ValueError,
            'mask must be 1 .*, got negative numbers',
        ),
        (
            lambda x, w: ShortConvolution(3, 4)(x, mask=x[..., 0].cfloat()),
            TypeError,
            'mask must be bool, .* got torch.complex64',
        ),
        (
            lambda x, w: ShortConvolution(3, 4)(x[:1], mask=x[:1, :, 0], cu_seqlens=torch.tensor([0, 5])),
            ValueError,
            'mask is for padded batches',
        ),
    ],
)
def test_bad_calls(call, kind, message):
    with pytest.raises(kind, match=message):
        call(torch.randn(2, 5, 3), torch.randn(3, 4))


def test_a_bad_call_leaves_the_cache_alone():
    cache = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match='bias'):
        causal_conv1d_update(torch.ones(2, 3), cache, weight=torch.ones(3, 4), bias=torch.ones(2))
    assert not cache.any()
