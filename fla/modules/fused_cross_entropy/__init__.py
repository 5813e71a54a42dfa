"""Cross entropy of logits."""

from __future__ import annotations

from fla.modules.fused_cross_entropy.ops import FusedCrossEntropyLoss, cross_entropy_loss

__all__ = ['FusedCrossEntropyLoss', 'cross_entropy_loss']
