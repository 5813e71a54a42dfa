"""The short causal convolution over time, one filter per channel, that is used in front of a linear recurrence."""

from __future__ import annotations

import torch
from torch import nn

from fla.backends import Verdict, check_tensors, dispatch
from fla.modules.checks import (
    SILU,
    check_choice,
    check_floating,
    check_launchable,
    check_mask,
    check_shape,
    check_sizes,
    check_written,
    is_dense_float,
    matches,
    shares_memory,
)
from fla.modules.on_triton import on_triton
from fla.ops.checks import check_cu_seqlens, check_given

ACTIVATIONS = (None, *SILU)
MAX_WIDTH = 8  # in the Triton kernels, wider filters would take too many registers


def _width_on_triton(weight: torch.Tensor | None) -> Verdict:
    if weight is not None and weight.shape[1] > MAX_WIDTH:
        return False, ('the Triton kernels take filters of at most 8 steps, got W = %s', weight.shape[1])
    return True, None


def _check_filter(
    weight: torch.Tensor, bias: torch.Tensor | None, channels: int | torch.SymInt, activation: str | None
) -> None:
    if weight.dim() != 2 or weight.shape[1] < 1:
        raise ValueError(f'weight must be [D, W], got shape {list(weight.shape)}')
    check_shape('weight', weight, (channels, weight.shape[1]), '[D, W]')
    check_shape('bias', bias, (channels,), '[D]')
    check_choice('activation', activation, ACTIVATIONS)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
    check_values: bool,
) -> None:
    check_given(x=x, weight=weight)
    check_floating(x=x, weight=weight, bias=bias, residual=residual, initial_state=initial_state)
    check_tensors(x=x, cu_seqlens=cu_seqlens)
    if x.dim() != 3:
        raise ValueError(f'x must be [B, T, D], got shape {list(x.shape)}')
    _check_filter(weight, bias, x.shape[2], activation)
    check_shape('residual', residual, x.shape, 'shaped like x')
    count = check_cu_seqlens(x, cu_seqlens, None, check_values)
    check_shape('initial_state', initial_state, (count, x.shape[2], weight.shape[1]), '[N, D, W]')


convolution_on_triton = on_triton('x', 'weight', 'bias', 'residual', 'initial_state')


@dispatch('modules', check=_check, default_verifier=(convolution_on_triton, _width_on_triton))
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`y[t] = act(sum_w weight[:, w] x[t - W + 1 + w] + bias) + residual[t]`, in at least float32 and rounded once.

    Args:
        x: `[B, T, D]`, float16, bfloat16, float32 or float64.
        weight: `[D, W]`, its last column for the current step; bias: `[D]`; any floating dtype.
        residual: shaped like x, added after the activation.
        initial_state: `[N, D, W]`, the W steps before the first; not modified. Default: zeros.
        output_final_state: return the last W steps of each sequence.
        activation: None, 'silu' or 'swish' (the same).
        cu_seqlens: `[N + 1]`, int32 or int64: packed sequences, with B == 1; they do not affect each other.

    Returns:
        y `[B, T, D]` in x's dtype, contiguous, and the final state `[N, D, W]` in the dtype of the initial state (without
        one, of x), or None.

    Raises:
        TypeError, ValueError: for invalid arguments, before any backend is tried.

    Source: the convolution of Fu et al. 2023, "Hungry Hungry Hippos", arXiv 2212.14052, as used in Gu and Dao 2023, "Mamba",
    arXiv 2312.00752.
    """
    check_launchable('causal_conv1d', x=x, weight=weight)
    from fla.modules.kernels.convolution_autograd import convolution

    y, final = convolution(x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens)
    return y, final


def _is_common_step(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
) -> bool:
    if not (is_dense_float(x) and is_dense_float(weight)):
        return False
    assert weight is not None
    shape, row, device = x.shape, weight.shape, x.device
    if len(row) != 2 or not (len(shape) == 2 or (len(shape) == 3 and shape[1] == 1)):
        return False
    return (
        shape[-1] == row[0]
        and row[1] >= 1
        and weight.device == device
        and matches(cache, (shape[0], *row), device)
        and cache.is_contiguous()
        and (bias is None or matches(bias, row[:1], device))
        and (residual is None or matches(residual, shape, device))
        and activation in ACTIVATIONS
    )


def _check_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
) -> None:
    if _is_common_step(x, cache, residual, weight, bias, activation):
        return
    check_given(x=x, cache=cache, weight=weight)
    assert weight is not None
    check_floating(x=x, cache=cache, residual=residual, weight=weight, bias=bias)
    if not (x.dim() == 2 or (x.dim() == 3 and 1 in x.shape[:2])):
        raise ValueError(f'x must be one step: [N, D], [N, 1, D] or [1, N, D], got shape {list(x.shape)}')
    channels = x.shape[-1]
    _check_filter(weight, bias, channels, activation)
    check_shape('residual', residual, x.shape, 'shaped like x')
    count = x.shape[0] if x.dim() == 2 else x.shape[0] * x.shape[1]
    check_shape('cache', cache, (count, channels, weight.shape[1]), '[N, D, W]')
    check_written('cache', cache)


step_on_triton = on_triton('x', 'cache', 'residual', 'weight', 'bias', gradient=False)


@dispatch('modules', check=_check_update, default_verifier=(step_on_triton, _width_on_triton), mutates=('cache',))
def causal_conv1d_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of `causal_conv1d`, for decoding. Updates the cache in place.

    Decode under `torch.no_grad()` or `torch.inference_mode()`. If an argument needs a gradient, `reference` serves the step,
    and the cache becomes part of the graph, which then holds every step that went into it.

    Args:
        x: one step of N sequences: `[N, D]`, `[N, 1, D]` or, packed, `[1, N, D]`.
        cache: `[N, D, W]`, the last W steps; updated to end with x. No two elements may share memory.
        residual: shaped like x, added after the activation.
        weight: `[D, W]`, required although it follows an optional argument; bias: `[D]`.
        activation: None, 'silu' or 'swish'.

    Returns:
        y shaped like x, in its dtype, and the cache.

    Raises:
        TypeError, ValueError: for invalid arguments, before any backend is tried and the cache is touched.

    Source: as for `causal_conv1d`.
    """
    check_launchable('causal_conv1d_update', x=x, cache=cache, weight=weight)
    assert weight is not None
    from fla.modules.kernels.convolution_autograd import update

    return update(x, cache, residual, weight, bias, activation), cache


