"""Facts of one chunked call that all its launches share."""

from __future__ import annotations

from typing import Any

import torch

from fla.ops.launch.kernels import precision as precisions
from fla.ops.launch.kernels.layout import layout_of
from fla.ops.recurrence.arguments import Inputs, Options


class Call:
    """A chunked call: its arguments, sizes by their letters, chunk layout, and constants that most of its kernels take.

    Attributes:
        chunks: rows of the chunk table times value heads, the programs of a kernel that is parallel over chunks.
        common: constants of the kernels that multiply.
        sigmoid: constants of the kernels that read beta.
    """

    def __init__(self, inputs: Inputs, options: Options, chunk_size: int) -> None:
        q, v = inputs.q, inputs.v
        self.inputs, self.options = inputs, options
        self.B, self.T, self.H, self.K = q.shape
        self.HV, self.V = v.shape[2:]
        self.layout = layout_of(self.B, self.T, chunk_size, inputs.cu_seqlens)
        self.chunks = self.layout.rows * self.HV
        self.normalise = options.use_qk_l2norm_in_kernel
        self.common: dict[str, Any] = {
            'HV': self.HV,
            'K': self.K,
            'SIZE': chunk_size,
            'PACKED': self.layout.packed,
            'PRECISION': precisions.of_products(q.dtype),
        }
        self.sigmoid = {'SIGMOID': options.use_beta_sigmoid_in_kernel, 'DOUBLE': options.allow_neg_eigval}

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Uninitialised memory on the call's device, by default in the dtype of q."""
        return self.inputs.q.new_empty(shape, dtype=dtype)

    def empty_per_token(self, *width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Uninitialised memory of shape `[B, T, HV, *width]`."""
        return self.inputs.q.new_empty((self.B, self.T, self.HV, *width), dtype=dtype)
