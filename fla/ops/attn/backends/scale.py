"""Scales that kernels are not made for."""

from __future__ import annotations

import torch


def above_zero(q: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, float | None]:
    """q and scale that say the same with a scale above 0, or None.

    FlashAttention's and cuDNN's kernels mask with minus infinity before they scale: of a scale of 0 they make NaN, and of
    one below it infinity, of which NaN comes.
    """
    if scale is None or not scale <= 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


__all__ = ['above_zero']
