"""Division by the Euclidean norm."""

from __future__ import annotations

import torch

from fla.backends import dispatch
from fla.modules.checks import check_dims, check_eps, check_floating, check_launchable
from fla.modules.norm.layernorm import is_common_case, norm_on_triton
from fla.ops.checks import check_given, check_output_dtype


def _check(x: torch.Tensor, eps: float, output_dtype: torch.dtype | None) -> None:
    if output_dtype is None and is_common_case(x, None, None, None, eps):
        return
    check_given(x=x)
    check_floating(x=x)
    check_dims('x', x, 1, '[..., D]')
    check_eps(eps)
    check_output_dtype(output_dtype)


@dispatch('modules', check=_check, default_verifier=norm_on_triton)
def l2norm(x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    """`x rsqrt(sum x^2 + eps)` over the last dimension, computed in at least float32.

    Args:
        x: `[..., D]`, float16, bfloat16, float32 or float64.
        eps: added to the sum of squares, so that a zero row stays zero.
        output_dtype: dtype of the result. Default: the dtype of x.

    Returns:
        `[..., D]`.

    Raises:
        TypeError, ValueError: for invalid arguments, before any backend is tried.
    """
    if x is None or not x.is_cuda:
        check_launchable('l2norm', x=x)
    from fla.modules.kernels.norms_autograd import normalize

    return normalize('l2', x, eps=eps, output_dtype=output_dtype)  # type: ignore[no-any-return]


l2_norm = l2norm
