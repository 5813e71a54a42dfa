"""Plain PyTorch: cross entropies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import distributed

from fla.modules.fused_cross_entropy.ops import reduced
from fla.ops.recurrence.gates import wide

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Summed(torch.autograd.Function):
    """The sum over the ranks of a group. Each rank continues with the same numbers, so the gradient of a rank's term is that
    of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        x = x.contiguous().clone()
        distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError('cross_entropy_loss with a process_group is differentiable once: leave out create_graph=True')
        return gradient, None


def _of_rows(
    v: torch.Tensor, target: torch.Tensor, with_mean: bool, with_lse: bool, group: ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For rows of v `[N, V]`: lse - v[target], lse - mean(v), and lse, the log-sum-exp. Values that are not asked for are
    arbitrary. The row's maximum is subtracted first: next to a large maximum, the rest of lse would be rounded away."""
    if group is None:
        log_p = F.log_softmax(v, 1)
        picked = -log_p.gather(1, target.clamp(0, v.shape[1] - 1).long()[:, None])[:, 0]
        if with_lse:
            largest = v.detach().amax(1)
            largest = torch.where(largest.isfinite(), largest, 0.0)
            lse = largest + (v - largest[:, None]).logsumexp(1)
        return picked, -log_p.mean(1) if with_mean else picked, lse if with_lse else picked
    maximum = v.detach().amax(1)
    distributed.all_reduce(maximum, distributed.ReduceOp.MAX, group=group)
    v = v - maximum[:, None]
    local = target.long() - v.shape[1] * group.rank()
    here = (local >= 0) & (local < v.shape[1])
    picked = torch.where(here, v.gather(1, local.clamp(0, v.shape[1] - 1)[:, None])[:, 0], 0.0)
    own = torch.stack([v.exp().sum(1), picked, v.sum(1)])
    total: torch.Tensor = _Summed.apply(own, group)  # type: ignore[no-untyped-call]
    rest = total[0].log()
    return rest - total[1], rest - total[2] / (v.shape[1] * group.size()), maximum + rest


class ReferenceLosses:
    """Methods of `ModulesReference` for cross entropies."""

    def cross_entropy_loss(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        logit_softcapping: float | None = None,
        ignore_index: int = -100,
        inplace_backward: bool = False,  # only permits to overwrite
        process_group: ProcessGroup | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ignored = target == ignore_index
        # ignored rows are replaced by zeros: the gradient of an infinite logit would be 0 * inf
        v = wide(logits).masked_fill(ignored[:, None], 0.0) * logit_scale
        if logit_softcapping is not None:
            v = logit_softcapping * torch.tanh(v / logit_softcapping)
        nll, smooth, lse = _of_rows(v, target, bool(label_smoothing), bool(lse_square_scale), process_group)
        z_losses = lse_square_scale * lse.square() if lse_square_scale else torch.zeros_like(nll)
        losses = (1.0 - label_smoothing) * nll + z_losses
        if label_smoothing:
            losses = losses + label_smoothing * smooth
        classes = v.shape[1] * (1 if process_group is None else process_group.size())
        # a factor, so that the gradient becomes NaN too
        known = ignored | ((target >= 0) & (target < classes))
        losses = losses * torch.ones_like(losses).masked_fill(~known, float('nan'))
        return torch.where(ignored, 0.0, losses), torch.where(ignored, 0.0, z_losses).detach()

    def fused_linear_cross_entropy_loss(
        self,
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        logit_softcapping: float | None = None,
        num_chunks: int = 8,  # unused: the logits are one chunk
        reduction: str = 'mean',
    ) -> torch.Tensor:
        logits = F.linear(x.flatten(0, -2), weight, bias)
        losses, _ = self.cross_entropy_loss(
            logits, target.reshape(-1), label_smoothing, logit_scale, 0.0, logit_softcapping, ignore_index
        )
        return reduced(losses.reshape(target.shape), target, ignore_index, reduction)
