"""The Triton defaults of the cross entropies: kernels as differentiable functions that compiled code can call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from fla.modules.checks import under_autocast
from fla.modules.kernels.cross_entropy import Options, launch_backward, launch_forward, reduced, scaled
from fla.opaque import loop_under_vmap, opaque, takes_eager_path
from fla.ops.autocast import without_autocast
from fla.ops.launch.triton_call import DEVICES, in_rows

_NUMBERS = 'float label_smoothing, float logit_scale, float lse_square_scale, float logit_softcapping, int ignore_index'


def _options(
    label_smoothing: float,
    logit_scale: float,
    lse_square_scale: float,
    logit_softcapping: float,
    ignore_index: int,
    V: int,
    group: str | None,
) -> Options:
    first, classes = 0, V
    if group is not None:
        ranks = _group(group)
        first, classes = V * ranks.rank(), V * ranks.size()
    return Options(label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index, first, classes)


def _group(name: str) -> distributed.ProcessGroup:
    """Operators take no process groups, but PyTorch knows each by its name."""
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _sharded(
    logits: torch.Tensor, target: torch.Tensor, options: Options, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `launch_forward`, of rows whose columns are spread over the ranks of a group: two small reductions."""
    ranks = _group(group)
    picked, total, maximum, log_sum = launch_forward(logits, target, options, partial=True)
    largest = maximum.clone()
    distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=ranks)
    shards = torch.stack([picked, total, torch.exp(maximum - largest + log_sum)])
    distributed.all_reduce(shards, group=ranks)
    picked, total, log_sum = shards[0], shards[1], shards[2].log()
    losses = log_sum + (largest - picked)
    if options.label_smoothing:
        mean = log_sum + (largest - total / options.classes)
        losses = (1.0 - options.label_smoothing) * losses + options.label_smoothing * mean
    z_losses = options.lse_square_scale * (largest + log_sum).square()
    ignored, known = target == options.ignore_index, (target >= 0) & (target < options.classes)
    losses = torch.where(known, losses + z_losses, float('nan')).masked_fill(ignored, 0.0)
    return losses, z_losses.masked_fill(ignored, 0.0), largest, log_sum


def _forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float,
    logit_scale: float,
    lse_square_scale: float,
    logit_softcapping: float,
    ignore_index: int,
    group: str | None,
) -> Any:
    options = _options(
        label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index, logits.shape[1], group
    )
    if group is not None:
        return _sharded(in_rows(logits), target, options, group)
    return launch_forward(in_rows(logits), target, options)


def _fake(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float,
    logit_scale: float,
    lse_square_scale: float,
    logit_softcapping: float,
    ignore_index: int,
    group: str | None,
) -> Any:
    return tuple(logits.new_empty(logits.shape[:1], dtype=torch.float32) for _ in range(4))


def _backward(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float,
    logit_scale: float,
    lse_square_scale: float,
    logit_softcapping: float,
    ignore_index: int,
    group: str | None,
    maximum: torch.Tensor,
    log_sum: torch.Tensor,
    dlosses: torch.Tensor,
) -> torch.Tensor:
    options = _options(
        label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index, logits.shape[1], group
    )
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    launch_backward(in_rows(logits), target, maximum, log_sum, dlosses, dlogits, options)
    return dlogits


_cross_entropy = opaque(
    'fla::cross_entropy_loss',
    schema=(
        f'(Tensor logits, Tensor target, {_NUMBERS}, str? group) '
        '-> (Tensor losses, Tensor z_losses, Tensor maximum, Tensor log_sum)'
    ),
    forward=_forward,
    fake=_fake,
    backward=_backward,
    grads=('logits',),
    intermediates=('maximum', 'log_sum'),
    non_differentiable=('z_losses',),
    devices=DEVICES,
)


