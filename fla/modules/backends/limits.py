"""Sizes that vendors' kernels take."""

from __future__ import annotations

import torch

from fla.backends import Verdict


def check_size(x: torch.Tensor, name: str = 'x') -> Verdict:
    """Refuses empty tensors, and those whose elements cannot be counted in 32 bits."""
    if x.numel() == 0:
        return False, ('%s is empty, and the kernels cannot be launched on nothing', name)
    if x.numel() >= 2**31:
        text = 'the kernels may count in 32 bits: %s must have fewer than 2^31 elements, got %s'
        return False, (text, name, x.numel())
    return True, None
