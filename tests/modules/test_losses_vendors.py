"""Liger-Kernel's cross entropies with stand-ins for the package: what is accepted, what it gets, and what comes back. On a
GPU the package itself, where it is installed."""

import inspect
import sys
import types

import pytest
import torch

from fla.backends import default_dispatcher, explain, use_backend
from fla.modules import checks
from fla.modules.backends.liger import LigerBackend, losses
from fla.modules.fused_cross_entropy import cross_entropy_loss
from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
from tests import bounds
from tests.ops.vendors import BF16, FP16, FP32, H100, fakes, install, pretend, ran, trust
from tests.vendor_signatures import SIGNATURES

from .losses import gradients, linear_oracle, oracle, targets
from .oracle import differentiating, error, opcheck, served_by

CROSS = 'liger_kernel.ops.cross_entropy.cross_entropy_forward'
LINEAR = 'liger_kernel.ops.fused_linear_cross_entropy.fused_linear_cross_entropy_forward'


def points_inside(target, classes, ignore_index):
    """The package reads, and its linear loss writes, where a target points."""
    assert target.dtype == torch.int64
    return bool(((target == ignore_index) | ((target >= 0) & (target < classes))).all())


def cross_entropy_forward(
    _input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss
):
    """Like the package, writes the gradient over logits that require one."""
    assert (weight, reduction, return_z_loss) == (None, 'none', True)
    assert points_inside(target, _input.shape[1], ignore_index)
    assert _input.is_contiguous()
    exact = _input.detach().double().requires_grad_()
    with differentiating():
        found, z_losses = oracle(exact, target, label_smoothing, 1.0, lse_square_scale, softcap, ignore_index)
        (gradient,) = torch.autograd.grad(found.sum(), exact)
    if _input.requires_grad:
        _input.data.copy_(gradient)
    return found.detach().float(), z_losses.float(), None, None, _input


def fused_linear_cross_entropy_forward(
    _input, weight, target, ce_weight, bias, ignore_index, lse_square_scale, label_smoothing, reduction, softcap
):
    assert (ce_weight, lse_square_scale) == (None, 0.0)
    assert points_inside(target, weight.shape[0], ignore_index)
    given = [None if one is None else one.detach().double().requires_grad_() for one in (_input, weight, bias)]
    options = {'ignore_index': ignore_index, 'label_smoothing': label_smoothing, 'logit_softcapping': softcap}
    with differentiating():
        loss = linear_oracle(given[0], target, *given[1:], reduction=reduction, **options)
        found = iter(torch.autograd.grad(loss, [one for one in given if one is not None]))
    made = [None if one is None else next(found) for one in given]
    made = [
        one if one is None or like.requires_grad else torch.zeros_like(one)
        for one, like in zip(made, (_input, weight, bias), strict=True)
    ]
    return (
        loss.detach().nan_to_num(0.0).float(),
        None,
        None,
        None,
        *(one if one is None else one.to(_input.dtype) for one in made),
    )


for path, stand_in in ((CROSS, cross_entropy_forward), (LINEAR, fused_linear_cross_entropy_forward)):
    assert tuple(inspect.signature(stand_in).parameters) == SIGNATURES[path]


@pytest.fixture
def package(monkeypatch, tmp_path):
    """The backend for Liger-Kernel, enabled, seemingly on an H100."""
    install(monkeypatch, tmp_path, 'liger_kernel', 'liger-kernel', '0.8.5', __path__=[])
    for path, functions in (
        ('ops', {}),
        ('ops.cross_entropy', {'cross_entropy_forward': cross_entropy_forward}),
        ('ops.fused_linear_cross_entropy', {'fused_linear_cross_entropy_forward': fused_linear_cross_entropy_forward}),
    ):
        made = types.ModuleType(f'liger_kernel.{path}')
        made.__path__ = []
        vars(made).update(functions)
        monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setenv('FLA_LIGER', '1')
    pretend(monkeypatch, H100)
    trust(monkeypatch, LigerBackend)
    default_dispatcher().reset()
    yield
    default_dispatcher().reset()