def changes_cache(x: torch.Tensor, cache: torch.Tensor, cu_seqlens: torch.Tensor | None) -> bool:
    """Whether `ShortConvolution` takes x `[B, T, D]` as a decode step, which updates its cache in place.

    Packed sequences of one step each look like a prefill unless their lengths are read from the device. The state before a
    prefill may be reused, as that of a shared prefix is, so only a certain decode step updates its cache.
    """
    return cu_seqlens is None and x.shape[1] == 1 and not _is_initial(cache)


def _is_initial(cache: torch.Tensor) -> bool:
    """Whether a cache must not be updated in place: it is a parameter, or one state expanded to many rows."""
    base = cache if cache._base is None else cache._base
    return (base.requires_grad and base.is_leaf) or shares_memory(cache)


class ShortConvolution(nn.Conv1d):
    """`causal_conv1d` with its parameters, named and shaped as those of a depthwise `nn.Conv1d`: weight `[D, 1, W]`.

    Args:
        hidden_size: D.
        kernel_size: W.
        bias: whether there is a bias `[D]`.
        activation: None, 'silu' or 'swish'.
        backend: 'triton', 'cuda' or None, accepted for compatibility with flash-linear-attention, without effect: the
            functions are dispatched.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: for sizes that are not ints from 1 on, or an unknown activation or backend.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = 'silu',
        backend: str | None = 'triton',
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes(hidden_size=hidden_size, kernel_size=kernel_size)
        check_choice('activation', activation, ACTIVATIONS)
        check_choice('backend', backend, ('triton', 'cuda', None))
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias, device=device, dtype=dtype)
        self.hidden_size, self.activation = hidden_size, activation

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: torch.Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Convolves x along time.

        Args:
            x: `[B, T, D]`.
            residual: shaped like x, added after the activation.
            mask: `[B, T]`, 0 where x is padding, which counts as zero, and positive elsewhere; not with `cu_seqlens`.
            cache: `[N, D, W]`, the W steps before the first. A decode step (`T == 1` without `cu_seqlens`) updates it in
                place; about gradients see `causal_conv1d_update`. A cache that is an initial state is never updated: a
                leaf that requires a gradient, a view of one, or a tensor whose elements share memory, such as a state
                expanded to the batch.
            output_final_state: return the last W steps of each sequence.
            cu_seqlens: `[N + 1]`: packed sequences, with B == 1.

        Returns:
            y `[B, T, D]` and the last W steps `[N, D, W]` (the cache itself if it was updated in place), or None.

        Raises:
            TypeError, ValueError: for invalid arguments.
        """
        self._check(x, mask, cache, cu_seqlens)
        if mask is not None:
            x = x.masked_fill(mask[..., None] == 0, 0.0)
        weight = self.weight.squeeze(1)
        if cache is not None and changes_cache(x, cache, cu_seqlens):
            y, cache = causal_conv1d_update(x, cache, residual, weight, self.bias, self.activation)
            return y, cache if output_final_state else None
        return causal_conv1d(x, weight, self.bias, residual, cache, output_final_state, self.activation, cu_seqlens)

    def _check(
        self, x: torch.Tensor, mask: torch.Tensor | None, cache: torch.Tensor | None, cu_seqlens: torch.Tensor | None
    ) -> None:
        """Checks what the functions would report under another name, or only after the mask was applied."""
        channels, width = self.hidden_size, self.kernel_size[0]
        is_common_case = mask is cu_seqlens is None and is_dense_float(x) and len(x.shape) == 3 and x.shape[2] == channels
        if is_common_case and (cache is None or matches(cache, (x.shape[0], channels, width), x.device)):
            return
        check_given(x=x)
        check_tensors(x=x, mask=mask, cache=cache, cu_seqlens=cu_seqlens)
        if x.dim() != 3 or x.shape[2] != channels:
            raise ValueError(f'x must be [B, T, D] with D = {channels}, got shape {list(x.shape)}')
        if mask is not None and cu_seqlens is not None:
            raise ValueError('mask is for padded batches and cu_seqlens for packed ones: pass one of them')
        check_shape('mask', mask, x.shape[:2], '[B, T]')
        check_mask('mask', mask)
        if cache is not None:
            check_floating(cache=cache)
            check_shape('cache', cache, (check_cu_seqlens(x, cu_seqlens), channels, width), '[N, D, W]')

    def extra_repr(self) -> str:
        return f'{self.hidden_size}, kernel_size={self.kernel_size[0]}, activation={self.activation}'
