"""A linear map to a vocabulary and the cross entropy of its logits, computed chunk by chunk to save memory."""

from __future__ import annotations

import torch
from torch import nn

from fla.backends import check_tensors, dispatch
from fla.modules.checks import (
    check_choice,
    check_dims,
    check_floating,
    check_launchable,
    check_shape,
    check_sizes,
    check_weights,
)
from fla.modules.fused_cross_entropy.ops import REDUCTIONS, check_loss, check_numbers
from fla.modules.on_triton import on_triton
from fla.ops.checks import check_given


def _check(
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
    check_values: bool,
) -> None:
    check_given(x=x, target=target, weight=weight)
    check_floating(x=x, weight=weight, bias=bias)
    check_tensors(x=x, target=target)
    check_dims('x', x, 2, '[..., D]')
    if weight.dim() != 2 or weight.shape[0] < 1:
        raise ValueError(f'weight must be [V, D] with V at least 1, got shape {list(weight.shape)}')
    check_shape('weight', weight, (weight.shape[0], x.shape[-1]), '[V, D]')
    check_shape('bias', bias, weight.shape[:1], '[V]')
    check_weights(x, weight=weight, bias=bias)
    check_shape('target', target, x.shape[:-1], 'one number for each x')
    check_choice('reduction', reduction, REDUCTIONS)
    check_sizes(num_chunks=num_chunks)
    flat, classes = target.reshape(-1), weight.shape[0]
    check_loss(flat, flat.shape[0], classes, label_smoothing, logit_scale, logit_softcapping, ignore_index, check_values)


@dispatch('modules', check=_check, default_verifier=on_triton('x'))
def fused_linear_cross_entropy_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = 'mean',
) -> torch.Tensor:
    """`cross_entropy_loss(linear(x, weight, bias), target)`, reduced. A GPU holds one chunk of the logits at a time.

    Args:
        x: `[..., D]`, float16, bfloat16, float32 or float64.
        target: `[...]`, int32 or int64, in `[0, V)`; see `cross_entropy_loss`.
        weight: `[V, D]`; bias: `[V]`. Both have the dtype of x. Under autocast they may differ, unless one of the dtypes is
            float64. The logits have that dtype, or autocast's, except that float64 stays float64.
        ignore_index, label_smoothing, logit_scale, logit_softcapping: as for `cross_entropy_loss`.
        num_chunks: the rows are cut into at most this many chunks; more chunks take less memory. On a GPU a chunk has at
            least 1024 rows, or D / 2 if that is more, because smaller products are bound by memory. So the logits of
            max(rows / num_chunks, 1024, D / 2) rows, rounded up to a multiple of 16, exist at a time. If all rows fit into
            one such chunk, the backward may save their logits and write the gradient beside them.
        reduction: 'mean' over the targets that are not ignored (NaN if all are), 'sum' or 'none'.

    Returns:
        A scalar, or `[...]` without a reduction; float32 (float64 for float64).

    Raises:
        TypeError, ValueError: for invalid arguments, before any backend is tried.

    Source: Hsu et al. 2024, "Liger Kernel", arXiv 2410.10989, where gradients are computed in the forward, chunk by chunk.
    """
    check_launchable('fused_linear_cross_entropy_loss', x=x, target=target, weight=weight)
    from fla.modules.kernels.linear_cross_entropy import linear_cross_entropy

    numbers = (ignore_index, label_smoothing, logit_scale, logit_softcapping)
    return linear_cross_entropy(x, target, weight, bias, *numbers, num_chunks, reduction)


class FusedLinearCrossEntropyLoss(nn.Module):
    """`fused_linear_cross_entropy_loss` with its options. The weight, a model's last layer, is passed to each call.

    Args:
        As for the function.

    Raises:
        TypeError, ValueError: for an unknown reduction or invalid numbers.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        logit_softcapping: float | None = None,
        num_chunks: int = 8,
        reduction: str = 'mean',
    ) -> None:
        super().__init__()
        check_choice('reduction', reduction, REDUCTIONS)
        check_numbers(label_smoothing, logit_scale, logit_softcapping, ignore_index)
        check_sizes(num_chunks=num_chunks)
        self.ignore_index, self.label_smoothing, self.logit_scale = ignore_index, label_smoothing, logit_scale
        self.logit_softcapping, self.num_chunks, self.reduction = logit_softcapping, num_chunks, reduction

    def forward(
        self, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The loss of x `[B, T, D]` and target `[B, T]`."""
        return fused_linear_cross_entropy_loss(
            x,
            target,
            weight,
            bias,
            self.ignore_index,
            self.label_smoothing,
            self.logit_scale,
            self.logit_softcapping,
            self.num_chunks,
            self.reduction,
        )

    def extra_repr(self) -> str:
        return f'reduction={self.reduction}, num_chunks={self.num_chunks}, ignore_index={self.ignore_index}'
