"""Cross entropies on a card: numbers against float64, large vocabularies, graphs, streams, compiled code, other devices."""

import pytest
import torch

pytest.importorskip('triton')
from fla.backends import trace
from fla.modules.fused_cross_entropy import cross_entropy_loss
from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
from tests import bounds

from .losses import LINEAR, OPTIONS, check_linear, cut_finely, gradients, linear_oracle, oracle
from .oracle import error, served_by

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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


def case(rows, classes, dtype, ignored=3):
    generator = torch.Generator('cuda').manual_seed(0)
    logits = (torch.randn(rows, classes, device='cuda', generator=generator) * 2).to(dtype)
    target = torch.randint(classes, (rows,), device='cuda', generator=generator)
    target[:ignored] = -100
    return logits, target


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(('classes', 'ignore_index'), [(1, -100), (1000, 0), (50257, -1), (256000, -100)])
def test_cross_entropy(dtype, options, classes, ignore_index):
    logits, target = case(64, classes, dtype)
    options = {**options, 'lse_square_scale': 1e-3, 'ignore_index': ignore_index}
    target = torch.where(target == -100, ignore_index, target)
    given, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    losses, _ = on_triton(cross_entropy_loss, given, target, **options)
    expected, _ = oracle(exact, target, **options)
    assert error(expected, losses) <= bounds.EXACT[torch.float32]
    weights = torch.linspace(1, 2, 64).double()
    (got,), (wanted,) = gradients(losses, weights, given), gradients(expected, weights, exact)
    floor = bounds.ONE_CLASS if classes == 1 else 0
    assert bounds.relative_rms(wanted, got, floor) <= bounds.of_reference(dtype)[0]


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_in_place(dtype):
    """The gradient is right, and in the memory of the logits."""
    source, target = case(64, 50257, dtype)
    source.requires_grad_()
    exact = source.detach().double().requires_grad_()
    logits = source * 1
    losses, _ = on_triton(cross_entropy_loss, logits, target, inplace_backward=True)
    weights = torch.linspace(1, 2, 64).double()
    (wanted,) = gradients(oracle(exact, target)[0], weights, exact)
    (got,) = gradients(losses, weights, source)
    assert bounds.relative_rms(wanted, got) <= bounds.of_reference(dtype)[0]
    assert bounds.relative_rms(wanted, logits.detach()) <= bounds.of_reference(dtype)[0]


def test_more_than_2_31_numbers():
    rows, classes = 9000, 256000
    logits = torch.randn(1, classes, device='cuda', dtype=torch.bfloat16).expand(rows, classes)
    target = torch.randint(classes, (rows,), device='cuda')
    last = logits[-1:].double().requires_grad_()
    expected, _ = oracle(last, target[-1:])
    losses, _ = on_triton(cross_entropy_loss, logits, target)
    assert error(expected, losses[-1:]) <= bounds.EXACT[torch.float32]
    logits = logits.contiguous().requires_grad_()
    losses, _ = on_triton(cross_entropy_loss, logits, target)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    (wanted,) = torch.autograd.grad(expected.sum(), last)
    assert bounds.relative_rms(wanted, gradient[-1:]) <= bounds.of_reference(torch.bfloat16)[0]


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('reduction', ['mean', 'none'])
def test_linear(dtype, reduction, logits_are):
    _, target = case(1000, 5003, dtype)
    x, weight, bias = (torch.randn(*shape, device='cuda') for shape in ((1000, 64), (5003, 64), (5003,)))
    tensors = [(x / 4).to(dtype), weight.to(dtype), bias.to(dtype)]
    given, exact = [t.clone().requires_grad_() for t in tensors], [t.double().requires_grad_() for t in tensors]
    loss = on_triton(fused_linear_cross_entropy_loss, given[0], target, *given[1:], reduction=reduction)
    expected = linear_oracle(exact[0], target, *exact[1:], reduction=reduction)
    bound = bounds.of_linear_loss(dtype, 2.3)
    assert error(expected, loss) <= bound
    weights = torch.linspace(1, 2, loss.numel(), device='cuda').double().reshape(loss.shape) * 512
    for wanted, got in zip(gradients(expected, weights, exact), gradients(loss, weights, given), strict=True):
        assert error(wanted, got) <= bound


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('options', LINEAR.values(), ids=LINEAR)
def test_arguments_of_the_linear_loss(options, dtype, logits_are):
    check_linear(options, 300, 256, 5003, dtype, 'cuda')


@pytest.mark.parametrize(
    ('rows', 'D', 'V', 'dtype'),
    [
        (200, 1024, 128256, torch.float32),
        (200, 1024, 128256, torch.bfloat16),
        (96, 65536, 500, torch.bfloat16),
        (1, 64, 256000, torch.float32),
    ],
    ids=str,
)
def test_large_linear_losses(rows, D, V, dtype, logits_are):
    for options in (LINEAR['plain'], LINEAR['everything']):
        check_linear(options, rows, D, V, dtype, 'cuda')