def cross(dtype=FP32, rows=3, **changes):
    return {'logits': torch.randn(rows, 16).to(dtype), 'target': targets(rows, 16), **changes}


def linear(dtype=BF16, rows=3, **changes):
    given = {'x': torch.randn(rows, 8).to(dtype), 'target': targets(rows, 16), 'weight': torch.randn(16, 8).to(dtype)}
    return {**given, **changes}


def reason(function, arguments):
    decision = explain(function, **fakes(arguments))
    assert decision.winner != 'liger'
    return decision['liger'].reason


@pytest.mark.parametrize('options', [{}, {'label_smoothing': 0.1, 'logit_softcapping': 3.0, 'ignore_index': 2}], ids=len)
def test_served(package, options):
    served, (found, z_losses) = ran(cross_entropy_loss, 'modules', fakes({**cross(), **options, 'lse_square_scale': 0.1}))
    assert served == 'liger'
    assert (found.shape, found.dtype, z_losses.shape) == ((3,), FP32, (3,))
    served, loss = ran(fused_linear_cross_entropy_loss, 'modules', fakes({**linear(), **options, 'num_chunks': 2}))
    assert (served, loss.shape, loss.dtype) == ('liger', (), FP32)


@pytest.mark.parametrize(
    ('function', 'changes', 'why'),
    [
        (cross_entropy_loss, {'dtype': BF16}, 'logits must be float32, got torch.bfloat16'),
        (cross_entropy_loss, {'rows': 0}, 'is empty, and the kernels cannot be launched on nothing'),
        (cross_entropy_loss, {'logit_scale': 2.0}, 'argument logit_scale is not supported'),
        (
            cross_entropy_loss,
            {'process_group': torch.distributed.ProcessGroup(0, 1)},
            'argument process_group is not supported',
        ),
        (
            cross_entropy_loss,
            {'logits': torch.empty(1, 1).expand(2**15, 2**16), 'target': torch.zeros(2**15, dtype=torch.int64)},
            'fewer than 2^31 elements, got 2147483648',
        ),
        (fused_linear_cross_entropy_loss, {'reduction': 'none'}, "reduction must be 'mean' or 'sum'"),
        (fused_linear_cross_entropy_loss, {'dtype': FP16}, 'x must be bfloat16 or float32'),
        (fused_linear_cross_entropy_loss, {'rows': 0}, 'is empty, and the kernels cannot be launched on nothing'),
        (fused_linear_cross_entropy_loss, {'dtype': torch.float64}, "dtype of 'x' must be"),
        (
            fused_linear_cross_entropy_loss,
            {
                'x': torch.empty(1, 1, dtype=BF16).expand(2**15, 2**16),
                'target': torch.zeros(2**15, dtype=torch.int64),
                'weight': torch.empty(1, 1, dtype=BF16).expand(16, 2**16),
            },
            'fewer than 2^31 elements, got 2147483648',
        ),
        (fused_linear_cross_entropy_loss, {'logit_scale': 2.0}, 'argument logit_scale is not supported'),
    ],
)
def test_refused(package, function, changes, why):
    arguments = cross(**changes) if function is cross_entropy_loss else linear(**changes)
    assert why in reason(function, arguments)


def test_refused_under_autocast(package, monkeypatch):
    for one in (checks, losses):
        monkeypatch.setattr(one, 'under_autocast', lambda tensor: True)
    assert 'under autocast' in reason(fused_linear_cross_entropy_loss, linear())
    mixed = linear(x=torch.randn(3, 8))
    assert 'weight and bias must have the dtype of x' in reason(fused_linear_cross_entropy_loss, mixed)
    mixed = linear(bias=torch.randn(16))
    assert 'weight and bias must have the dtype of x' in reason(fused_linear_cross_entropy_loss, mixed)


def test_off_until_somebody_switches_it_on(package, monkeypatch):
    monkeypatch.delenv('FLA_LIGER')
    decision = explain(cross_entropy_loss, **fakes(cross()))
    assert (decision.winner, decision['liger'].verdict) == ('default', 'disabled')


