"""What the Triton defaults of the modules need."""

from __future__ import annotations

import torch

from fla.backends import runs_on_triton


def on_triton(*names: str, gradient: bool = True) -> type[runs_on_triton]:
    """A GPU or Triton's interpreter; float64 in any of these arguments is for the reference: kernels compute in float32."""

    class OnTriton(runs_on_triton):
        dtypes = dict.fromkeys(names, (torch.float16, torch.bfloat16, torch.float32))
        grad = 'backward' if gradient else 'none'

    return OnTriton
