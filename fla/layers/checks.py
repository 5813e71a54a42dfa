"""Checks of the layers' arguments."""

from __future__ import annotations

import torch

from fla.modules.checks import check_floating
from fla.ops.backends import check_tensors
from fla.ops.common.checks import FLOATS, check_cu_seqlens, check_dense, check_given, readable

MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *FLOATS)


def check_hidden(
    hidden_states: torch.Tensor,
    hidden_size: int,
    attention_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> None:
    """hidden_states `[B, T, hidden_size]`, floating, a mask `[B, at least T]`, and not both a mask and `cu_seqlens`."""
    check_given(hidden_states=hidden_states)
    check_floating(hidden_states=hidden_states)
    check_tensors(hidden_states=hidden_states, attention_mask=attention_mask, cu_seqlens=cu_seqlens)
    if hidden_states.dim() != 3 or hidden_states.shape[2] != hidden_size:
        raise ValueError(f'hidden_states must be [B, T, {hidden_size}], got {list(hidden_states.shape)}')
    check_cu_seqlens(hidden_states, cu_seqlens)
    if attention_mask is None:
        return
    if cu_seqlens is not None:
        raise ValueError('attention_mask is for padded batches and cu_seqlens for packed ones: pass one of them')
    check_dense('attention_mask', attention_mask)
    batch, length = hidden_states.shape[:2]
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
        raise ValueError(
            f'attention_mask must be [B, S], 1 for steps and 0 for padding, with B = {batch} and S at least T = {length}, '
            f'got {list(attention_mask.shape)}'
        )
    if attention_mask.dtype not in MASKS:
        raise TypeError(f'attention_mask must be of bool, integers or floats, got {attention_mask.dtype}')
    if attention_mask.dtype.is_signed and readable(attention_mask) and bool((attention_mask < 0).any()):
        raise ValueError(
            'attention_mask must be 1 for steps and 0 for padding, got negative numbers: one that is added to scores, with '
            '-inf for padding, is attention_mask == 0'
        )