@pytest.mark.parametrize('now', [True, False])
def test_numbers_of_cross_entropy(package, now):
    """The arguments that the stand-in receives and checks, and the results."""
    logits, target = torch.randn(16, 5).t(), targets(5, 16, [1]).int()
    exact, before = logits.double().requires_grad_(), logits.clone()
    numbers = (0.1, 3.0, -100, 0.01)
    found, z_losses, gradient = losses._forward(logits, target, *numbers, now)
    expected, expected_z = oracle(exact, target, 0.1, 1.0, 0.01, 3.0)
    assert error(expected, found) <= bounds.EXACT[FP32]
    assert error(expected_z, z_losses) <= bounds.EXACT[FP32]
    weights = torch.linspace(1, 2, 5).double()
    got = losses._backward(logits, target, *numbers, gradient, weights.float())
    assert error(gradients(expected, weights, exact)[0], got) <= bounds.EXACT[FP32]
    assert torch.equal(logits, before)


@pytest.mark.interpreted
@pytest.mark.parametrize('now', [(True, True, True), (True, False, False), (False, True, False), (False, False, False)])
@pytest.mark.parametrize('reduction', ['mean', 'sum'])
@pytest.mark.parametrize('with_bias', [True, False])
def test_numbers_of_the_linear_one(package, reduction, now, with_bias):
    """Gradients that the forward saved, and those that the backward computes."""
    x, weight, bias = torch.randn(8, 5).t(), torch.randn(16, 8), torch.randn(32)[::2] if with_bias else None
    exact = [one.double().requires_grad_() for one in (x, weight, bias) if one is not None]
    target, now = targets(5, 16, [1]).int(), (*now[:2], now[2] and with_bias)
    given, numbers = (x, target, weight, bias), (0.1, 3.0, -100, reduction)
    loss, *kept = losses._linear_forward(*given, *numbers, *now)
    assert [one is not None for one in kept] == list(now)
    expected = linear_oracle(exact[0], target, *exact[1:], reduction=reduction, label_smoothing=0.1, logit_softcapping=3.0)
    assert error(expected, loss) <= bounds.EXACT[FP32]
    wanted = torch.autograd.grad(expected * 3, exact, retain_graph=True)
    for need in (now, (True, False, False), (False, True, with_bias), (True, True, with_bias)):
        found = losses._linear_backward(*given, *numbers, *kept, torch.tensor(3.0), need)
        assert [one is not None for one in found] == list(need)
        for one, right in zip(found, wanted, strict=False):
            assert one is None or error(right, one) <= bounds.EXACT[FP32]


@pytest.mark.parametrize('reduction', ['mean', 'sum'])
def test_linear_of_ignored_rows(package, reduction):
    ignored = torch.full((5,), -100)
    given = (torch.randn(5, 8), ignored, torch.randn(16, 8), None)
    loss = losses._linear_forward(*given, 0.1, 3.0, -100, reduction, False, False, False)[0]
    assert loss.isnan() if reduction == 'mean' else loss == 0


@pytest.mark.parametrize('ignore_index', [-100, 3])
def test_nothing_goes_back_through_ignored_rows(package, ignore_index):
    """For any incoming gradient: that of a mean over no losses is infinite."""
    logits, target = torch.randn(4, 16), torch.tensor([ignore_index, ignore_index, 5, ignore_index])
    numbers = (0.1, 3.0, ignore_index, 0.01)
    *_, gradient = losses._forward(logits, target, *numbers, True)
    got = losses._backward(logits, target, *numbers, gradient, torch.tensor([torch.inf, torch.nan, 2.0, -torch.inf]))
    exact = logits.double().requires_grad_()
    (wanted,) = torch.autograd.grad(oracle(exact, target, 0.1, 1.0, 0.01, 3.0, ignore_index)[0][2] * 2, exact)
    assert error(wanted, got) <= bounds.EXACT[FP32]
    assert not got[[0, 1, 3]].any()


