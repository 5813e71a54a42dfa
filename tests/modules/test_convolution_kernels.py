"""The Triton kernels of the short convolution, interpreted and compiled."""

import pytest
import torch

pytest.importorskip('triton')
from fla.backends import trace
from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
from fla.modules.kernels import convolution_backward, convolution_forward, convolution_step
from fla.modules.kernels.convolution_backward import launch_backward
from fla.modules.kernels.convolution_forward import launch_forward
from fla.modules.kernels.convolution_step import launch_update
from tests import bounds
from tests.triton_support.compile_only import compile_only

from .convolution import UPDATES, check_update
from .oracle import WEIGHTS, served_by, tensor
from .test_convolution import oracle

KERNEL_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def on_triton(function, *args, **options):
    with trace() as recorded:
        result = function(*args, **options)
    assert recorded.last_backend(f'modules.{function.__name__}') == 'default'
    return result


def against_the_formula(arguments, bounds_of, **options):
    """Checks y, the final state and all gradients of one loss of both results."""
    results = []
    for call, wide in ((causal_conv1d, False), (oracle, True)):
        given = {n: (t.detach().double() if wide else t.detach()).requires_grad_() for n, t in arguments.items()}
        out = call(**given, **options) if wide else on_triton(call, **given, **options)
        out = [one for one in out if one is not None][: 2 if options['output_final_state'] else 1]
        weights = [tensor(*one.shape, seed=WEIGHTS + i) for i, one in enumerate(out)]
        loss = sum((one.double() * weight).sum() for one, weight in zip(out, weights, strict=True))
        results.append((out, torch.autograd.grad(loss, list(given.values()), allow_unused=True)))
    (got, got_grads), (expected, expected_grads) = results
    for a, b in zip(expected, got, strict=True):
        assert bounds.relative_rms(a.detach(), b.detach()) <= bounds_of(b.dtype)
    for name, a, b in zip(arguments, expected_grads, got_grads, strict=True):
        assert b.dtype == arguments[name].dtype
        if a is None:
            assert not b.any()
        else:
            assert bounds.relative_rms(a, b) <= bounds_of(b.dtype), name
    return got


def bound(dtype):
    return bounds.of_convolution(dtype)


def tensors(batch, length, channels, width, count, dtype, *, every=True):
    shapes = {'x': (batch, length, channels), 'weight': (channels, width)}
    if every:
        shapes |= {
            'bias': (channels,),
            'residual': (batch, length, channels),
            'initial_state': (count, channels, width),
        }
    return {name: tensor(*shape, dtype=dtype) for name, shape in shapes.items()}


@pytest.mark.pairwise
@pytest.mark.interpreted
@pytest.mark.parametrize(
    ('width', 'dtype'), [*((w, torch.float32) for w in (1, 2, 3, 4, 8)), (4, torch.bfloat16), (4, torch.float16)], ids=str
)
@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
def test_everything(packed, width, dtype):
    cu = torch.tensor([0, 0, 1, 4, 37, 39, 50, 50]) if packed else None
    batch, length, count = (1, 50, 7) if packed else (2, 40, 2)  # two tiles of the backward
    arguments = tensors(batch, length, 5, width, count, dtype)
    y, final = against_the_formula(arguments, bound, activation='silu', cu_seqlens=cu, output_final_state=True)
    assert y.dtype == final.dtype == dtype
    assert y.is_contiguous()


@pytest.mark.interpreted
@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
def test_many_tiles(monkeypatch, packed):
    """The longer tiles for many numbers, forward and backward."""
    monkeypatch.setattr(convolution_backward, 'MANY_NUMBERS', 0)
    monkeypatch.setattr(convolution_forward, 'MANY_NUMBERS', 0)
    cu = torch.tensor([0, 0, 1, 4, 140, 270, 270]) if packed else None
    arguments = tensors(1, 270, 5, 4, 6 if packed else 1, torch.float32)
    against_the_formula(arguments, bound, activation='silu', cu_seqlens=cu, output_final_state=True)


@pytest.mark.pairwise
@pytest.mark.interpreted
@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
@pytest.mark.parametrize('activation', [None, 'swish'])
@pytest.mark.parametrize('length', [1, 3, 33])
def test_little(packed, activation, length):
    cu = torch.tensor([0, length], dtype=torch.int32) if packed else None
    for every, output_final_state in ((False, False), (False, True), (True, False)):
        arguments = tensors(1, length, 3, 4, 1, torch.float32, every=every)
        options = {'activation': activation, 'cu_seqlens': cu, 'output_final_state': output_final_state}
        against_the_formula(arguments, bound, **options)


@pytest.mark.interpreted
@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
def test_many_sequences_and_channels(packed):
    cu = torch.arange(0, 31, 2) if packed else None
    arguments = tensors(1 if packed else 2, 30, 70, 4, 15 if packed else 2, torch.bfloat16)
    against_the_formula(arguments, bound, activation='silu', cu_seqlens=cu, output_final_state=True)


