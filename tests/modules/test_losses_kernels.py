"""The Triton kernels of the cross entropies, interpreted and compiled."""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip('triton')
from fla.backends import trace
from fla.modules import FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss, ShortConvolution
from fla.modules.fused_cross_entropy import cross_entropy_loss
from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
from fla.modules.kernels import cross_entropy as kernels
from fla.modules.kernels import linear_cross_entropy as linear
from fla.modules.kernels.cross_entropy import Options, launch_backward, launch_forward, reduced, scaled
from tests import bounds
from tests.triton_support.compile_only import compile_only

from .losses import LINEAR, OPTIONS, check_linear, cut_finely, gradients, linear_oracle, oracle, targets
from .oracle import error, served_by, tensor
from .test_losses import check_ignored_rows, check_targets_that_are_none

KERNEL_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=['kept', 'cut'])
def logits_are(request, monkeypatch):
    """The logits of few rows are saved for the backward; those of many are cut into chunks."""
    if request.param == 'cut':
        cut_finely(monkeypatch)
    return request.param


def on_triton(function, *args, **options):
    with trace() as recorded:
        result = function(*args, **options)
    assert recorded.last_backend(f'modules.{function.__name__}') == 'default'
    return result


@pytest.mark.interpreted
@pytest.mark.parametrize('dtype', KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize('classes', [1, 37, 9001])
def test_cross_entropy(dtype, options, classes):
    options = {**options, 'lse_square_scale': 0.01}
    ignore_index = 0 if 'ignore_index' in options else -100
    logits, target = tensor(4, classes, dtype=dtype) * 3, targets(4, classes, [1], ignore_index)
    options['ignore_index'] = ignore_index
    given, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    losses, z_losses = on_triton(cross_entropy_loss, given, target, **options)
    expected, expected_z = oracle(exact, target, **options)
    assert losses.dtype == z_losses.dtype == torch.float32
    assert not z_losses.requires_grad
    assert error(expected, losses) <= bounds.EXACT[torch.float32]
    assert error(expected_z, z_losses) <= bounds.EXACT[torch.float32]
    weights = torch.linspace(1, 2, 4).double()
    (got,), (wanted,) = gradients(losses, weights, given), gradients(expected, weights, exact)
    assert (got.dtype, got.shape) == (dtype, logits.shape)
    # with one class only rounding error is left
    floor = float(weights.square().mean().sqrt()) * (bounds.ONE_CLASS if classes == 1 else 0)
    assert bounds.relative_rms(wanted, got, floor) <= bounds.of_reference(dtype)[0]
    assert not got[1].any()


@pytest.mark.interpreted
def test_large_logits():
    """The backward does not use the rounded log-sum-exp."""
    logits = (torch.randn(4, 50) * 10 - 3000).requires_grad_()
    target, exact = targets(4, 50), logits.detach().double().requires_grad_()
    losses, expected = on_triton(cross_entropy_loss, logits, target)[0], oracle(exact, target)[0]
    assert error(expected, losses) <= bounds.EXACT[torch.float32]
    weights = torch.ones(4).double()
    (got,), (wanted,) = gradients(losses, weights, logits), gradients(expected, weights, exact)
    assert error(wanted, got) <= bounds.EXACT[torch.float32]


@pytest.mark.interpreted
@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_what_is_left_of_one_class(smoothing):
    """The derivative of the cap is accurate where terms cancel, and where the cap is linear or flat."""
    sizes = torch.logspace(-5, 1.4, 60)
    logits, target = torch.cat([sizes, -sizes])[:, None].requires_grad_(), torch.zeros(120, dtype=torch.int64)
    exact = logits.detach().double().requires_grad_()
    for cap in (None, 3.0):
        options = {'label_smoothing': smoothing, 'logit_scale': 0.7, 'lse_square_scale': 1e-3, 'logit_softcapping': cap}
        losses, z_losses = on_triton(cross_entropy_loss, logits, target, **options)
        v = exact * 0.7 if cap is None else cap * (exact * 0.7 / cap).tanh()
        expected = 1e-3 * v[:, 0].square()
        (got,), (wanted,) = torch.autograd.grad(losses.sum(), logits), torch.autograd.grad(expected.sum(), exact)
        for a, b in ((expected, losses), (expected, z_losses), (wanted, got)):
            assert ((b - a) / a).abs().max() <= bounds.EXACT[torch.float32]


@pytest.mark.interpreted
def test_infinite_logits_and_targets_that_are_none():
    logits = torch.randn(3, 40)
    logits[0, 5:30] = -float('inf')
    logits[1] = logits[1].clamp(max=0) - 1e4
    expected = oracle(logits.double(), torch.tensor([3, 3, 3]))[0]
    losses, _ = launch_forward(logits, torch.tensor([3, 3, 40]), Options(0.0, 1.0, 0.0, 0.0, -100, 0, 40))[:2]
    assert error(expected[:2], losses[:2]) <= bounds.EXACT[torch.float32]
    assert losses[2].isnan()


def in_rows_of(stride, rows):
    """The memory next to the logits is not read."""
    logits = torch.full((len(rows), stride), float('nan'), dtype=rows.dtype)[:, : rows.shape[1]]
    return logits.copy_(rows)


@pytest.mark.pairwise
@pytest.mark.interpreted
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('few', [True, False], ids=['few', 'many'])
@pytest.mark.parametrize('aligned', [True, False], ids=['aligned', 'unaligned'])
@pytest.mark.parametrize(('tiles', 'more'), [(0, 5), (0, 300), (1, -16), (1, 0), (1, 1), (2, 0), (2, 144)])
def test_tiles(monkeypatch, dtype, few, aligned, tiles, more):
    """Rows that end within a tile or with it, and tiles or threads that hold only -inf."""
    monkeypatch.setattr(kernels, '_FEW_ROWS', 100 if few else 0)
    tile = 8192 if aligned and not few else 4096
    classes = tiles * tile + more
    stride = -(-classes // 16) * 16 + (16 if aligned else 17)
    none = -float('inf')
    logits = tensor(8, classes, dtype=torch.float32) * 3
    logits[1, : min(tile, classes - 1)] = none
    logits[2, :-1] = none
    logits[3, 1:] = none
    logits[4] = torch.linspace(-300, 80, classes)
    logits[5] = torch.linspace(80, -300, classes)
    logits[6] = none
    logits[6, classes // 2] = -3000.0
    logits[7, ::2] = none
    logits = in_rows_of(stride, logits.to(dtype))
    if tiles:
        k, threads, width, _ = kernels._forward_tile(logits, False)
        assert k * threads * width == tile
    target = logits.float().argmax(1)
    target[4:6] = classes // 3
    options, weights = Options(0.0, 1.0, 0.01, 0.0, -100, 0, classes), torch.linspace(1, 2, 8)
    exact = logits.double().requires_grad_()
    lse = exact.logsumexp(1)
    expected_z = 0.01 * lse**2
    expected = lse - exact[range(8), target] + expected_z
    losses, z_losses, maximum, log_sum = launch_forward(logits, target, options)
    assert error(expected, losses) <= bounds.EXACT[torch.float32]
    assert error(expected_z, z_losses) <= bounds.EXACT[torch.float32]
    assert torch.equal(maximum, logits.float().amax(1))
    (wanted,) = gradients(expected, weights.double(), exact)
    for out in (in_rows_of(stride, torch.zeros_like(logits)), logits):  # the second in place
        launch_backward(logits, target, maximum, log_sum, weights, out, options)
        for a, b in zip(wanted, out, strict=True):
            assert bounds.relative_rms(a, b, 1e-6) <= bounds.of_reference(dtype)[0]
        beside = out.as_strided((7, stride - classes), (stride, 1), out.storage_offset() + classes)
        assert beside.isnan().all()

    # the sum of the row's own logits
    logits = in_rows_of(stride, (tensor(3, classes, dtype=torch.float32) + 2).to(dtype))
    exact, target = logits.double().requires_grad_(), torch.tensor([0, classes - 1, classes // 2])
    expected, _ = oracle(exact, target, label_smoothing=0.2, logit_scale=1.5, logit_softcapping=5.0)
    options = Options(0.2, 1.5, 0.0, 5.0, -100, 0, classes)
    losses, _, maximum, log_sum = launch_forward(logits, target, options)
    assert error(expected, losses) <= bounds.EXACT[torch.float32]
    picked, total, *kept = launch_forward(logits, target, options, partial=True)
    v = 5 * (exact.detach() * 1.5 / 5).tanh()
    assert error(v.sum(1), total) <= bounds.EXACT[torch.float32]
    assert error(v[range(3), target], picked) <= bounds.EXACT[torch.float32]
    assert torch.equal(kept[0], maximum)
    assert torch.equal(kept[1], log_sum)
    (wanted,) = gradients(expected, weights[:3].double(), exact)
    launch_backward(logits, target, maximum, log_sum, weights[:3], logits, options)
    assert error(wanted, logits) <= bounds.of_reference(dtype)[0]


@pytest.mark.interpreted
@pytest.mark.parametrize('place', [0, 4095, 4096, 8191, 8192, 8200])
@pytest.mark.parametrize('few', [True, False], ids=['few', 'many'])
def test_one_number_that_is_none(monkeypatch, few, place):
    """A NaN at any place, or a row of only -inf, makes the loss NaN, but not those of other rows."""
    monkeypatch.setattr(kernels, '_FEW_ROWS', 100 if few else 0)
    logits = torch.randn(4, 8208)
    logits[0, place], logits[1, place], logits[2] = float('nan'), float('inf'), -float('inf')
    target, options = torch.full((4,), 7), Options(0.0, 1.0, 0.0, 0.0, -100, 0, 8208)
    losses, _, maximum, log_sum = launch_forward(logits, target, options)
    assert losses[:3].isnan().all()
    assert losses[3].isfinite()
    # a shard, to which other shards are added
    assert maximum[2] == log_sum[2] == -float('inf')
    launch_backward(logits, target, maximum, log_sum, torch.ones(4), logits, options)
    assert logits[0].isnan().all()
    assert logits[1:3].isnan().any(1).all()
    assert logits[3].isfinite().all()


@pytest.mark.interpreted
def test_ignored_rows():
    check_ignored_rows('default')


@pytest.mark.interpreted
def test_targets_that_are_none(monkeypatch):
    check_targets_that_are_none(monkeypatch, 'default')


@pytest.mark.interpreted
def test_strides_and_sizes():
    wide, target = tensor(5, 40, dtype=torch.float32), targets(10, 33)[::2]
    for logits in (wide[:, :33], wide[:, 3:36], wide.t()[:33, :5].t(), wide[:1, :33].expand(5, 33)):
        given, exact = logits.detach().requires_grad_(), logits.double().requires_grad_()
        losses, expected = on_triton(cross_entropy_loss, given, target.int())[0], oracle(exact, target)[0]
        assert error(expected, losses) <= bounds.EXACT[torch.float32]
        (wanted,), (got,) = torch.autograd.grad(expected.sum(), exact), torch.autograd.grad(losses.sum(), given)
        assert error(wanted, got) <= bounds.EXACT[torch.float32]
    empty = torch.zeros(0, 7, requires_grad=True)
    on_triton(cross_entropy_loss, empty, targets(0, 7))[0].sum().backward()
    assert empty.grad.shape == (0, 7)


@pytest.mark.interpreted
def test_in_place():
    source, target = torch.randn(4, 30, requires_grad=True), targets(4, 30, [2])
    (expected,) = torch.autograd.grad(oracle(source.double() * 2, target)[0].sum(), source)
    logits = source * 2
    losses, _ = on_triton(cross_entropy_loss, logits, target, inplace_backward=True)
    memory = logits.data_ptr()
    logits.retain_grad()
    losses.sum().backward(retain_graph=True)
    assert error(expected, source.grad) <= bounds.EXACT[torch.float32]
    assert error(expected / 2, logits) <= bounds.EXACT[torch.float32]
    assert logits.data_ptr() == memory
    # never twice
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        losses.sum().backward()
    # nor over logits that another backward reads
    logits = source.tanh()
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        on_triton(cross_entropy_loss, logits, target, inplace_backward=True)[0].sum().backward()
    # nor over a leaf, or rows that share memory
    before = source.detach().clone()
    for logits in (source, source.view(4, 30), (source[:1] * 1).expand(4, 30)):
        kept = logits.detach().clone()
        on_triton(cross_entropy_loss, logits, target, inplace_backward=True)[0].sum().backward()
        assert torch.equal(logits, kept)
    assert torch.equal(source, before)
    loss = cross_entropy_loss(source * 2, target, inplace_backward=True)[0].sum()
    with pytest.raises(RuntimeError, match='create_graph=True reached the backward of cross_entropy_loss'):
        torch.autograd.grad(loss, source, create_graph=True)


def _loss(logits, target, inplace):
    return on_triton(cross_entropy_loss, logits, target, inplace_backward=inplace)[0].sum()


def _read_twice(source, target, inplace):
    logits = source * 2
    return logits.square().sum() + _loss(logits, target, inplace)


def _checkpointed(source, target, inplace):
    return checkpoint(_read_twice, source, target, inplace, use_reentrant=False)


def _saved_by_hooks(source, target, inplace):
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        return _read_twice(source, target, inplace)


def _slices(source, target, inplace):
    logits = source * 2
    return _loss(logits[:3], target[:3], inplace) + _loss(logits[3:], target[3:], inplace)


@pytest.mark.interpreted
@pytest.mark.parametrize('call', [_checkpointed, _saved_by_hooks, _slices])
def test_in_place_only_where_autograd_sees_it(call):
    """In other cases the gradient is right, in new memory."""
    source, target = torch.randn(6, 9, requires_grad=True), targets(6, 9)
    wanted, got = (torch.autograd.grad(call(source, target, inplace), source)[0] for inplace in (False, True))
    assert torch.equal(wanted, got)


@pytest.mark.interpreted
def test_in_place_beside_a_checkpoint():
    """Autograd tracks modifications of the other arguments."""
    logits, target = torch.randn(6, 9, requires_grad=True) * 2, targets(6, 9)
    square = checkpoint(lambda one: one.square().sum(), logits, use_reentrant=False)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        (square + _loss(logits, target, True)).backward()


@pytest.mark.pairwise
@pytest.mark.interpreted
@pytest.mark.parametrize('dtype', KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
def test_linear(dtype, options, reduction, logits_are):
    tensors = [tensor(2, 27, 12, dtype=dtype), tensor(37, 12, dtype=dtype), tensor(37, dtype=dtype)]
    target = targets(54, 37, [3, 4, 40], options.get('ignore_index', -100)).reshape(2, 27)
    given, exact = [t.clone().requires_grad_() for t in tensors], [t.double().requires_grad_() for t in tensors]
    loss = on_triton(
        fused_linear_cross_entropy_loss, given[0], target, *given[1:], reduction=reduction, num_chunks=3, **options
    )
    expected = linear_oracle(exact[0], target, *exact[1:], reduction=reduction, **options)
    bound = bounds.of_linear_loss(dtype, 3.6)
    assert loss.dtype == torch.float32
    assert error(expected, loss) <= bound
    weights = torch.linspace(2, 3, loss.numel()).double().reshape(loss.shape)
    for wanted, got in zip(gradients(expected, weights, exact), gradients(loss, weights, given), strict=True):
        assert got.dtype == dtype
        assert error(wanted, got) <= bound


@pytest.mark.pairwise
@pytest.mark.interpreted
@pytest.mark.parametrize('options', LINEAR.values(), ids=LINEAR)
def test_linear_of_many_classes(options, logits_are):
    check_linear(options, 40, 200, 9001, torch.float32, 'cpu')


@pytest.mark.interpreted
@pytest.mark.parametrize(('rows', 'D', 'V'), [(1, 12, 37), (9, 1, 37), (9, 300, 2), (1, 1, 3)])
def test_linear_of_one(rows, D, V, logits_are):
    check_linear({}, rows, D, V, torch.float32, 'cpu', bias=False)
    check_linear({'reduction': 'none'}, rows, D, V, torch.float32, 'cpu')


@pytest.mark.interpreted
def test_linear_strided_and_broadcast(logits_are):
    """Views of x and weight, and one row expanded to all."""
    x, weight, target = tensor(12, 54, dtype=torch.float32), tensor(6, 37, dtype=torch.float32).t(), targets(9, 37, [3])
    bias = tensor(74, dtype=torch.float32)[::2]
    for view in (x[:6, :9].t(), x[:9, 1:7], x[:9, :12:2], x[:1, :6].expand(9, 6), x[:9, :1].expand(9, 6)):
        given = [one.detach().requires_grad_() for one in (view, weight, bias)]
        exact = [one.detach().double().requires_grad_() for one in given]
        loss = on_triton(fused_linear_cross_entropy_loss, given[0], target, *given[1:])
        expected = linear_oracle(exact[0], target, *exact[1:])
        assert error(expected, loss) <= bounds.EXACT[torch.float32]
        for wanted, got in zip(torch.autograd.grad(expected, exact), torch.autograd.grad(loss, given), strict=True):
            assert error(wanted, got) <= bounds.EXACT[torch.float32]


@pytest.mark.interpreted
@pytest.mark.parametrize('needed', [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize('num_chunks', [1, 8, 100])
def test_linear_computes_what_is_asked_for(needed, num_chunks, logits_are):
    x, weight, target = torch.randn(50, 6), torch.randn(20, 6), targets(50, 20, [7])
    exact = [t.double().requires_grad_(need) for t, need in zip((x, weight), needed, strict=True)]
    given = [t.clone().requires_grad_(need) for t, need in zip((x, weight), needed, strict=True)]
    loss = on_triton(fused_linear_cross_entropy_loss, given[0], target, given[1], num_chunks=num_chunks)
    expected = linear_oracle(exact[0], target, exact[1])
    assert error(expected, loss) <= bounds.EXACT[torch.float32]
    assert loss.requires_grad == any(needed)
    if any(needed):
        for _ in range(2):  # the same again
            loss.backward(torch.tensor(3.0), retain_graph=True)
        expected.backward(torch.tensor(6.0).double())
        for a, b in zip(exact, given, strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or error(a.grad, b.grad) <= bounds.EXACT[torch.float32]


@pytest.mark.interpreted
def test_linear_of_nothing_and_of_ignored_rows(logits_are):
    x, weight = torch.randn(0, 6, requires_grad=True), torch.randn(20, 6, requires_grad=True)
    on_triton(fused_linear_cross_entropy_loss, x, targets(0, 20), weight, reduction='sum').backward()
    assert not weight.grad.any()
    x = torch.randn(3, 6, requires_grad=True)
    loss = on_triton(fused_linear_cross_entropy_loss, x, torch.full((3,), -100), weight, reduction='mean')
    assert loss.isnan()
    weight.grad = None
    loss.backward()
    assert not x.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize('count', [0, 1, 600, 1024, 1025, 1500, 8192, 8193, 100_000])
@pytest.mark.parametrize('D', [64, 4096])
@pytest.mark.parametrize('num_chunks', [1, 3, 8, 1000])
def test_chunks(count, D, num_chunks):
    """At most `num_chunks`, of about the same size, and no larger than necessary."""
    rows, floor = linear.rows_of_chunk(count, D, num_chunks), linear.least_rows(D)
    assert floor == {64: 1024, 4096: 2048}[D]
    assert rows % 16 == 0
    sizes = [min(rows, count - start) for start in range(0, count, max(rows, 1))]
    assert len(sizes) <= num_chunks
    assert rows < max(count / num_chunks, floor) + 16
    assert len(sizes) <= 1 or rows > floor / 2


def test_padding_of_logits_is_zero_on_a_cpu():
    """PyTorch's bfloat16 products on a CPU read a column past an odd V."""
    buffer = linear._buffer(24, 33, torch.empty(0, dtype=torch.bfloat16))
    assert buffer.shape == (24, 33)
    assert not torch.as_strided(buffer, (24, 48), (48, 1)).any()


def launched(monkeypatch, call):
    """Records the rows of each product and each launch of a call, and of each buffer for logits."""
    found = []

    def spy(name, rows):
        original = getattr(linear, name)

        def seen(*args, **options):
            found.append((name, rows(*args)))
            return original(*args, **options)

        monkeypatch.setattr(linear, name, seen)

    spy('_product', lambda x, *_: x.shape[0])
    spy('launch_forward', lambda logits, *_: logits.shape[0])
    spy('launch_backward', lambda logits, *_: logits.shape[0])
    spy('_buffer', lambda rows, *_: rows)
    spy('scaled', lambda *_: 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    products = sum(one.count for one in profile.key_averages() if one.key in ('aten::mm', 'aten::addmm', 'aten::addmm_'))
    return found, products


@pytest.mark.interpreted
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize('reduction', ['mean', 'none'])
def test_few_rows_are_one_chunk(monkeypatch, dtype, reduction):
    """Three products, and nothing is recomputed or scaled, for any `num_chunks`."""
    x, weight = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((128, 4), (6, 4)))

    def call():
        loss = on_triton(fused_linear_cross_entropy_loss, x, targets(128, 6), weight, reduction=reduction)
        torch.autograd.grad(loss.sum(), (x, weight))

    found, products = launched(monkeypatch, call)
    names = ['_buffer', '_product', 'launch_forward', '_buffer', 'launch_backward']
    assert found == [(name, 128) for name in names]
    assert products == 3


@pytest.mark.slow
@pytest.mark.interpreted
def test_many_rows_are_cut(monkeypatch):
    """Right numbers over several chunks, with the memory of one."""
    x, weight, target = torch.randn(3300, 4), torch.randn(6, 4), targets(3300, 6, [0, 2000])
    given, exact = ([t.to(dtype).requires_grad_() for t in (x, weight)] for dtype in (torch.float32, torch.float64))

    def call():
        loss = on_triton(fused_linear_cross_entropy_loss, given[0], target, given[1], num_chunks=3)
        expected = linear_oracle(exact[0], target, exact[1])
        assert error(expected, loss) <= bounds.EXACT[torch.float32]
        for wanted, got in zip(torch.autograd.grad(expected, exact), torch.autograd.grad(loss, given), strict=True):
            assert error(wanted, got) <= bounds.EXACT[torch.float32]

    found, _ = launched(monkeypatch, call)
    chunks = [(name, rows) for rows in (1104, 1104, 1092) for name in ('_product', 'launch_forward', 'launch_backward')]
    assert found == [('_buffer', 1104), *chunks, ('scaled', 0), ('scaled', 0)]


@pytest.mark.interpreted
def test_reduced():
    """More rows than an iteration takes, any strides, and an `ignore_index` that the targets' dtype cannot hold."""
    for count in (0, 1, 2048, 5000):
        losses, target = torch.rand(count), targets(2 * count, 9)[::2]
        for one, ignored in ((target, 3), (target.int(), 2**40)):
            counted = (target != ignored).sum()
            for reduction, expected in (('sum', losses.double().sum()), ('mean', losses.double().sum() / counted)):
                loss, share = reduced(losses, one, ignored, reduction)
                assert loss.isnan() if expected.isnan() else error(expected, loss) <= bounds.elementwise(torch.float32)
                each = 1 / counted.float() if counted else torch.zeros(())
                assert torch.equal(share, each if reduction == 'mean' else torch.ones(()))


@pytest.mark.interpreted
def test_a_small_gradient_survives_float16(logits_are):
    """A loss scale keeps gradients of logits from underflowing: 1e-7 here, times 2^12."""
    x, weight, target = torch.randn(16, 4).half(), (torch.randn(3000, 4) / 8).half(), targets(16, 3000)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    given = [t.clone().requires_grad_() for t in (x, weight)]
    (on_triton(fused_linear_cross_entropy_loss, given[0], target, given[1]) * 4096).backward()
    (linear_oracle(exact[0], target, exact[1]) * 4096).backward()
    rows = torch.ones(3000, dtype=torch.bool)
    rows[target] = False
    assert error(exact[1].grad[rows], given[1].grad[rows]) <= bounds.of_linear_loss(torch.float16, 1.0)


@pytest.mark.interpreted
def test_linear_under_autocast(logits_are):
    x, weight, target = torch.randn(20, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True), targets(20, 30)
    with torch.autocast('cpu', torch.bfloat16):
        loss = on_triton(fused_linear_cross_entropy_loss, x, target, weight)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = linear_oracle(exact[0], target, exact[1])
    bound = bounds.of_rounded_operands(torch.bfloat16, 2.8)
    for wanted, got in zip(torch.autograd.grad(expected, exact), torch.autograd.grad(loss, (x, weight)), strict=True):
        assert got.dtype == torch.float32
        assert error(wanted, got) <= bound


@pytest.mark.interpreted
@pytest.mark.parametrize('reduction', ['mean', 'none'])
def test_autocast_around_the_backward_alone(reduction, logits_are):
    """Autocast around the backward rounds nothing."""
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((20, 8), (30, 8), (30,)))
    target = targets(20, 30)
    loss = on_triton(fused_linear_cross_entropy_loss, x, target, weight, bias, reduction=reduction).sum()
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = linear_oracle(exact[0], target, *exact[1:], reduction=reduction).sum()
    with torch.autocast('cpu', torch.bfloat16):
        found = torch.autograd.grad(loss, (x, weight, bias))
    for wanted, got in zip(torch.autograd.grad(expected, exact), found, strict=True):
        assert error(wanted, got) <= bounds.EXACT[torch.float32]


@pytest.mark.interpreted
@served_by('default')
def test_compiled():
    logits, target = torch.randn(4, 10, requires_grad=True), targets(4, 10)
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(10, 6, requires_grad=True)

    def both(logits, x, weight):
        losses, _ = cross_entropy_loss(logits * 2, target, lse_square_scale=0.1, inplace_backward=True)
        return losses.sum() + fused_linear_cross_entropy_loss(x, target, weight)

    compiled = torch.compile(both, fullgraph=True, backend='aot_eager')
    inputs = (logits, x, weight)
    expected, got = both(*inputs), compiled(*inputs)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs))


class Head(torch.nn.Module):
    """The first and last layers of a language model."""

    def __init__(self):
        super().__init__()
        self.convolution, self.weight = ShortConvolution(8, 4), torch.nn.Parameter(torch.randn(12, 8))
        self.fused, self.plain = FusedLinearCrossEntropyLoss(), FusedCrossEntropyLoss()

    def forward(self, x, target):
        y, _ = self.convolution(x)
        return self.fused(y, target, self.weight) + self.plain((y @ self.weight.t()).flatten(0, 1), target.flatten())


@pytest.mark.interpreted
@served_by('default')
def test_exported():
    """For any length, with gradients."""
    model, x, target = Head(), torch.randn(2, 6, 8), targets(12, 12).reshape(2, 6)
    length = {1: torch.export.Dim('T')}
    exported = torch.export.export(model, (x, target), dynamic_shapes=(length, length))
    names = {str(node.target) for node in exported.graph.nodes}
    assert {
        'fla.causal_conv1d.default',
        'fla.cross_entropy_loss.default',
        'fla.fused_linear_cross_entropy_loss.default',
    } <= names
    x, target, inputs = torch.randn(2, 9, 8), targets(18, 12).reshape(2, 9), list(model.parameters())
    loaded = exported.module()
    expected, got = model(x, target), loaded(x, target)
    torch.testing.assert_close(got, expected)
    wanted, found = torch.autograd.grad(expected, inputs), torch.autograd.grad(got, list(loaded.parameters()))
    torch.testing.assert_close(found, wanted)


@pytest.mark.interpreted
@pytest.mark.parametrize('reduction', ['mean', 'none'])
def test_linear_in_vmap(reduction):
    """For few rows, which bypass the operator, also with batched incoming gradients."""
    x, target, weight, bias = torch.randn(3, 5, 6), torch.tensor([1, 0, -100, 3, 2]), torch.randn(4, 6), torch.randn(4)

    def losses(x):
        return fused_linear_cross_entropy_loss(x, target, weight, bias, reduction=reduction)

    with served_by('default'):
        torch.testing.assert_close(torch.vmap(losses)(x), torch.stack([losses(one) for one in x]))
        one = x[0].clone().requires_grad_()
        loss = losses(one)
    given = torch.randn(3, *loss.shape)
    (found,) = torch.vmap(lambda dloss: torch.autograd.grad(loss, one, dloss, retain_graph=True))(given)
    expected = [torch.autograd.grad(loss, one, dloss, retain_graph=True)[0] for dloss in given]
    assert torch.equal(found, torch.stack(expected))


@pytest.mark.interpreted
@served_by('default')
def test_once_only(logits_are):
    logits, target = torch.randn(4, 10, requires_grad=True), targets(4, 10)
    with pytest.raises(RuntimeError, match='create_graph=True reached the backward of fla::cross_entropy_loss'):
        torch.autograd.grad(cross_entropy_loss(logits, target)[0].sum(), logits, create_graph=True)
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(10, 3, requires_grad=True)
    loss = fused_linear_cross_entropy_loss(x, target, weight)
    with pytest.raises(RuntimeError, match=r'create_graph=True reached the backward of .*fused_linear_cross_entropy_loss'):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.pairwise
@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize('capability', [(8, 0), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize('count', [4, 9000])
@pytest.mark.parametrize(('classes', 'dtype'), [(1000, torch.float32), (256000, torch.bfloat16)], ids=str)
def test_compiles(capability, count, classes, dtype):
    with compile_only(capability) as compiled:
        logits = torch.empty(count, classes, dtype=dtype, device='meta')
        target, losses = torch.empty(count, dtype=torch.int64, device='meta'), torch.empty(count, device='meta')
        for options in (Options(0.0, 1.0, 0.0, 0.0, -100, 0, classes), Options(0.1, 1.0, 0.1, 30.0, -100, 0, classes)):
            launch_forward(logits, target, options)
            launch_forward(logits, target, options, partial=True)
            launch_backward(logits, target, losses, losses, losses, logits, options)
        scaled(logits, losses[0])
        reduced(losses, target, -100, 'sum')
        reduced(losses, target.int(), -100, 'mean')
    print(*compiled, sep='\n')
    assert all(one.spilled == 0 for one in compiled)
    # a fused product is not rounded before the maximum, which was rounded, is subtracted from it
    assert all('fma.rn.f32' not in one.kernel.asm['ptx'] for one in compiled if one.name != '_scaled')


@pytest.mark.pairwise
@pytest.mark.triton
@pytest.mark.parametrize('count', [4, 9000])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_compiled_tiles(count, dtype):
    """Tiles stay in the layout of their loads, 16 bytes at a time for aligned rows, as those of the linear loss are."""
    for classes, aligned in ((131072, True), (50257, True), (50257, False)):
        logits = linear._buffer(count, classes, torch.empty(0, dtype=dtype, device='meta'))
        logits = logits if aligned else torch.empty(count, classes, dtype=dtype, device='meta')
        target, losses = torch.empty(count, dtype=torch.int64, device='meta'), torch.empty(count, device='meta')
        options = Options(0.0, 1.0, 0.0, 0.0, -100, 0, classes)
        with compile_only((9, 0)) as compiled:
            launch_forward(logits, target, options)
            launch_backward(logits, target, losses, losses, losses, logits, options)
        print(*compiled, sep='\n')
        forward, backward = (one.kernel.asm for one in compiled)
        assert 'convert_layout' not in forward['ttgir']
        # one reduction for the maximum and one for the sum, within and across warps
        assert forward['ptx'].count('shfl.') == 2 * (5 + 2)
        k, *_ = kernels._forward_tile(logits, False)
        assert sum('ld.global' in line and '.v4.' in line for line in forward['ptx'].splitlines()) == (
            0 if not aligned else 2 * k if classes % 16 == 0 else k
        )
        if classes % 16 == 0:
            assert 'ld.global.v4.b32' in backward['ptx']
            assert 'st.global.v4.b32' in backward['ptx']
        # at least 16 warps per multiprocessor
        assert all(one.registers <= 128 for one in compiled)


SHARDED = """
import sys
import torch
from torch import distributed

from fla.modules.fused_cross_entropy import cross_entropy_loss
from fla.backends import trace
from tests import bounds
from tests.modules.losses import oracle

rank, backend, place = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if backend == 'default':
    from tests.triton_support import interpreter

    interpreter.install()
distributed.init_process_group('gloo', rank=rank, world_size=2, init_method=f'file://{place}')
torch.manual_seed(0)
logits, target = torch.randn(6, 20) * 4, torch.tensor([0, 3, -100, 10, 19, 9])
options = dict(label_smoothing=0.1, logit_scale=0.8, lse_square_scale=0.01, logit_softcapping=6.0)
weights = torch.arange(1.0, 7.0)
whole = logits.double().requires_grad_()
expected, expected_z = oracle(whole, target, **options)
(wanted,) = torch.autograd.grad((expected * weights).sum(), whole)
for inplace in (False, True):
    own = logits[:, rank * 10 : rank * 10 + 10].clone().requires_grad_()
    with trace() as recorded:
        losses, z_losses = cross_entropy_loss(
            own * 1, target, **options, inplace_backward=inplace, process_group=distributed.group.WORLD
        )
    assert recorded.last_backend('modules.cross_entropy_loss') == backend, recorded.last_backend('modules')
    (got,) = torch.autograd.grad((losses * weights).sum(), own)
    for right, found in ((expected, losses), (expected_z, z_losses), (wanted[:, rank * 10 : rank * 10 + 10], got)):
        assert bounds.relative_rms(right, found) <= bounds.EXACT[torch.float32]
try:
    cross_entropy_loss(own, target + 21, process_group=distributed.group.WORLD)
    raise SystemExit('a target beyond all shards was taken')
except ValueError as error:
    assert '[0, 20)' in str(error), error
distributed.destroy_process_group()
"""


@pytest.mark.parametrize('backend', ['reference', 'default'])
@pytest.mark.skipif(not torch.distributed.is_available(), reason='this PyTorch has no torch.distributed')
def test_sharded_vocabulary(backend, tmp_path):
    environment = {**os.environ, 'TRITON_INTERPRET': '1' if backend == 'default' else '0'}
    ranks = [
        subprocess.Popen(
            [sys.executable, '-c', SHARDED, str(rank), backend, str(tmp_path / 'rendezvous')],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