# of 16 classes, besides ignore_index
WRONG = [
    (wrong, ignored) for ignored in (-100, 3, 40) for wrong in (16, 17, 10**6, 2**31 - 1, -1, -7, -100) if wrong != ignored
]


@pytest.mark.parametrize('now', [True, False])
@pytest.mark.parametrize(('wrong', 'ignore_index'), WRONG)
def test_wrong_targets_of_cross_entropy(package, wrong, now, ignore_index):
    """Targets on a GPU are not read: Liger accesses nothing out of bounds, and the same rows are NaN as by the default."""
    logits, target = torch.randn(5, 16), targets(5, 16, [1], ignore_index).int()
    target[3] = wrong
    numbers = (0.1, 3.0, ignore_index, 0.01)
    found, z_losses, gradient = losses._forward(logits, target, *numbers, now)
    got = losses._backward(logits, target, *numbers, gradient, torch.ones(5))
    right = [0, 1, 2, 4]
    exact = logits[right].double().requires_grad_()
    expected, expected_z = oracle(exact, target[right], 0.1, 1.0, 0.01, 3.0, ignore_index)
    assert found.isnan().tolist() == [False, False, False, True, False]
    assert got[3].isnan().all()
    assert error(expected, found[right]) <= bounds.EXACT[FP32]
    assert error(expected_z, z_losses[right]) <= bounds.EXACT[FP32]
    assert error(gradients(expected, torch.ones(4), exact)[0], got[right]) <= bounds.EXACT[FP32]


@pytest.mark.interpreted
@pytest.mark.parametrize('now', [True, False])
@pytest.mark.parametrize('reduction', ['mean', 'sum'])
@pytest.mark.parametrize(('wrong', 'ignore_index'), WRONG)
def test_wrong_targets_of_the_linear_one(package, wrong, reduction, now, ignore_index):
    """A wrong target counts in the mean, and does not affect the gradients of other rows."""
    x, weight, bias = torch.randn(5, 8), torch.randn(16, 8), torch.randn(16)
    target = targets(5, 16, [1], ignore_index).int()
    target[3] = wrong
    given, numbers = (x, target, weight, bias), (0.1, 3.0, ignore_index, reduction)
    loss, *kept = losses._linear_forward(*given, *numbers, now, now, now)
    assert loss.isnan()
    dx, dweight, dbias = losses._linear_backward(*given, *numbers, *kept, torch.tensor(1.0), (True, True, True))
    assert dweight.isnan().all()
    assert dbias.isnan().all()
    assert dx[3].isnan().all()
    right = [0, 1, 2, 4]
    exact = x[right].double().requires_grad_()
    options = {'label_smoothing': 0.1, 'logit_softcapping': 3.0, 'ignore_index': ignore_index}
    expected = linear_oracle(exact, target[right], weight.double(), bias.double(), reduction='sum', **options)
    counted = int((target != ignore_index).sum()) if reduction == 'mean' else 1
    (wanted,) = torch.autograd.grad(expected / counted, exact)
    assert error(wanted, dx[right]) <= bounds.EXACT[FP32]
    *_, dbias = losses._linear_backward(*given, *numbers, *kept, torch.tensor(1.0), (False, False, True))
    assert dbias.isnan().all()


@pytest.mark.interpreted
def test_operators_keep_the_rules(package):
    logits, target = torch.randn(3, 16, requires_grad=True), targets(3, 16)
    opcheck(losses._cross_entropy, logits, target, 0.1, 3.0, -100, 0.01, True)
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((3, 8), (16, 8), (16,)))
    opcheck(losses._linear_cross_entropy, x, target, weight, bias, 0.1, 3.0, -100, 'mean', True, True, True)
    opcheck(losses._linear_cross_entropy, x, target, weight.detach(), None, 0.1, 3.0, -100, 'sum', True, False, False)


