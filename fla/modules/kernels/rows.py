"""Tensors as evenly spaced rows, as the kernels of norms and activations read them."""

from __future__ import annotations

from typing import Any

import torch


def rows(*tensors: torch.Tensor | None) -> tuple[list[Any], list[int]]:
    """Each tensor as contiguous, evenly spaced rows, copied if necessary, and the stride between its rows (0 for None)."""
    found, strides = [], []
    for x in tensors:
        stride = 0 if x is None else x.shape[-1]
        if x is not None and not x.is_contiguous():
            x = x.reshape(-1, x.shape[-1])
            if x.stride(1) != 1:
                x = x.contiguous()
            stride = x.stride(0)
        found.append(x)
        strides.append(stride)
    return found, strides
