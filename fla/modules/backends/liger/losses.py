"""Liger-Kernel: cross entropies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fla.backends.backend.base import Verdict
from fla.modules.backends.limits import check_size
from fla.modules.checks import under_autocast
from fla.opaque import opaque
from fla.ops.launch.triton_call import on_device_of

_NUMBERS = 'float label_smoothing, float logit_softcapping, int ignore_index'
_IGNORED = -100


def _safe(target: torch.Tensor, classes: int, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 targets for Liger, and which of the given ones are wrong: neither a class nor ignored. Liger reads, and its
    linear loss writes, wherever a target points. So a wrong target is replaced by a class, and its result by NaN."""
    target = target.long()
    clamped, ignored = target.clamp(0, classes - 1), target == ignore_index
    return clamped.masked_fill(ignored, _IGNORED), (clamped != target) & ~ignored


def _forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float,
    logit_softcapping: float,
    ignore_index: int,
    lse_square_scale: float,
    now: bool,
) -> Any:
    with on_device_of(logits):
        from liger_kernel.ops.cross_entropy import cross_entropy_forward

        # a copy: Liger writes the gradient over logits that require one
        copy = logits.detach().clone(memory_format=torch.contiguous_format).requires_grad_(now)
        safe, wrong = _safe(target, logits.shape[1], ignore_index)
        losses, z_losses, *_, dlogits = cross_entropy_forward(
            *(copy, safe, None, _IGNORED, lse_square_scale, label_smoothing, 'none'),
            *(logit_softcapping or None, True),
        )
        return losses.masked_fill(wrong, float('nan')), z_losses, dlogits.detach() if now else None


def _fake(logits: torch.Tensor, *others: Any) -> Any:
    losses = (logits.new_empty(logits.shape[:1]) for _ in range(2))
    return *losses, logits.new_empty(logits.shape) if others[-1] else None


def _backward(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float,
    logit_softcapping: float,
    ignore_index: int,
    lse_square_scale: float,
    gradient: torch.Tensor | None,
    dlosses: torch.Tensor,
) -> torch.Tensor:
    if gradient is None:
        numbers = (label_smoothing, logit_softcapping, ignore_index, lse_square_scale)
        *_, gradient = _forward(logits, target, *numbers, True)
    assert gradient is not None
    safe, wrong = _safe(target, logits.shape[1], ignore_index)
    # the incoming gradient of an ignored loss may be anything: for a mean over no losses it is infinite
    factors = dlosses.masked_fill(wrong, float('nan')).masked_fill(safe == _IGNORED, 0.0)
    return gradient * factors[:, None]


_cross_entropy = opaque(
    'fla::liger_cross_entropy_loss',
    schema=(
        f'(Tensor logits, Tensor target, {_NUMBERS}, float lse_square_scale, bool now) '
        '-> (Tensor losses, Tensor z_losses, Tensor? gradient)'
    ),
    forward=_forward,
    fake=_fake,
    backward=_backward,
    grads=('logits',),
    intermediates=('gradient',),
    non_differentiable=('z_losses',),
)


def _linear_forward(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    label_smoothing: float,
    logit_softcapping: float,
    ignore_index: int,
    reduction: str,
    x_now: bool,
    weight_now: bool,
    bias_now: bool,
) -> Any:
    with on_device_of(x):
        from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

        given, out, offset = (
            None if one is None else one.detach().contiguous().requires_grad_(now)
            for one, now in ((x, x_now), (weight, weight_now), (bias, bias_now))
        )
        safe, wrong = _safe(target, weight.shape[0], ignore_index)
        loss, *_, dx, dweight, dbias = fused_linear_cross_entropy_forward(
            *(given, out, safe, None, offset, _IGNORED, 0.0, label_smoothing, reduction),
            logit_softcapping or None,
        )
        undefined = wrong.any()
        if reduction == 'mean':
            # all targets are ignored; Liger returns 0
            undefined |= (safe == _IGNORED).all()
        loss = loss.masked_fill(undefined, float('nan'))
        gradients = ((dx, x_now), (dweight, weight_now), (dbias, bias_now))
        return (loss.float(), *(one.detach() if now and one is not None else None for one, now in gradients))


def _linear_fake(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *others: Any
) -> Any:
    given = zip((x, weight, bias), others[-3:], strict=True)
    gradients = (one.new_empty(one.shape) if now and one is not None else None for one, now in given)
    return (x.new_empty((), dtype=torch.float32), *gradients)


