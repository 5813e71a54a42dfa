"""A linear map to a vocabulary and the cross entropy of its logits."""

from __future__ import annotations

from fla.modules.fused_linear_cross_entropy.ops import FusedLinearCrossEntropyLoss, fused_linear_cross_entropy_loss

__all__ = ['FusedLinearCrossEntropyLoss', 'fused_linear_cross_entropy_loss']