def test_the_operators_have_gradients():
    """Called through the backend, as in compiled code."""
    given = {n: one.to('meta') for n, one in cross().items()}
    given['logits'].requires_grad_()
    (gradient,) = torch.autograd.grad(LigerBackend().cross_entropy_loss(**given)[0].sum(), given['logits'])
    assert gradient.shape == (3, 16)
    given = {n: one.to('meta') for n, one in linear(bias=torch.randn(16, dtype=BF16)).items()}
    inputs = [given[n].requires_grad_() for n in ('x', 'weight', 'bias')]
    loss = LigerBackend().fused_linear_cross_entropy_loss(**given)
    for one, gradient in zip(inputs, torch.autograd.grad(loss, inputs), strict=True):
        assert (gradient.shape, gradient.dtype) == (one.shape, one.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize('options', [{}, {'label_smoothing': 0.1}, {'logit_softcapping': 3.0, 'ignore_index': 2}], ids=str)
def test_liger_itself(monkeypatch, options):
    """Forward and backward of the real package, within our bounds."""
    pytest.importorskip('liger_kernel')
    monkeypatch.setenv('FLA_LIGER', '1')
    logits, target = torch.randn(50, 5003, device='cuda') * 2, targets(50, 5003, [1]).cuda()
    target[1] = options.get('ignore_index', -100)
    given, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    with use_backend('liger', op='modules'):
        found, z_losses = cross_entropy_loss(given, target, lse_square_scale=1e-3, **options)
    expected, expected_z = oracle(exact, target, lse_square_scale=1e-3, **options)
    assert error(expected, found) <= bounds.EXACT[FP32]
    assert error(expected_z, z_losses) <= bounds.EXACT[FP32]
    weights = torch.linspace(1, 2, 50).double()
    (got,), (wanted,) = gradients(found, weights, given), gradients(expected, weights, exact)
    assert error(wanted, got) <= bounds.EXACT[FP32]
    for dtype in (FP32, BF16):
        tensors = [(torch.randn(50, 64, device='cuda') / 4).to(dtype), torch.randn(5003, 64, device='cuda').to(dtype)]
        given, exact = [t.clone().requires_grad_() for t in tensors], [t.double().requires_grad_() for t in tensors]
        with use_backend('liger', op='modules'):
            loss = fused_linear_cross_entropy_loss(given[0], target, given[1], **options)
        expected = linear_oracle(exact[0], target, exact[1], **options)
        bound = bounds.of_linear_loss(dtype, 2.0)
        assert error(expected, loss) <= bound
        for a, b in zip(torch.autograd.grad(expected, exact), torch.autograd.grad(loss * 1.0, given), strict=True):
            assert error(a, b) <= bound


@pytest.mark.gpu
@pytest.mark.parametrize('wrong', [5003, 2**40, -7])
def test_wrong_targets_by_liger_itself(monkeypatch, wrong):
    """The same values are NaN as by the default; all others equal those with a valid target bit by bit."""
    pytest.importorskip('liger_kernel')
    monkeypatch.setenv('FLA_LIGER', '1')
    target = targets(50, 5003, [1]).cuda()
    target[7] = 0
    bad = target.clone()
    bad[7] = wrong
    rows = torch.arange(50, device='cuda') == 7
    x, weight = (torch.randn(n, 64, device='cuda', requires_grad=True) for n in (50, 5003))
    logits = torch.randn(50, 5003, device='cuda', requires_grad=True)
    with use_backend('liger', op='modules'), served_by('liger'):
        (good, _), (found, _) = (cross_entropy_loss(logits, one) for one in (target, bad))
        whole, broken = (fused_linear_cross_entropy_loss(x, one, weight) for one in (target, bad))
    assert torch.equal(found.isnan(), rows)
    assert torch.equal(found[~rows], good[~rows])
    (wanted,), (got,) = (torch.autograd.grad(one.sum(), logits) for one in (good, found))
    assert got[7].isnan().all()
    assert torch.equal(got[~rows], wanted[~rows])
    assert broken.isnan()
    (dx, _), (got, dweight) = (torch.autograd.grad(one * 1.0, (x, weight)) for one in (whole, broken))
    assert got[7].isnan().all()
    assert dweight.isnan().all()
    assert torch.equal(got[~rows], dx[~rows])
