"""Division by the Euclidean norm."""

from __future__ import annotations

import torch

from fla.modules.checks import check_dims, check_eps, check_floating
from fla.ops.backends import dispatch
from fla.ops.common import gates
from fla.ops.common.checks import FLOATS


def _check(x: torch.Tensor, eps: float, output_dtype: torch.dtype | None) -> None:
    check_floating(x=x)
    check_dims('x', x, 1, '[..., D]')
    check_eps(eps)
    if output_dtype is not None and output_dtype not in FLOATS:
        raise TypeError(f'output_dtype must be a floating dtype or None, got {output_dtype}')


@dispatch('modules', check=_check)
def l2norm(x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    """`x rsqrt(sum x^2 + eps)` over the last dimension, computed in at least float32.

    Args:
        x: `[..., D]`, float16, bfloat16, float32 or float64.
        eps: added to the sum, so that zeros stay zeros.
        output_dtype: of the result. Default: the dtype of x.

    Returns:
        `[..., D]`.

    Raises:
        TypeError, ValueError: for arguments that do not fit, before any backend is asked.
    """
    return gates.l2norm(x, eps).to(output_dtype or x.dtype)


l2_norm = l2norm
