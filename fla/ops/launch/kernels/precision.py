"""The precision of products and sums inside kernels."""

from __future__ import annotations

import torch


def of_products(operands: torch.dtype) -> str:
    """Returns the `input_precision` of `tl.dot`: float32 operands are split into three tf32 products, which ROCm does not
    support; 16-bit operands ignore it."""
    if torch.version.hip is not None:
        return 'ieee'
    return 'tf32x3' if operands == torch.float32 else 'tf32'


def of_sums(operands: torch.dtype) -> torch.dtype:
    """Returns the dtype of running sums of log decays: float64 for float32 operands, else float32 (see `gates.exp32`)."""
    return torch.float64 if operands == torch.float32 else torch.float32