def _linear_backward(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    label_smoothing: float,
    logit_softcapping: float,
    ignore_index: int,
    reduction: str,
    dx: torch.Tensor | None,
    dweight: torch.Tensor | None,
    dbias: torch.Tensor | None,
    dloss: torch.Tensor,
    needs_input_grad: Sequence[bool],
) -> Any:
    gradients: Sequence[torch.Tensor | None] = (dx, dweight, dbias)
    if any(need and one is None for need, one in zip(needs_input_grad, gradients, strict=True)):
        numbers = (label_smoothing, logit_softcapping, ignore_index, reduction)
        _, *gradients = _linear_forward(x, target, weight, bias, *numbers, *needs_input_grad)
    from fla.modules.kernels.cross_entropy import scaled

    _, wrong = _safe(target, weight.shape[0], ignore_index)
    # a wrong target affects its row of dx, and all of dweight and dbias
    factor_of_sums = dloss.masked_fill(wrong.any(), float('nan'))
    dx, dweight, dbias = (
        scaled(one, factor) if need and one is not None else None
        for need, one, factor in zip(needs_input_grad, gradients, (dloss, factor_of_sums, factor_of_sums), strict=True)
    )
    return None if dx is None else dx.masked_fill_(wrong[:, None], float('nan')), dweight, dbias


_linear_cross_entropy = opaque(
    'fla::liger_fused_linear_cross_entropy_loss',
    schema=(
        f'(Tensor x, Tensor target, Tensor weight, Tensor? bias, {_NUMBERS}, str reduction, bool x_now, bool weight_now, '
        'bool bias_now) -> (Tensor loss, Tensor? dx, Tensor? dweight, Tensor? dbias)'
    ),
    forward=_linear_forward,
    fake=_linear_fake,
    backward=_linear_backward,
    grads=('x', 'weight', 'bias'),
    intermediates=('dx', 'dweight', 'dbias'),
)


class LigerLosses:
    """Methods of `LigerBackend` for cross entropies, without logit scale and shards. Liger reads the number of targets on
    the host, so a call synchronises and cannot be captured."""

    def cross_entropy_loss_verifier(self, logits: torch.Tensor) -> Verdict:
        if logits.dtype != torch.float32:
            return False, (
                'losses have the dtype of the logits and are rounded to it: logits must be float32, got %s',
                logits.dtype,
            )
        return check_size(logits, 'logits')

    def cross_entropy_loss(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        logit_softcapping: float | None = None,
        ignore_index: int = -100,
        # lint: allow ignored-argument because it only permits to overwrite, and this copies
        inplace_backward: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cap = 0.0 if logit_softcapping is None else float(logit_softcapping)
        numbers = (float(label_smoothing), cap, ignore_index, float(lse_square_scale))
        losses, z_losses = _cross_entropy(logits, target, *numbers, torch.is_grad_enabled() and logits.requires_grad)
        return losses, z_losses

    def fused_linear_cross_entropy_loss_verifier(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, reduction: str
    ) -> Verdict:
        if reduction == 'none':
            return False, "losses without a reduction have no gradients: reduction must be 'mean' or 'sum'"
        if x.dtype == torch.float16:
            return False, 'gradients underflow before the loss scale multiplies them: x must be bfloat16 or float32'
        if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
            return False, ('weight and bias must have the dtype of x, %s', x.dtype)
        if under_autocast(x):
            return False, 'under autocast Liger chooses the dtypes of its products itself'
        return check_size(x)  # a chunk of its logits is about as large as x

    def fused_linear_cross_entropy_loss(
        self,
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        logit_softcapping: float | None = None,
        # lint: allow ignored-argument because it does not affect the result, and Liger chooses its own
        num_chunks: int = 8,
        reduction: str = 'mean',
    ) -> torch.Tensor:
        cap = 0.0 if logit_softcapping is None else float(logit_softcapping)
        now = torch.is_grad_enabled()
        loss: torch.Tensor = _linear_cross_entropy(
            *(x.reshape(-1, x.shape[-1]), target.reshape(-1), weight, bias),
            *(float(label_smoothing), cap, ignore_index, reduction),
            *(now and one is not None and one.requires_grad for one in (x, weight, bias)),
        )
        return loss
