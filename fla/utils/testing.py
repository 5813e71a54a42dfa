"""Comparison of a kernel's result with a reference."""

from __future__ import annotations

import warnings

import torch


def relative_rms(reference: torch.Tensor, result: torch.Tensor) -> float:
    """RMS(reference - result) / RMS(reference), in float64."""
    reference, result = reference.detach().double(), result.detach().double()
    return float((reference - result).square().mean().sqrt() / (reference.square().mean().sqrt() + 1e-300))


def assert_close(
    prefix: str,
    ref: torch.Tensor,
    tri: torch.Tensor,
    ratio: float,
    warning: bool = False,
    err_atol: float = 1e-6,
) -> None:
    """Raises AssertionError unless `max|ref - tri| <= err_atol` or `RMS(ref - tri) / RMS(ref) < ratio`.

    A NaN in either tensor, or another shape, always fails.

    Args:
        prefix: name of the compared quantity, for the message.
        ref, tri: the reference and the kernel's result, tensors of one shape and any dtype.
        ratio: bound of the relative RMS error.
        warning: whether to warn instead of raising; a wrong shape raises all the same.
        err_atol: absolute error that always passes.
    """
    if ref.shape != tri.shape:
        raise AssertionError(f'{prefix}: shapes differ, {tuple(ref.shape)} and {tuple(tri.shape)}')
    if ref.numel() == 0:
        return
    worst = float((ref.detach().double() - tri.detach().double()).abs().max())
    if worst <= err_atol:
        return
    error = relative_rms(ref, tri)
    message = f'{prefix}: max |difference| {worst:.3g}, relative RMS error {error:.3g}, bound {ratio:g}'
    broken = [name for name, t in (('ref', ref), ('tri', tri)) if bool(t.detach().isnan().any())]
    if broken:
        message += f'; NaN in {" and ".join(broken)}'
    if not broken and error < ratio:
        return
    if warning:
        warnings.warn(message, stacklevel=2)
        return
    raise AssertionError(message)
