"""The Triton default of the linear cross entropy: logits and their gradients in chunks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fla.modules.checks import under_autocast
from fla.modules.kernels.cross_entropy import Options, launch_backward, launch_forward, reduced, scaled
from fla.opaque import loop_under_vmap, opaque, takes_eager_path
from fla.ops.autocast import without_autocast
from fla.ops.launch.triton_call import DEVICES

# Besides the logits, each chunk reads the weight twice, and reads and writes its gradient: 8 V D bytes of 16-bit numbers for
# 6 V D operations per row. A GPU does 170 to 280 operations in the time of one byte. So from about 400 rows on a chunk is
# bound by its products, and at 1024 rows it hides most of the traffic. The logits of D / 2 rows take half the memory of the
# weight, so that smaller chunks save little.
LEAST_ROWS = 1024


def least_rows(D: int) -> int:
    """The number of rows up to which they are not cut into chunks."""
    return max(LEAST_ROWS, D // 32 * 16)


def rows_of_chunk(count: int, D: int, num_chunks: int) -> int:
    """Rows of a chunk, a multiple of 16, for `count` rows in at most `num_chunks` chunks of about the same size."""
    chunks = max(1, min(num_chunks, -(-count // least_rows(D))))
    return -(-count // (16 * chunks)) * 16


def _buffer(rows: int, V: int, like: torch.Tensor) -> torch.Tensor:
    """Memory for logits `[rows, V]` whose row stride is a multiple of 16, so that Triton loads 16 bytes at a time."""
    # Zeros under the interpreter: on a CPU, PyTorch's bfloat16 products read past an odd V, and NaN there makes them NaN.
    new = torch.zeros if like.device.type == 'cpu' else torch.empty
    return new((rows, -(-V // 16) * 16), dtype=like.dtype, device=like.device)[:, :V]


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


class _OneChunk(torch.autograd.Function):
    """Few rows in eager code: the logits are saved, so that the backward neither recomputes them nor scales gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: Options,
        reduction: str,
    ) -> torch.Tensor:
        logits = _buffer(x.shape[0], weight.shape[0], x)
        _product(x, weight, bias, logits)
        losses, _, maximum, log_sum = launch_forward(logits, target, options)
        loss, share = (losses, None) if reduction == 'none' else reduced(losses, target, options.ignore_index, reduction)
        ctx.save_for_backward(x, target, weight, logits, maximum, log_sum, share)
        ctx.options = options
        return loss

    @staticmethod
    @loop_under_vmap
    def backward(ctx: Any, dloss: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                'create_graph=True reached the backward of fused_linear_cross_entropy_loss, which has no derivative of its '
                'own; use the backend `reference` for double backward'
            )
        x, target, weight, logits, maximum, log_sum, share = ctx.saved_tensors
        dlosses = dloss if share is None else (dloss * share).expand(target.shape)
        dlogits = _buffer(logits.shape[0], logits.shape[1], logits)
        launch_backward(logits, target, maximum, log_sum, dlosses, dlogits, ctx.options)
        needs_x, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        # the forward has cast its inputs; autocast around the backward is not meant for these products
        with without_autocast(x.device):
            dx = torch.mm(dlogits, weight) if needs_x else None
            dweight = torch.mm(dlogits.t(), x) if needs_weight else None
        dbias = dlogits.sum(0, dtype=torch.float32).to(x.dtype) if needs_bias else None
        return dx, None, dweight, dbias, None, None


