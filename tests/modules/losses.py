"""Cross entropies by their definition, in float64 and row by row, and the calls that every implementation is tested with."""

import pytest
import torch

from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
from tests import bounds

from .oracle import error, served_by

OPTIONS = {
    'plain': {},
    'smoothed': {'label_smoothing': 0.1},
    'scaled': {'logit_scale': 0.7},
    'capped': {'logit_softcapping': 3.0},
    'everything': {'label_smoothing': 0.2, 'logit_scale': 1.5, 'logit_softcapping': 5.0, 'ignore_index': 2},
}


def oracle(
    logits,
    target,
    label_smoothing=0.0,
    logit_scale=1.0,
    lse_square_scale=0.0,
    logit_softcapping=None,
    ignore_index=-100,
    **_,
):
    losses, z_losses = [], []
    for row, wanted in zip(logits, target.tolist(), strict=True):
        if wanted == ignore_index:
            losses.append(row.sum() * 0)
            z_losses.append(row.sum() * 0)
            continue
        v = row * logit_scale
        v = v if logit_softcapping is None else logit_softcapping * (v / logit_softcapping).tanh()
        log_p = v.log_softmax(0)
        lse = v[0] - log_p[0]
        z_losses.append(lse_square_scale * lse**2)
        loss = -(1 - label_smoothing) * log_p[wanted] + z_losses[-1]
        losses.append(loss - label_smoothing * log_p.mean() if label_smoothing else loss)
    return torch.stack(losses), torch.stack(z_losses).detach()


def linear_oracle(x, target, weight, bias=None, reduction='mean', num_chunks=8, **options):
    logits = x.flatten(0, -2) @ weight.T
    losses, _ = oracle(logits if bias is None else logits + bias, target.flatten(), **options)
    if reduction == 'none':
        return losses.reshape(target.shape)
    counted = (target != options.get('ignore_index', -100)).sum()
    return losses.sum() if reduction == 'sum' else losses.sum() / counted


def targets(count, classes, ignored=(), ignore_index=-100, seed=0):
    target = torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))
    target[list(ignored)] = ignore_index
    return target


def gradients(loss, weights, inputs):
    return torch.autograd.grad((loss.double() * weights.to(loss.device)).sum(), inputs)


# options of the linear loss; `ignored` is a class that is `ignore_index` for some rows
LINEAR = {
    'plain': {},
    'smoothed': {'label_smoothing': 0.1},
    'scaled, one chunk': {'logit_scale': 0.7, 'num_chunks': 1},
    'capped, more chunks than rows': {'logit_softcapping': 3.0, 'num_chunks': 1000},
    'summed': {'reduction': 'sum', 'num_chunks': 3},
    'of each': {'reduction': 'none', 'ignore_index': 0},
    'everything': {
        'label_smoothing': 0.2,
        'logit_scale': 1.3,
        'logit_softcapping': 6.0,
        'ignore_index': 1,
        'num_chunks': 2,
        'reduction': 'sum',
    },
}


def cut_finely(monkeypatch):
    """Makes few rows go through chunks, like many."""
    losses = pytest.importorskip('fla.modules.kernels.linear_cross_entropy')
    monkeypatch.setattr(losses, 'least_rows', lambda D: 1)
    # and the logits of one row are not saved
    monkeypatch.setattr(losses, 'takes_eager_path', lambda *tensors: False)


def check_linear(options, rows, D, V, dtype, device, bias=True):
    """Loss and gradients of `default` against the definition; logits have an RMS of about 2."""
    generator = torch.Generator().manual_seed(1)

    def new(*shape, by=1.0):
        return (torch.randn(shape, generator=generator) * by).to(device, dtype)

    tensors = [new(rows, D), new(V, D, by=1.7 * D**-0.5), *([new(V)] if bias else [])]
    target = torch.randint(V, (rows,), generator=generator).to(device)
    target[: rows // 8] = options.get('ignore_index', -100)
    given, exact = [t.clone().requires_grad_() for t in tensors], [t.double().requires_grad_() for t in tensors]
    with served_by('default'):
        loss = fused_linear_cross_entropy_loss(given[0], target, *given[1:], **options)
    expected = linear_oracle(exact[0], target, *exact[1:], **options)
    bound = bounds.of_linear_loss(dtype, 2.3)
    assert error(expected, loss) <= bound
    # large enough that gradients of half-precision logits do not underflow
    weights = torch.linspace(1, 2, loss.numel()).double().reshape(loss.shape) * (512 if loss.dim() == 0 else 8)
    for wanted, got in zip(gradients(expected, weights, exact), gradients(loss, weights, given), strict=True):
        assert got.dtype == dtype
        assert error(wanted, got) <= bound
