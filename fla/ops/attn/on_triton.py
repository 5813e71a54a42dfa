"""What the Triton default of attention needs."""

from __future__ import annotations

import torch

from fla.backends import runs_on_triton


class AttentionOnTriton(runs_on_triton):
    """float64 is for the reference: kernels compute in float32."""

    dtypes = {'q': (torch.float16, torch.bfloat16, torch.float32)}
