"""Requirements of the Triton defaults of the modules."""

from __future__ import annotations

import torch

from fla.backends import runs_on_triton


def on_triton(*names: str, gradient: bool = True) -> type[runs_on_triton]:
    """Requires a GPU or Triton's interpreter, and no float64 in the named arguments: the kernels compute in float32."""

    class OnTriton(runs_on_triton):
        dtypes = dict.fromkeys(names, (torch.float16, torch.bfloat16, torch.float32))
        grad = 'backward' if gradient else 'none'

    return OnTriton
