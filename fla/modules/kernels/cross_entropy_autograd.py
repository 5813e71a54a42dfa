"""The Triton default of the cross entropy: its kernels as a differentiable function that compiled code can call."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from fla.modules.kernels.cross_entropy import Options, launch_backward, launch_forward
from fla.opaque import opaque, takes_eager_path
from fla.ops.launch.triton_call import DEVICES, in_rows


def _options(
    V: int,
    label_smoothing: float,
    logit_scale: float,
    lse_square_scale: float,
    logit_softcapping: float,
    ignore_index: int,
    group: str | None,
) -> Options:
    first, classes = 0, V
    if group is not None:
        ranks = _group(group)
        first, classes = V * ranks.rank(), V * ranks.size()
    return Options(label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index, first, classes)


def _group(name: str) -> distributed.ProcessGroup:
    """The process group of a name. An operator takes no process group, only its name."""
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _sharded(
    logits: torch.Tensor, target: torch.Tensor, options: Options, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`launch_forward` of rows whose columns are sharded over the ranks of a group. It takes two small reductions."""
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


def _forward(logits: torch.Tensor, target: torch.Tensor, *numbers_and_group: Any) -> Any:
    options, group = _options(logits.shape[1], *numbers_and_group), numbers_and_group[-1]
    if group is not None:
        return _sharded(in_rows(logits), target, options, group)
    return launch_forward(in_rows(logits), target, options)


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
    numbers = (label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index)
    options = _options(logits.shape[1], *numbers, group)
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    launch_backward(in_rows(logits), target, maximum, log_sum, dlosses, dlogits, options)
    return dlogits


_cross_entropy = opaque(
    'fla::cross_entropy_loss',
    schema=(
        '(Tensor logits, Tensor target, float label_smoothing, float logit_scale, float lse_square_scale, '
        'float logit_softcapping, int ignore_index, str? group) '
        '-> (Tensor losses, Tensor z_losses, Tensor maximum, Tensor log_sum)'
    ),
    forward=_forward,
    fake=lambda logits, *_: tuple(logits.new_empty(logits.shape[:1], dtype=torch.float32) for _ in range(4)),
    backward=_backward,
    grads=('logits',),
    intermediates=('maximum', 'log_sum'),
    non_differentiable=('z_losses',),
    devices=DEVICES,
)


class _InPlace(torch.autograd.Function):
    """The same in eager code. The backward overwrites the logits with their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, *numbers_and_group: Any) -> Any:
        losses, z_losses, maximum, log_sum = _forward(logits, target, *numbers_and_group)
        ctx.save_for_backward(logits, target, maximum, log_sum)
        ctx.options = _options(logits.shape[1], *numbers_and_group)
        ctx.mark_non_differentiable(z_losses)
        return losses, z_losses

    @staticmethod
    def backward(ctx: Any, dlosses: torch.Tensor, _: object) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                'create_graph=True reached the backward of cross_entropy_loss with inplace_backward=True, which has no '
                'derivative of its own; use the backend `reference` for double backward'
            )
        # autograd raises if the logits were modified since; so a second backward, after this one, raises too
        logits, target, maximum, log_sum = ctx.saved_tensors
        launch_backward(logits, target, maximum, log_sum, dlosses, logits, ctx.options)
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), *(None,) * 7


def _may_be_overwritten(logits: torch.Tensor) -> bool:
    """Whether the logits are a result of eager code that fills its storage, and autograd tracks who saved it. With saved-
    tensor hooks, such as those of checkpoints, autograd does not notice that a saved tensor was overwritten."""
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
