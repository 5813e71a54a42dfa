"""How wide numbers are inside kernels."""

from __future__ import annotations

import torch


def of_products(operands: torch.dtype) -> str:
    """`input_precision` of `tl.dot`: 16-bit floats as they are, float32 in three parts of tf32, which ROCm has not."""
    if torch.version.hip is not None:
        return 'ieee'
    return 'tf32x3' if operands == torch.float32 else 'tf32'


def of_sums(operands: torch.dtype) -> torch.dtype:
    """The type of running sums of log decays. See `gates.exp32`."""
    return torch.float64 if operands == torch.float32 else torch.float32
