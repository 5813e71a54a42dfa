"""Checks of the layers' arguments."""

from __future__ import annotations

import torch

from fla.backends import check_tensors
from fla.modules.checks import check_floating, check_mask
from fla.ops.checks import check_cu_seqlens, check_dense, check_given


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
    check_mask('attention_mask', attention_mask)
