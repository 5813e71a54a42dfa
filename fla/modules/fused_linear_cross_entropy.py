"""A linear map to a vocabulary and the cross entropy of what comes out, without holding the logits of many rows at once."""

from __future__ import annotations

import torch
from torch import nn

from fla.backends import check_tensors, dispatch
from fla.modules.checks import check_choice, check_dims, check_floating, check_shape, check_sizes, check_weights, require
from fla.modules.fused_cross_entropy import REDUCTIONS, check_loss, check_numbers
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
    """`cross_entropy_loss(linear(x, weight, bias), target)`, reduced. On a GPU the logits of many rows exist for one chunk
    of rows at a time.

    Args:
        x: `[..., D]`, float16, bfloat16, float32 or float64.
        target: `[...]`, int32 or int64, in `[0, V)`; see `cross_entropy_loss`.
        weight: `[V, D]`; bias: `[V]`; the dtype of x, under autocast any but float64, unless all are. The logits have that
            dtype, under autocast autocast's, which leaves float64 as it is.
        ignore_index, label_smoothing, logit_scale, logit_softcapping: of `cross_entropy_loss`.
        num_chunks: how many chunks the rows are cut into at most. More take less memory. A GPU cuts rows no finer than into
            chunks of 1024, or D / 2 where that is more, as products of fewer wait for memory: the logits at hand are those
            of max(rows / num_chunks, 1024, D / 2) rows, up to whole tiles of 16. Those of no more rows than one such chunk
            may be kept for the backward, which writes their gradient beside them.
        reduction: 'mean' over the targets that are not ignored (NaN if all are), 'sum' or 'none'.

    Returns:
        A number, or `[...]`; float32 (float64 for float64).

    Raises:
        TypeError, ValueError: for arguments that do not fit, before any backend is asked.

    Source: Hsu et al. 2024, "Liger Kernel", arXiv 2410.10989, where gradients are computed in the forward, chunk by chunk.
    """
    require('fused_linear_cross_entropy_loss', x=x, target=target, weight=weight)
    from fla.modules.kernels.losses import linear_cross_entropy

    return linear_cross_entropy(
        x,
        target,
        weight,
        bias,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        logit_scale=logit_scale,
        logit_softcapping=logit_softcapping,
        num_chunks=num_chunks,
        reduction=reduction,
    )


class FusedLinearCrossEntropyLoss(nn.Module):
    """`fused_linear_cross_entropy_loss`, with its numbers kept. The weight is the caller's: the last layer of a model.

    Args:
        As for the function.

    Raises:
        TypeError, ValueError: for an unknown reduction, or numbers that the function does not take.
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