def _in_chunks(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: Options,
    num_chunks: int,
    dlosses: torch.Tensor | None,
    needs: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Returns losses `[N]` and the needed gradients of x, weight and bias, given gradients `dlosses` (None: 1 each).

    One buffer holds the logits of a chunk, then their gradients. The gradient of the weight accumulates in the weight's
    dtype. That rounds it once per chunk, which is no worse than the rounding of the logits; in float32, every chunk would
    move twice the memory.
    """
    (count, D), V = x.shape, weight.shape[0]
    dx = torch.empty((count, D), dtype=x.dtype, device=x.device) if needs[0] else None
    dweight = x.new_empty((V, D)) if needs[1] and count else x.new_zeros((V, D)) if needs[1] else None
    dbias = torch.zeros(V, dtype=torch.float32, device=x.device) if needs[2] else None
    if dlosses is None:
        dlosses = torch.ones((), dtype=torch.float32, device=x.device).expand(count)
    rows = rows_of_chunk(count, D, num_chunks)
    buffer = _buffer(min(rows, count), V, x)
    out = torch.empty((4, -(-count // 16) * 16), dtype=torch.float32, device=x.device)[:, :count]
    for start in range(0, count, max(rows, 1)):
        part = slice(start, min(start + rows, count))
        x_part, target_part, logits = x[part], target[part], buffer[: part.stop - part.start]
        _product(x_part, weight, bias, logits)
        _, _, maximum, log_sum = launch_forward(logits, target_part, options, out=out[:, part].unbind())
        if not any(needs):
            continue
        launch_backward(logits, target_part, maximum, log_sum, dlosses[part], logits, options)
        if dx is not None:
            torch.mm(logits, weight, out=dx[part])
        if dweight is not None:
            dweight.addmm_(logits.t(), x_part, beta=1 if start else 0)
        if dbias is not None:
            dbias += logits.sum(0, dtype=torch.float32)
    return out[0], dx, dweight, dbias if dbias is None else dbias.to(x.dtype)


def _options(
    label_smoothing: float, logit_scale: float, logit_softcapping: float, ignore_index: int, classes: int
) -> Options:
    return Options(label_smoothing, logit_scale, 0.0, logit_softcapping, ignore_index, 0, classes)


def _forward(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    logit_scale: float,
    logit_softcapping: float,
    num_chunks: int,
    reduction: str,
    *now: bool,
) -> Any:
    """`now`: which of the gradients of x, weight and bias the forward computes."""
    options = _options(label_smoothing, logit_scale, logit_softcapping, ignore_index, weight.shape[0])
    losses, *gradients = _in_chunks(x, target, weight, bias, options, num_chunks, None, now)
    loss, share = (losses, None) if reduction == 'none' else reduced(losses, target, ignore_index, reduction)
    return loss, share, *gradients


def _fake(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *others: Any) -> Any:
    *_, reduction, dx_now, dweight_now, dbias_now = others
    loss = x.new_empty(target.shape if reduction == 'none' else (), dtype=torch.float32)
    share = None if reduction == 'none' else torch.empty_like(loss)
    gradients = (
        one.new_empty(one.shape) if now and one is not None else None
        for one, now in ((x, dx_now), (weight, dweight_now), (bias, dbias_now))
    )
    return loss, share, *gradients


def _backward(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    logit_scale: float,
    logit_softcapping: float,
    num_chunks: int,
    share: torch.Tensor | None,
    dx: torch.Tensor | None,
    dweight: torch.Tensor | None,
    dbias: torch.Tensor | None,
    dloss: torch.Tensor,
    needs_input_grad: Sequence[bool],
) -> Any:
    saved = (dx, dweight, dbias)
    missing = [need and one is None for need, one in zip(needs_input_grad, saved, strict=True)]
    computed: Sequence[torch.Tensor | None] = saved
    dloss = dloss if share is None else dloss * share
    if any(missing):
        options = _options(label_smoothing, logit_scale, logit_softcapping, ignore_index, weight.shape[0])
        dlosses = dloss.expand(target.shape)
        _, *computed = _in_chunks(x, target, weight, bias, options, num_chunks, dlosses, missing)
    gradients = []
    for need, old, new in zip(needs_input_grad, saved, computed, strict=True):
        gradients.append(None if not need else new if old is None else scaled(old, dloss))
    return tuple(gradients)


_linear_cross_entropy = opaque(
    'fla::fused_linear_cross_entropy_loss',
    schema=(
        '(Tensor x, Tensor target, Tensor weight, Tensor? bias, int ignore_index, float label_smoothing, float logit_scale, '
        'float logit_softcapping, int num_chunks, str reduction, bool dx_now, bool dweight_now, bool dbias_now) '
        '-> (Tensor loss, Tensor? share, Tensor? dx, Tensor? dweight, Tensor? dbias)'
    ),
    forward=_forward,
    fake=_fake,
    backward=_backward,
    grads=('x', 'weight', 'bias'),
    intermediates=('share', 'dx', 'dweight', 'dbias'),
    devices=DEVICES,
)


def linear_cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    logit_scale: float,
    logit_softcapping: float | None,
    num_chunks: int,
    reduction: str,
) -> torch.Tensor:
    """`fused_linear_cross_entropy_loss` on Triton.

    With more rows than one chunk, the forward computes the gradients while it has the logits: three products instead of
    four. It does not if the gradient of the loss is not a scalar, nor in float16, where most gradients of logits underflow
    until the backward multiplies them by the loss scale.
    """
    if under_autocast(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    cap = 0.0 if logit_softcapping is None else float(logit_softcapping)
    numbers = (float(label_smoothing), float(logit_scale), cap)
    rows, targets = x.flatten(0, -2), target.reshape(-1)
    loss: torch.Tensor
    # not in compiled code, where the number of rows may be symbolic
    if takes_eager_path(x, target, weight, bias) and rows.shape[0] <= least_rows(x.shape[-1]):
        options = _options(*numbers, ignore_index, weight.shape[0])
        loss = _OneChunk.apply(rows, targets, weight, bias, options, reduction)
    else:
        early = torch.is_grad_enabled() and reduction != 'none' and x.dtype != torch.float16
        now = (early and one is not None and one.requires_grad for one in (x, weight, bias))
        given = (rows, targets, weight, bias)
        loss = _linear_cross_entropy(*given, ignore_index, *numbers, num_chunks, reduction, *now)
    return loss.reshape(target.shape) if reduction == 'none' else loss
