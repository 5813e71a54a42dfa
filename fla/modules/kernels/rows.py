"""Tensors as the kernels of norms and activations read them."""

from __future__ import annotations

from typing import Any

import torch


def rows(*tensors: torch.Tensor | None) -> tuple[list[Any], list[int]]:
    """Tensors, or copies where it must be, as rows that are evenly apart, each contiguous; and how far apart they are."""
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
