"""Writes into an argument."""

from __future__ import annotations

import torch


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Copies values into the tensor and returns it. PyTorch lets an inference tensor be written only in inference mode, for
    the sake of gradients. Without gradients this enters that mode, so that a decode step can follow a prefill in it."""
    is_outside = not torch.compiler.is_compiling() and tensor.is_inference() and not torch.is_inference_mode_enabled()
    if not is_outside or values.requires_grad:
        return tensor.copy_(values)
    with torch.inference_mode():
        return tensor.copy_(values)
