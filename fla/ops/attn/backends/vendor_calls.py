"""Shared by backends of vendors' packages: limits, and calls in the form that those kernels take."""

from __future__ import annotations

import torch

from fla.backends import Verdict

NO_STEPS = 'there are no steps, and the kernels cannot be launched on nothing'


def check_head_dims(q: torch.Tensor, v: torch.Tensor) -> Verdict:
    """FlashAttention and its relatives take K = V, a multiple of 8, and at least one step."""
    if q.shape[3] != v.shape[3]:
        return False, ('K and V must be equal, got %s and %s', q.shape[3], v.shape[3])
    if q.shape[3] % 8:
        return False, ('K must be a multiple of 8, got %s', q.shape[3])
    if q.numel() == 0:
        return False, NO_STEPS
    return True, None


def steps_left(window_size: int | None) -> int:
    """The window as a number of steps to the left of a query, without the query; -1 for no limit."""
    return -1 if window_size is None else window_size - 1


def positive_scale(q: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, float | None]:
    """An equivalent q and scale, with a scale above 0 or None.

    The kernels of FlashAttention and cuDNN mask with -inf before they scale. A scale of 0 makes that NaN, and a negative
    scale inf, which becomes NaN.
    """
    if scale is None or not scale <= 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)
