"""cross_entropy_loss, fused_linear_cross_entropy_loss and their classes, on the reference."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from fla.backends import Policy, explain, policy_context, trace, use_backend
from fla.modules import FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss
from fla.modules.fused_cross_entropy import cross_entropy_loss
from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
from tests import bounds
from tests.tables import table

from .losses import OPTIONS, gradients, linear_oracle, oracle, targets
from .oracle import DTYPES, error, tensor


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
def test_cross_entropy_against_the_definition(dtype, options):
    options = {**options, 'lse_square_scale': 0.01}
    logits, target = tensor(6, 11, dtype=dtype) * 3, targets(6, 11, [1], options.get('ignore_index', -100))
    given, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    losses, z_losses = cross_entropy_loss(given, target, **options)
    expected, expected_z = oracle(exact, target, **options)
    assert losses.dtype == z_losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not z_losses.requires_grad
    wide = bounds.EXACT[losses.dtype]
    assert error(expected, losses) <= wide
    assert error(expected_z, z_losses) <= wide
    weights = torch.arange(1.0, 7.0).double()
    (got,), (wanted,) = gradients(losses, weights, given), gradients(expected, weights, exact)
    assert got.dtype == dtype
    assert error(wanted, got) <= bounds.of_reference(dtype)[0]
    assert not got[1].any()


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
def test_linear_against_the_definition(dtype, options, reduction):
    tensors = [tensor(2, 5, 4, dtype=dtype), tensor(7, 4, dtype=dtype), tensor(7, dtype=dtype)]
    target = targets(10, 7, [3, 4], options.get('ignore_index', -100)).reshape(2, 5)
    given, exact = [t.clone().requires_grad_() for t in tensors], [t.double().requires_grad_() for t in tensors]
    loss = fused_linear_cross_entropy_loss(given[0], target, *given[1:], reduction=reduction, **options)
    expected = linear_oracle(exact[0], target, *exact[1:], reduction=reduction, **options)
    bound = bounds.of_linear_loss(dtype, 3.0)
    assert error(expected, loss) <= bound
    weights = torch.linspace(1, 2, loss.numel()).double().reshape(loss.shape)
    for wanted, got in zip(gradients(expected, weights, exact), gradients(loss, weights, given), strict=True):
        assert got.dtype == dtype
        assert error(wanted, got) <= bound


@pytest.mark.parametrize('row', [[1e20, 0.0], [-3.4e38, -3.4e38], [0.0, 2e19]], ids=str)
def test_large_logits(row):
    """Its square overflows float32, but is not needed."""
    logits = torch.tensor([row], requires_grad=True)
    target = torch.tensor([1])
    losses, z_losses = cross_entropy_loss(logits, target)
    exact = logits.detach().double().requires_grad_()
    expected, _ = oracle(exact, target)
    assert error(expected, losses) <= bounds.EXACT[torch.float32]
    assert z_losses.tolist() == [0]
    (got,), (wanted,) = (torch.autograd.grad(one.sum(), x) for one, x in ((losses, logits), (expected, exact)))
    torch.testing.assert_close(got.double(), wanted)


@pytest.mark.parametrize('offset', [0.0, 1e4, -1e6])
def test_gradients_of_large_z_losses(offset):
    """The log-sum-exp is rounded in float32, the probabilities are not."""
    logits, target = (tensor(4, 50, dtype=torch.float32) + offset).requires_grad_(), torch.arange(4)
    exact = logits.detach().double().requires_grad_()
    losses, _ = cross_entropy_loss(logits, target, lse_square_scale=1e-4)
    expected, _ = oracle(exact, target, lse_square_scale=1e-4)
    (got,), (wanted,) = (torch.autograd.grad(one.sum(), x) for one, x in ((losses, logits), (expected, exact)))
    assert error(wanted, got) <= bounds.EXACT[torch.float32]


def test_differentiable_twice():
    target = targets(3, 5, [1])

    def call(logits):
        return cross_entropy_loss(logits, target, 0.1, 1.2, 0.1, 4.0)[0]

    logits, x, weight = tensor(3, 5, grad=True), tensor(3, 2, grad=True), tensor(5, 2, grad=True)
    assert torch.autograd.gradgradcheck(call, logits)
    assert torch.autograd.gradgradcheck(lambda x, w: fused_linear_cross_entropy_loss(x, target, w), (x, weight))


def check_ignored_rows(backend):
    """Any logits in ignored rows, infinite ones included."""
    logits = torch.tensor([[1.0, -2.0, 0.5], [float('inf'), 1.0, 2.0], [float('nan')] * 3, [-float('inf')] * 3])
    target = torch.tensor([1, -100, -100, -100])
    for options in (*OPTIONS.values(), {'lse_square_scale': 0.1}):
        given = logits.clone().requires_grad_()
        with trace() as recorded:
            losses, z_losses = cross_entropy_loss(given, target, **{**options, 'ignore_index': -100})
        assert recorded.last_backend('modules.cross_entropy_loss') == backend
        losses.sum().backward()
        assert losses[0] > 0
        assert given.grad[0].all()
        assert not any(one[1:].any() for one in (losses, z_losses, given.grad))
    # the gradient of a mean over no losses is infinite, and must not reach the logits
    given = logits.clone().requires_grad_()
    with trace() as recorded:
        FusedCrossEntropyLoss()(given, torch.full((4,), -100)).backward()
    assert recorded.last_backend('modules.cross_entropy_loss') == backend
    assert not given.grad.any()


def test_ignored_rows():
    check_ignored_rows('reference')


def test_as_pytorch_says():
    logits, target = tensor(6, 9), targets(6, 9, [0])
    for reduction in ('mean', 'sum', 'none'):
        for smoothing in (0.0, 0.3):
            expected = F.cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing)
            layer = FusedCrossEntropyLoss(reduction=reduction, label_smoothing=smoothing)
            torch.testing.assert_close(layer(logits, target), expected)
            x, weight = tensor(6, 3), tensor(9, 3)
            expected = F.cross_entropy(x @ weight.T, target, reduction=reduction, label_smoothing=smoothing)
            layer = FusedLinearCrossEntropyLoss(reduction=reduction, label_smoothing=smoothing)
            torch.testing.assert_close(layer(x, target, weight), expected)
    assert FusedCrossEntropyLoss()(logits, torch.full((6,), -100)).isnan()


def test_z_loss_of_the_layer():
    logits, target = tensor(6, 9, grad=True), targets(6, 9, [0])
    loss, z_loss = FusedCrossEntropyLoss(lse_square_scale=0.1, return_z_loss=True)(logits, target)
    expected = (0.1 * logits[1:].logsumexp(1) ** 2).mean()
    torch.testing.assert_close(z_loss, expected)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target) + expected)
    assert not z_loss.requires_grad


@pytest.mark.parametrize('shape', [(0, 4), (1, 1), (3, 1)])
def test_sizes(shape):
    logits, target = torch.randn(shape, requires_grad=True), torch.zeros(shape[0], dtype=torch.int32)
    losses, z_losses = cross_entropy_loss(logits, target)
    assert losses.shape == z_losses.shape == shape[:1]
    assert not losses.any() or shape[1] > 1
    losses.sum().backward()
    x, weight = torch.randn(shape[0], 3, requires_grad=True), torch.randn(shape[1], 3, requires_grad=True)
    loss = fused_linear_cross_entropy_loss(x, target, weight, reduction='sum')
    loss.backward()
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape


def test_strides_and_broadcast():
    logits, target = tensor(9, 5).t(), targets(5, 9)
    expected = oracle(logits, target)[0]
    assert error(expected, cross_entropy_loss(logits, target)[0]) <= bounds.TWO_ORACLES
    row = tensor(1, 9).expand(5, 9)
    every_second = torch.stack([target, target], 1)[:, 0]
    assert error(oracle(row, target)[0], cross_entropy_loss(row, every_second)[0]) <= bounds.TWO_ORACLES


def test_who_serves():
    logits, target = torch.randn(2, 4), torch.tensor([1, 3])
    with trace() as recorded:
        cross_entropy_loss(logits, target)
        fused_linear_cross_entropy_loss(logits, target, torch.randn(4, 4))
    assert recorded.last_backend('modules.cross_entropy_loss') == 'reference'
    assert recorded.last_backend('modules.fused_linear_cross_entropy_loss') == 'reference'
    for function, more in ((cross_entropy_loss, ()), (fused_linear_cross_entropy_loss, (logits,))):
        assert explain(function, logits, target, *more, platform='h100').winner == 'default'
        wide = [one.double() for one in more]
        assert explain(function, logits.double(), target, *wide, platform='h100').winner == 'reference'


def test_autocast():
    x, weight, target = torch.randn(4, 8), torch.randn(6, 8), targets(4, 6)
    with torch.autocast('cpu', torch.bfloat16):
        loss = fused_linear_cross_entropy_loss(x.bfloat16(), target, weight)
    expected = linear_oracle(x.bfloat16().double(), target, weight.bfloat16().double())
    assert error(expected, loss) <= bounds.of_linear_loss(torch.bfloat16, 3.0)


BAD = [
    (lambda x, t: cross_entropy_loss(x[0], t), ValueError, r'logits must be \[N, V\]'),
    (lambda x, t: cross_entropy_loss(x[:, :0], t), ValueError, r'logits must be \[N, V\] with V at least 1'),
    (lambda x, t: cross_entropy_loss(x.long(), t), TypeError, 'logits must be float16'),
    (lambda x, t: cross_entropy_loss(x, t.float()), TypeError, 'target must be int32 or int64, got torch.float32'),
    (lambda x, t: cross_entropy_loss(x, t[:1]), ValueError, r'target must be \[N\] = \[3\], got \[1\]'),
    (lambda x, t: cross_entropy_loss(x, t + 4), ValueError, r'target must be in \[0, 4\) or ignore_index = -100, got'),
    (lambda x, t: cross_entropy_loss(x, t, label_smoothing=1.5), ValueError, 'label_smoothing must be between 0 and 1'),
    (lambda x, t: cross_entropy_loss(x, t, logit_scale='1'), TypeError, 'logit_scale must be a number, got str'),
    (lambda x, t: cross_entropy_loss(x, t, logit_softcapping=0.0), ValueError, 'logit_softcapping must be positive or None'),
    (
        lambda x, t: cross_entropy_loss(x, t, logit_softcapping=math.inf),
        ValueError,
        'logit_softcapping must be finite, got inf',
    ),
    (lambda x, t: cross_entropy_loss(x, t, lse_square_scale='1'), TypeError, 'lse_square_scale must be a number, got str'),
    (
        lambda x, t: cross_entropy_loss(x, t, lse_square_scale=math.nan),
        ValueError,
        'lse_square_scale must be finite, got nan',
    ),
    (lambda x, t: cross_entropy_loss(x, t, label_smoothing=True), TypeError, 'label_smoothing must be a number, got bool'),
    (lambda x, t: cross_entropy_loss(x, t, ignore_index=1.0), TypeError, 'ignore_index must be an int, got float'),
    (lambda x, t: cross_entropy_loss(x, t, process_group='tp'), TypeError, 'process_group must be a torch.distributed'),
    (lambda x, t: fused_linear_cross_entropy_loss(x[0, 0], t, x), ValueError, r'x must be \[..., D\]'),
    (lambda x, t: fused_linear_cross_entropy_loss(x, t, x[0]), ValueError, r'weight must be \[V, D\]'),
    (lambda x, t: fused_linear_cross_entropy_loss(x, t, x[:, :3]), ValueError, r'weight must be \[V, D\] = \[3, 4\]'),
    (lambda x, t: fused_linear_cross_entropy_loss(x, t, x, x), ValueError, r'bias must be \[V\] = \[3\]'),
    (lambda x, t: fused_linear_cross_entropy_loss(x, t, x.half()), TypeError, 'weight must have the dtype of x'),
    (lambda x, t: fused_linear_cross_entropy_loss(x, t, x, x[:, 0].half()), TypeError, 'bias must have the dtype of x'),
    (
        lambda x, t: fused_linear_cross_entropy_loss(x, t, x, num_chunks=1.5),
        TypeError,
        'num_chunks must be an int, got float',
    ),
    (
        lambda x, t: fused_linear_cross_entropy_loss(x, t, x, num_chunks=True),
        TypeError,
        'num_chunks must be an int, got bool',
    ),
    (lambda x, t: fused_linear_cross_entropy_loss(x, t, x, logit_scale=math.inf), ValueError, 'logit_scale must be finite'),
    (lambda x, t: fused_linear_cross_entropy_loss(x, t, x, label_smoothing='0'), TypeError, 'label_smoothing must be a num'),
    (
        lambda x, t: fused_linear_cross_entropy_loss(x, t, x, label_smoothing=-0.1),
        ValueError,
        'label_smoothing must be betw',
    ),
    (lambda x, t: fused_linear_cross_entropy_loss(x, t, x, logit_softcapping='1'), TypeError, 'logit_softcapping must be a'),
    (
        lambda x, t: fused_linear_cross_entropy_loss(x, t, x, logit_softcapping=-1.0),
        ValueError,
        'logit_softcapping must be p',
    ),
    (lambda x, t: fused_linear_cross_entropy_loss(x, t, x, ignore_index=None), TypeError, 'ignore_index must be an int'),
    *(
        # truncated to int32 this is 0
        (lambda x, t, loss=loss: loss(x, t.int(), ignore_index=2**32), ValueError, 'ignore_index must be .*, torch.int32')
        for loss in (cross_entropy_loss, functools.partial(fused_linear_cross_entropy_loss, weight=torch.ones(4, 4)))
    ),
    (lambda x, t: fused_linear_cross_entropy_loss(x, t.to('meta'), x), ValueError, "'target' is on meta"),
    (
        lambda x, t: fused_linear_cross_entropy_loss(x, t[None], x),
        ValueError,
        r'target must be one number for each x = \[3\]',
    ),
    (
        lambda x, t: fused_linear_cross_entropy_loss(x, t, x, num_chunks=0),
        ValueError,
        'num_chunks must be at least 1',
    ),
    (
        lambda x, t: fused_linear_cross_entropy_loss(x, t, x, reduction='avg'),
        ValueError,
        "reduction must be one of .* 'avg'",
    ),
    (lambda x, t: fused_linear_cross_entropy_loss(x, t, x[:2]), ValueError, r'target must be in \[0, 2\)'),
    (lambda x, t: FusedCrossEntropyLoss(reduction='avg'), ValueError, 'reduction must be one of'),
    (lambda x, t: FusedLinearCrossEntropyLoss(reduction='avg'), ValueError, 'reduction must be one of'),
    *(
        (lambda x, t, one=one, given=given: one(**given), kind, message)
        for one in (FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss)
        for given, kind, message in (
            ({'label_smoothing': 2.0}, ValueError, 'label_smoothing must be between 0 and 1, got 2.0'),
            ({'label_smoothing': None}, TypeError, 'label_smoothing must be a number'),
            ({'logit_scale': math.inf}, ValueError, 'logit_scale must be finite'),
            ({'logit_softcapping': 0.0}, ValueError, 'logit_softcapping must be positive or None'),
            ({'ignore_index': 1.0}, TypeError, 'ignore_index must be an int'),
            ({'ignore_index': 2**63}, ValueError, 'ignore_index must be within 64 bits'),
        )
    ),
    (lambda x, t: FusedCrossEntropyLoss(lse_square_scale=math.nan), ValueError, 'lse_square_scale must be finite'),
    (lambda x, t: FusedCrossEntropyLoss(process_group='tp'), TypeError, 'process_group must be a torch.distributed'),
    (lambda x, t: FusedLinearCrossEntropyLoss(num_chunks=0), ValueError, 'num_chunks must be at least 1'),
]


@table(('call', 'kind', 'message'), BAD)
def test_bad_calls(call, kind, message):
    with pytest.raises(kind, match=message):
        call(torch.randn(3, 4), torch.tensor([0, 1, 2]))


def check_targets_that_are_none(monkeypatch, backend):
    """Targets on a device are not read: only the loss and the gradient of the wrong row are NaN."""
    import fla.modules.fused_cross_entropy.ops as module

    monkeypatch.setattr(module, 'readable', lambda target: False)
    target = torch.tensor([1, 4, -100, -1])
    for options in ({}, {'label_smoothing': 0.1, 'lse_square_scale': 0.1, 'logit_softcapping': 2.0}):
        logits = torch.randn(4, 4, requires_grad=True)
        with use_backend(backend, op='modules'):
            losses, _ = cross_entropy_loss(logits, target, **options)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        assert losses.isnan().tolist() == [False, True, False, True]
        assert gradient.isnan().all(1).tolist() == gradient.isnan().any(1).tolist() == [False, True, False, True]
        assert not gradient[2].any()


def test_targets_that_are_none(monkeypatch):
    check_targets_that_are_none(monkeypatch, 'reference')


def test_values_on_request(monkeypatch):
    import fla.modules.fused_cross_entropy.ops as module

    monkeypatch.setattr(module, 'readable', lambda target: False)  # as for targets on a device
    logits, target = torch.randn(2, 4), torch.tensor([1, 9])
    losses, _ = cross_entropy_loss(logits, target)
    assert losses.isnan().tolist() == [False, True]
    with policy_context(Policy(check_values=True)), pytest.raises(ValueError, match='target must be in'):
        cross_entropy_loss(logits, target)