def test_logits_never_exist_whole():
    rows, classes, D = 8192, 128000, 256
    x = torch.randn(rows, D, device='cuda', dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(classes, D, device='cuda', dtype=torch.bfloat16) / 16).requires_grad_()
    target = torch.randint(classes, (rows,), device='cuda')
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    on_triton(fused_linear_cross_entropy_loss, x, target, weight).backward()
    assert torch.cuda.max_memory_allocated() - before < 0.3 * rows * classes * 2


@pytest.mark.parametrize('rows', [1024, 1100, 5000])
def test_logits_of_a_chunk(rows):
    """Those of 1024 rows, and their gradient beside them, or of one chunk for both; and the weight's gradient, twice at the
    most. Numbers are right at sizes that nothing patches."""
    classes, D = 32000, 128
    # cuBLAS allocates memory at its first product
    torch.mm(*torch.randn(2, 64, 64, device='cuda', dtype=torch.bfloat16))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = torch.randn(rows, D, device='cuda', dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(classes, D, device='cuda', dtype=torch.bfloat16) / 4).requires_grad_()
    target = torch.randint(classes, (rows,), device='cuda')
    loss = on_triton(fused_linear_cross_entropy_loss, x, target, weight)
    got = torch.autograd.grad(loss, (x, weight))
    numbers = rows * D * 3 + classes * D * 3
    assert torch.cuda.max_memory_allocated() - before < 2 * (numbers + (2 if rows <= 1024 else 1) * 1040 * classes) + 2**21
    exact = [one.detach().double().requires_grad_() for one in (x, weight)]
    expected = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), target)
    bound = bounds.of_linear_loss(torch.bfloat16, 2.9)
    assert error(expected, loss) <= bound
    for wanted, found in zip(torch.autograd.grad(expected, exact), got, strict=True):
        assert error(wanted, found) <= bound


@served_by('default')
def test_the_same_bits():
    logits, target = case(512, 50257, torch.bfloat16)
    x, weight = torch.randn(512, 64, device='cuda').bfloat16(), torch.randn(5000, 64, device='cuda').bfloat16()

    def all_of_it():
        inputs = [t.clone().requires_grad_() for t in (logits, x, weight)]
        losses, _ = cross_entropy_loss(inputs[0], target)
        loss = fused_linear_cross_entropy_loss(inputs[1], target % 5000, inputs[2])
        return losses, loss, *torch.autograd.grad(losses.sum() + loss, inputs)

    for a, b in zip(all_of_it(), all_of_it(), strict=True):
        assert torch.equal(a, b)


@served_by('default')
def test_graph_and_stream():
    logits, target = case(128, 32000, torch.bfloat16)
    x, weight = torch.randn(128, 64, device='cuda').bfloat16(), torch.randn(5000, 64, device='cuda').bfloat16()
    inputs = [t.requires_grad_() for t in (logits, x, weight)]

    def all_of_it():
        losses, _ = cross_entropy_loss(inputs[0] * 1, target, inplace_backward=True)
        loss = fused_linear_cross_entropy_loss(inputs[1], target % 5000, inputs[2])
        return losses, *torch.autograd.grad(losses.sum() + loss, inputs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        all_of_it()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = all_of_it()
    with torch.no_grad():
        logits.mul_(0.5)
        target.copy_(target.roll(1))
    graph.replay()
    for a, b in zip(all_of_it(), captured, strict=True):
        assert torch.equal(a, b)


@served_by('default')
@pytest.mark.parametrize('mode', ['default', 'reduce-overhead'])
def test_compiled(mode):
    logits, target = case(128, 3200, torch.bfloat16)
    x, weight = torch.randn(128, 64, device='cuda').bfloat16(), torch.randn(3200, 64, device='cuda').bfloat16()
    inputs = [t.requires_grad_() for t in (logits, x, weight)]

    def both(logits, x, weight):
        losses, _ = cross_entropy_loss(logits * 2, target, inplace_backward=True)
        return losses.sum() + fused_linear_cross_entropy_loss(x, target, weight)

    compiled = torch.compile(both, fullgraph=True, mode=mode)
    wanted = torch.autograd.grad(both(*inputs), inputs)
    for _ in range(3):
        for a, b in zip(wanted, torch.autograd.grad(compiled(*inputs), inputs), strict=True):
            assert error(a, b) <= bounds.ROUNDING[torch.bfloat16]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='one GPU')
def test_on_another_device():
    logits, target = (one.to('cuda:1') for one in case(64, 1000, torch.bfloat16))
    losses, _ = on_triton(cross_entropy_loss, logits.requires_grad_(), target)
    losses.sum().backward()
    expected, _ = oracle(logits.detach().double(), target)
    assert error(expected, losses) <= bounds.EXACT[torch.float32]