class _InPlace(torch.autograd.Function):
    """The same in eager code, with the gradient written over the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        label_smoothing: float,
        logit_scale: float,
        lse_square_scale: float,
        logit_softcapping: float,
        ignore_index: int,
        group: str | None,
    ) -> Any:
        numbers = (label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index)
        losses, z_losses, maximum, log_sum = _forward(logits, target, *numbers, group)
        ctx.save_for_backward(logits, target, maximum, log_sum)
        ctx.options = _options(*numbers, logits.shape[1], group)
        ctx.mark_non_differentiable(z_losses)
        return losses, z_losses

    @staticmethod
    def backward(ctx: Any, dlosses: torch.Tensor, _: object) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                'create_graph=True reached the backward of cross_entropy_loss with inplace_backward=True, which has no '
                'derivative of its own; use the backend `reference` for double backward'
            )
        # autograd refuses logits that somebody has written to since, this function among them: it never runs twice
        logits, target, maximum, log_sum = ctx.saved_tensors
        launch_backward(logits, target, maximum, log_sum, dlosses, logits, ctx.options)
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), *(None,) * 7


def _may_be_overwritten(logits: torch.Tensor) -> bool:
    """Whether the logits are a result of eager code in memory of their own, of which autograd knows who wants it: with hooks
    of saved tensors, such as those of checkpoints, it does not see who wrote over what they keep; and who wants another part
    of larger memory may have it."""
    if not takes_eager_path(logits) or logits.device.type not in DEVICES:
        return False
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return False
    base = logits._base if logits._is_view() and logits._base is not None else logits
    whole = logits.is_contiguous() and logits.untyped_storage().nbytes() == logits.numel() * logits.element_size()
    return whole and base.grad_fn is not None


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    label_smoothing: float,
    logit_scale: float,
    lse_square_scale: float,
    logit_softcapping: float | None,
    ignore_index: int,
    inplace_backward: bool,
    process_group: distributed.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cross_entropy_loss` on Triton."""
    group = None if process_group is None else process_group.group_name
    cap = 0.0 if logit_softcapping is None else float(logit_softcapping)
    numbers = (float(label_smoothing), float(logit_scale), float(lse_square_scale), cap, ignore_index, group)
    if inplace_backward and logits.requires_grad and torch.is_grad_enabled() and _may_be_overwritten(logits):
        losses, z_losses = _InPlace.apply(logits, target, *numbers)
    else:
        losses, z_losses = _cross_entropy(logits, target, *numbers)
    return losses, z_losses


# Beside logits, each chunk reads the weight twice, and reads and writes its gradient: 8 V D bytes of 16-bit numbers, for
# 6 V D operations a row. GPUs do 170 to 280 operations while they move a byte, so that products take the time from about 400
# rows on, and at 1024 hide most of the traffic. Logits of D / 2 rows are half of the weight: to cut them saves little.
LEAST_ROWS = 1024


