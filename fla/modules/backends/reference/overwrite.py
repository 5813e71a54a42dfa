"""Writing into an argument."""

from __future__ import annotations

import torch


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The tensor with other values. One that was made in inference mode can be written into within that mode alone, says
    PyTorch, whose reason are gradients: where there are none, a decode step may go on from it outside."""
    made_there = not torch.compiler.is_compiling() and tensor.is_inference() and not torch.is_inference_mode_enabled()
    if not made_there or values.requires_grad:
        return tensor.copy_(values)
    with torch.inference_mode():
        return tensor.copy_(values)
