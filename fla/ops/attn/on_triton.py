"""Requirements of the Triton default of attention."""

from __future__ import annotations

import torch

from fla.backends import runs_on_triton


class AttentionOnTriton(runs_on_triton):
    """Requires a GPU or Triton's interpreter, and no float64: the kernels compute in float32."""

    dtypes = {'q': (torch.float16, torch.bfloat16, torch.float32)}