def least_rows(D: int) -> int:
    """So many rows are not cut into chunks."""
    return max(LEAST_ROWS, D // 32 * 16)


def rows_of_chunk(count: int, D: int, num_chunks: int) -> int:
    """Of `count` rows in at most so many chunks of about one size, in whole tiles of a product."""
    chunks = max(1, min(num_chunks, -(-count // least_rows(D))))
    return -(-count // (16 * chunks)) * 16


def _buffer(rows: int, V: int, like: torch.Tensor) -> torch.Tensor:
    """For logits `[rows, V]`, rows of which begin where Triton knows that it may load 16 bytes."""
    return torch.empty((rows, -(-V // 16) * 16), dtype=like.dtype, device=like.device)[:, :V]


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


class _OneChunk(torch.autograd.Function):
    """Few rows in eager code: their logits are kept for the backward, which has nothing to compute again or to scale."""

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
        # whoever called has cast, and autocast around the backward is of something else
        with without_autocast(x.device):
            dx = torch.mm(dlogits, weight) if needs_x else None
            dweight = torch.mm(dlogits.t(), x) if needs_weight else None
        dbias = dlogits.sum(0, dtype=torch.float32).to(x.dtype) if needs_bias else None
        return dx, None, dweight, dbias, None, None


def _linear(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: Options,
    num_chunks: int,
    dlosses: torch.Tensor | None,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Losses `[N]`, and the gradients of x, weight and bias that are wanted, for gradients `dlosses` of the losses, 1 each
    without.

    One buffer holds the logits of a chunk of rows, then their gradients. The gradient of the weight grows chunk by chunk in
    the weight's dtype: it is rounded once a chunk, which is no more than the rounding of the logits does to it, and in
    float32 every chunk would move twice its memory.
    """
    (count, D), V = x.shape, weight.shape[0]
    dx = torch.empty((count, D), dtype=x.dtype, device=x.device) if wanted[0] else None
    dweight = x.new_empty((V, D)) if wanted[1] and count else x.new_zeros((V, D)) if wanted[1] else None
    dbias = torch.zeros(V, dtype=torch.float32, device=x.device) if wanted[2] else None
    if dlosses is None:
        dlosses = torch.ones((), dtype=torch.float32, device=x.device).expand(count)
    rows = rows_of_chunk(count, D, num_chunks)
    buffer = _buffer(min(rows, count), V, x)
    kept = torch.empty((4, -(-count // 16) * 16), dtype=torch.float32, device=x.device)[:, :count]
    for start in range(0, count, max(rows, 1)):
        part = slice(start, min(start + rows, count))
        x_part, target_part, logits = x[part], target[part], buffer[: part.stop - part.start]
        _product(x_part, weight, bias, logits)
        _, _, maximum, log_sum = launch_forward(logits, target_part, options, out=kept[:, part].unbind())
        if not any(wanted):
            continue
        launch_backward(logits, target_part, maximum, log_sum, dlosses[part], logits, options)
        if dx is not None:
            torch.mm(logits, weight, out=dx[part])
        if dweight is not None:
            dweight.addmm_(logits.t(), x_part, beta=1 if start else 0)
        if dbias is not None:
            dbias += logits.sum(0, dtype=torch.float32)
    return kept[0], dx, dweight, dbias if dbias is None else dbias.to(x.dtype)


def _linear_forward(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    label_smoothing: float,
    logit_scale: float,
    lse_square_scale: float,
    logit_softcapping: float,
    ignore_index: int,
    num_chunks: int,
    reduction: str,
    dx_now: bool,
    dweight_now: bool,
    dbias_now: bool,
) -> Any:
    numbers = (label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index)
    options, wanted = _options(*numbers, weight.shape[0], None), (dx_now, dweight_now, dbias_now)
    losses, *gradients = _linear(x, target, weight, bias, options, num_chunks, None, wanted)
    loss, share = (losses, None) if reduction == 'none' else reduced(losses, target, ignore_index, reduction)
    return loss, share, *gradients


def _linear_fake(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    label_smoothing: float,
    logit_scale: float,
    lse_square_scale: float,
    logit_softcapping: float,
    ignore_index: int,
    num_chunks: int,
    reduction: str,
    dx_now: bool,
    dweight_now: bool,
    dbias_now: bool,
) -> Any:
    loss = x.new_empty(target.shape if reduction == 'none' else (), dtype=torch.float32)
    share = None if reduction == 'none' else torch.empty_like(loss)
    gradients = (
        one.new_empty(one.shape) if now and one is not None else None
        for one, now in ((x, dx_now), (weight, dweight_now), (bias, dbias_now))
    )
    return loss, share, *gradients


def _linear_backward(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    label_smoothing: float,
    logit_scale: float,
    lse_square_scale: float,
    logit_softcapping: float,
    ignore_index: int,
    num_chunks: int,
    share: torch.Tensor | None,
    dx: torch.Tensor | None,
    dweight: torch.Tensor | None,
    dbias: torch.Tensor | None,
    dloss: torch.Tensor,
    needs_input_grad: Sequence[bool],
) -> Any:
    kept = (dx, dweight, dbias)
    missing = [need and one is None for need, one in zip(needs_input_grad, kept, strict=True)]
    made: Sequence[torch.Tensor | None] = kept
    dloss = dloss if share is None else dloss * share
    if any(missing):
        numbers = (label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index)
        dlosses = dloss.expand(target.shape)
        options = _options(*numbers, weight.shape[0], None)
        _, *made = _linear(x, target, weight, bias, options, num_chunks, dlosses, missing)
    gradients = []
    for need, old, new in zip(needs_input_grad, kept, made, strict=True):
        gradients.append(None if not need else new if old is None else scaled(old, dloss))
    return tuple(gradients)


_linear_cross_entropy = opaque(
    'fla::fused_linear_cross_entropy_loss',
    schema=(
        f'(Tensor x, Tensor target, Tensor weight, Tensor? bias, {_NUMBERS}, int num_chunks, str reduction, bool dx_now, '
        'bool dweight_now, bool dbias_now) -> (Tensor loss, Tensor? share, Tensor? dx, Tensor? dweight, Tensor? dbias)'
    ),
    forward=_linear_forward,
    fake=_linear_fake,
    backward=_linear_backward,
    grads=('x', 'weight', 'bias'),
    intermediates=('share', 'dx', 'dweight', 'dbias'),
    devices=DEVICES,
)


def linear_cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    logit_scale: float,
    logit_softcapping: float | None,
    num_chunks: int,
    reduction: str,
) -> torch.Tensor:
    """`fused_linear_cross_entropy_loss` on Triton.

    Of more rows than one chunk, gradients are computed in the forward, while the logits are at hand: three products rather
    than four. Not where the gradient of the loss is not one number, and not in float16: most gradients of logits are too
    small for it, until the backward brings the factor of a loss scaler.
    """
    if under_autocast(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    cap = 0.0 if logit_softcapping is None else float(logit_softcapping)
    numbers = (float(label_smoothing), float(logit_scale), 0.0, cap, ignore_index)
    rows, targets = x.flatten(0, -2), target.reshape(-1)
    loss: torch.Tensor
    # not in compiled code, where the number of rows may be any
    if takes_eager_path(x, target, weight, bias) and rows.shape[0] <= least_rows(x.shape[-1]):
        options = _options(*numbers, weight.shape[0], None)
        loss = _OneChunk.apply(rows, targets, weight, bias, options, reduction)
    else:
        now = torch.is_grad_enabled() and reduction != 'none' and x.dtype != torch.float16
        wanted = (now and one is not None and one.requires_grad for one in (x, weight, bias))
        loss = _linear_cross_entropy(rows, targets, weight, bias, *numbers, num_chunks, reduction, *wanted)
    return loss.reshape(target.shape) if reduction == 'none' else loss