@pytest.mark.interpreted
@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
def test_nothing(packed):
    cu = torch.zeros(3, dtype=torch.int64) if packed else None
    x, weight = torch.zeros(1 if packed else 2, 0, 3, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    state = torch.randn(2, 3, 4, requires_grad=True)
    y, final = on_triton(causal_conv1d, x, weight, None, None, state, True, 'silu', cu)
    assert y.shape == x.shape
    assert torch.equal(final, state)
    gradients = torch.autograd.grad((final * 2).sum() + y.sum(), (x, weight, state))
    assert gradients[0].shape == x.shape
    assert not gradients[1].any()
    assert (gradients[2] == 2).all()
    y, final = on_triton(causal_conv1d, torch.zeros(0, 5, 3), weight, output_final_state=True)
    assert (y.shape, final.shape) == ((0, 5, 3), (0, 3, 4))
    y, _ = on_triton(causal_conv1d, torch.zeros(2, 5, 0), weight[:0])
    assert y.shape == (2, 5, 0)


@pytest.mark.interpreted
@served_by('default')
def test_strides_broadcast_and_mixed_dtypes():
    weight, state = tensor(4, 3, dtype=torch.float32).t()[:, :4], tensor(2, 4, 3, dtype=torch.float32).transpose(1, 2)
    bias = tensor(6, dtype=torch.float32)[::2]
    dense = tensor(2, 9, 6, dtype=torch.bfloat16)
    for x in (
        dense[:, :, 1:4],
        dense[:, :, ::2],
        dense[:1, :, :3].expand(2, 9, 3),
        dense[:, :1, :3].expand(2, 9, 3),
        tensor(3, 9, 2, dtype=torch.bfloat16).permute(2, 1, 0),
    ):
        arguments = {'x': x, 'weight': weight, 'bias': bias, 'residual': x.float(), 'initial_state': state}
        y, final = on_triton(causal_conv1d, **arguments, output_final_state=True, activation='silu')
        assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
        wide = {name: one.double() for name, one in arguments.items()}
        expected, last = oracle(**wide, activation='silu')
        assert bounds.relative_rms(expected, y) <= bound(torch.bfloat16)
        assert torch.equal(last.float(), final)


@pytest.mark.interpreted
def test_broadcast_gradient():
    arguments = tensors(2, 40, 3, 4, 2, torch.float32)
    given = {name: one.requires_grad_() for name, one in arguments.items()}
    exact = {name: one.detach().double().requires_grad_() for name, one in arguments.items()}
    y, expected = on_triton(causal_conv1d, **given)[0], oracle(**exact)[0]
    for a, b in zip(
        torch.autograd.grad(expected.sum(), list(exact.values())),
        torch.autograd.grad(y.sum(), list(given.values())),
        strict=True,
    ):
        assert bounds.relative_rms(a, b) <= bound(torch.float32)


@pytest.mark.interpreted
@served_by('default')
def test_no_neighbour_is_seen():
    """Infinite values do not reach another sequence, in either direction."""
    cu, x = torch.tensor([0, 5, 9, 20]), torch.randn(1, 20, 3)
    x[0, 5:9] = float('inf')
    x.requires_grad_()
    weight = torch.randn(3, 4)
    y, _ = on_triton(causal_conv1d, x, weight, cu_seqlens=cu, activation='silu')
    (dx,) = torch.autograd.grad(y[:, :5].sum() + y[:, 9:].sum(), x)
    others = [0, 1, 2, 3, 4, *range(9, 20)]
    assert y[:, others].isfinite().all()
    assert dx[:, others].isfinite().all()


@pytest.mark.interpreted
def test_bad_lengths_read_nothing_out_of_bounds(monkeypatch):
    import fla.ops.checks as checks

    monkeypatch.setattr(checks, 'readable', lambda lens: False)  # as for lengths on a device
    for lens in ([0, 99], [0, -3, 4], [5, 2, 6], [-9, -9, -9], [50, 60, 70]):
        x, lens = tensor(1, 6, 3, dtype=torch.float32).requires_grad_(), torch.tensor(lens)
        state = torch.randn(len(lens) - 1, 3, 4, requires_grad=True)
        y, final = on_triton(causal_conv1d, x, torch.randn(3, 4), None, None, state, True, 'silu', lens)
        dx, dstate = torch.autograd.grad(y.sum() + final.sum(), (x, state))
        for one in (y, final, dx, dstate):
            assert one.isfinite().all()


@pytest.mark.interpreted
def test_a_last_state_is_of_its_sequence(monkeypatch):
    """Also with padding after the last sequence."""
    import fla.ops.checks as checks

    monkeypatch.setattr(checks, 'readable', lambda lens: False)  # as for lengths on a device
    x = tensor(1, 40, 3, dtype=torch.float32).requires_grad_()
    _, final = on_triton(causal_conv1d, x, torch.randn(3, 4), None, None, None, True, 'silu', torch.tensor([0, 2, 35]))
    (dx,) = torch.autograd.grad(final.sum(), x)
    assert dx[0, :, 0].nonzero().flatten().tolist() == [0, 1, 31, 32, 33, 34]


@pytest.mark.interpreted
@pytest.mark.parametrize('dtype', KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(('layout', 'width'), [('n', 1), ('batch', 2), ('packed', 4), ('n', 7)])
def test_update(dtype, layout, width):
    x, residual = tensor(3, 1, 300, dtype=dtype), tensor(3, 1, 300, dtype=dtype)
    weight, bias = tensor(300, width, dtype=dtype), tensor(300, dtype=dtype)
    shape = {'n': (3, 300), 'batch': (3, 1, 300), 'packed': (1, 3, 300)}[layout]
    for cache in (
        tensor(3, 300, width, dtype=dtype),
        tensor(3, width, 300, dtype=torch.float32).transpose(1, 2),
        tensor(3, 2, 300, width + 2, dtype=dtype)[:, 1, :, 1 : 1 + width],
    ):
        expected, state = oracle(*(t.double() for t in (x, weight, bias, residual, cache)), activation='silu')
        with torch.no_grad():
            y, after = on_triton(
                causal_conv1d_update, x.reshape(shape), cache, residual.reshape(shape), weight, bias, 'silu'
            )
        assert (y.shape, y.dtype) == (shape, dtype)
        assert after is cache
        assert bounds.relative_rms(expected.reshape(shape), y) <= bound(dtype)
        assert torch.equal(state.to(cache.dtype), cache)


@pytest.mark.interpreted
@pytest.mark.parametrize('dtype', KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize('case', UPDATES)
def test_updates(case, dtype):
    check_update(case, 3, 20, dtype, 'cpu')


@pytest.mark.interpreted
@pytest.mark.parametrize(('count', 'channels'), [(1, 20), (3, 1), (1, 1)])
def test_updates_of_one(count, channels):
    check_update('everything', count, channels, torch.float32, 'cpu')


@pytest.mark.interpreted
@pytest.mark.parametrize('case', ['everything', 'eight taps', 'no residual', 'strided'])
def test_updates_of_many(monkeypatch, case):
    """A program takes several sequences, the last one fewer."""
    monkeypatch.setattr(convolution_step, 'MANY', 0)
    check_update(case, 6, 200, torch.bfloat16, 'cpu')


@pytest.mark.interpreted
@served_by('default')
def test_activation_far_from_zero():
    x = torch.tensor([-3e38, -1e4, -200.0, -100.0, -88.0, -20.0, 0.0, 20.0, 100.0, 1e4, 3e38])[None, :, None]
    y, _ = on_triton(causal_conv1d, x, torch.ones(1, 1), activation='silu')
    torch.testing.assert_close(y, torch.nn.functional.silu(x.double()).float(), rtol=1e-5, atol=1e-38)


@pytest.mark.interpreted
def test_strided_lengths():
    """Weights with strides are read without a copy."""
    every_second = torch.tensor([0, 9, 2, 9, 6, 9])[::2]
    arguments = tensors(1, 6, 3, 4, 2, torch.float32)
    against_the_formula(arguments, bound, activation=None, cu_seqlens=every_second, output_final_state=True)


@pytest.mark.interpreted
def test_who_serves():
    """Calls that the kernels do not take go to the reference."""
    x, cache, weight = torch.randn(2, 3), torch.zeros(2, 3, 4), torch.randn(3, 4)
    wide, wide_cache = torch.randn(3, 9), torch.zeros(2, 3, 9)
    for name, shape in (('weight', (3, 4)), ('bias', (3,)), ('residual', (2, 5, 3)), ('initial_state', (2, 3, 4))):
        arguments = {'x': torch.randn(2, 5, 3), 'weight': weight, name: torch.full(shape, 1 / 3, dtype=torch.float64)}
        with trace() as recorded:
            causal_conv1d(**arguments, output_final_state=True)
        assert recorded.last_backend('modules.causal_conv1d') == 'reference', name
    third = torch.full((2, 3, 4), 1 / 3, dtype=torch.float64)
    with trace() as recorded:
        causal_conv1d_update(x, third, None, weight)
    assert recorded.last_backend('modules.causal_conv1d_update') == 'reference'
    assert (third[..., :3] == 1 / 3).all()
    for arguments, served in (
        ((x, cache, None, weight), 'default'),
        ((x, cache, None, weight.clone().requires_grad_()), 'reference'),
        ((x.double(), cache, None, weight), 'reference'),
        ((x, wide_cache, None, wide), 'reference'),
    ):
        with trace() as recorded:
            causal_conv1d_update(*arguments)
        assert recorded.last_backend('modules.causal_conv1d_update') == served
    for width, dtype, served in (
        (8, torch.float32, 'default'),
        (9, torch.float32, 'reference'),
        (4, torch.float64, 'reference'),
    ):
        with trace() as recorded:
            causal_conv1d(torch.randn(1, 5, 3, dtype=dtype), torch.randn(3, width))
        assert recorded.last_backend('modules.causal_conv1d') == served


@pytest.mark.interpreted
@served_by('default')
def test_compiled():
    cu = torch.tensor([0, 3, 8])
    x, weight, state = torch.randn(1, 8, 3), torch.randn(3, 4), torch.randn(2, 3, 4)
    inputs = [one.requires_grad_() for one in (x, weight, state)]

    def call(x, weight, state):
        y, final = causal_conv1d(x * 2, weight, None, x, state, True, 'silu', cu)
        return y.square().sum() + final.sum()

    expected, got = call(*inputs), torch.compile(call, fullgraph=True, backend='aot_eager')(*inputs)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs))
    with pytest.raises(RuntimeError, match='create_graph=True reached the backward of fla::causal_conv1d'):
        torch.autograd.grad(call(*inputs), inputs, create_graph=True)

    def step(x, cache):
        return causal_conv1d_update(x, cache, None, weight.detach(), None, 'silu')[0]

    caches = [torch.ones(2, 3, 4), torch.ones(2, 3, 4)]
    now = torch.randn(2, 3)
    torch.testing.assert_close(
        torch.compile(step, fullgraph=True, backend='aot_eager')(now, caches[0]), step(now, caches[1])
    )
    assert torch.equal(*caches)


@pytest.mark.pairwise
@pytest.mark.triton
@pytest.mark.parametrize('capability', [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_compiles_in_float32(capability):
    x, weight = empty(2, 999, 1536, dtype=torch.float32), empty(1536, 4, dtype=torch.float32)
    with compile_only(capability) as compiled:
        launch_forward(x, weight, None, None, None, False, 'silu', None)
        launch_backward(x, weight, None, None, 'silu', None, x, None)
        launch_update(x[:, 0], empty(2, 1536, 4, dtype=torch.float32), None, weight, None, 'silu')
    print(*compiled, sep='\n')
    assert all(one.spilled <= 64 for one in compiled)


@pytest.mark.triton
@pytest.mark.parametrize('dtype', KERNEL_DTYPES, ids=str)
def test_a_step_moves_its_state_by_wide_accesses(dtype):
    """16 bytes at a time, without exchange between threads, unless a channel has more."""
    widths = [width for width in (2, 4, 8) if width * dtype.itemsize <= 16]
    with compile_only((9, 0)) as compiled:
        for width in widths:
            # a strided weight, so that only the state has wide accesses
            weight = empty(256, 2 * width, dtype=dtype)[:, :width]
            given = (empty(64, 256, width, dtype=dtype), None, weight, None, 'silu')
            launch_update(empty(64, 256, dtype=dtype), *given)
    assert len(compiled) == len(widths)
    for one in compiled:
        code = one.kernel.asm['ptx']
        assert one.shared == 0
        assert 'ld.global.v4.b32' in code
        assert 'st.global.v4.b32' in code


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device='meta')


@pytest.mark.triton
def test_compiles_without_steps():
    """The compiler also compiles branches that the interpreter does not reach."""
    with compile_only((9, 0)):
        for cu in (None, empty(3, dtype=torch.int32)):
            x, state = empty(2 if cu is None else 1, 0, 8), empty(2, 8, 3)
            launch_forward(x, empty(8, 3), None, None, state, True, 'silu', cu)
            launch_backward(x, empty(8, 3), None, state, 'silu', cu, x, state)


@pytest.mark.pairwise
@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize('capability', [(8, 0), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
def test_compiles(capability, packed):

    x, weight, cu = empty(1, 999, 1536), empty(1536, 4), empty(4, dtype=torch.int32) if packed else None
    state, bias = empty(3 if packed else 1, 1536, 4), empty(1536)
    with compile_only(capability) as compiled:
        for more in ((None, None), (bias, state)):
            launch_forward(x, weight, more[0], None, more[1], more[1] is not None, 'silu', cu)
            launch_backward(x, weight, *more, 'silu', cu, x, more[1])
        if not packed:
            launch_backward(x, empty(1536, 8), None, None, 'silu', cu, x, None)
        launch_update(x[:, 0], empty(1, 1536, 4), None, weight, None, 'silu')
    print(*compiled, sep='\n')
    assert all(one.spilled <= 64 for one in compiled)
