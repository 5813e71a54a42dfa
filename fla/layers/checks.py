"""Checks that the layers share. They raise before anything is computed or changed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fla.backends import check_tensors
from fla.layers.cache import Cache, LayerState
from fla.modules.checks import check_floating, check_mask
from fla.ops.checks import check_cu_seqlens, check_dense, check_given

# Attribute of `LayerState` → the last dimensions of each of its tensors.
StateSizes = Mapping[str, tuple[tuple[int, ...], ...]]


def check_call(
    hidden_states: torch.Tensor,
    hidden_size: int,
    attention_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    output_attentions: bool,
) -> None:
    """Check the arguments of a layer's `forward`, apart from its cache.

    hidden_states is `[B, T, hidden_size]` and floating; a mask is `[B, S]` with S at least T, and excludes `cu_seqlens`.
    """
    if output_attentions:
        raise ValueError('output_attentions: the layers return no attention weights; pass False')
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


def cache_and_state(
    past_key_values: object, use_cache: bool, layer_idx: int | None
) -> tuple[Cache | None, LayerState | None]:
    """The cache of a call and the layer's state in it, both None without a cache; `use_cache` makes a new one if needed."""
    if past_key_values is None:
        if not use_cache:
            return None, None
        past_key_values = Cache()
    if not isinstance(past_key_values, Cache):
        raise TypeError(f'past_key_values must be a fla.layers.Cache or None, got {type(past_key_values).__name__}')
    if layer_idx is None:
        raise ValueError('a layer with past_key_values needs a layer_idx: pass it to its constructor')
    return past_key_values, past_key_values[layer_idx]


def check_state(
    state: LayerState,
    layer_idx: int | None,
    rows: int | torch.SymInt,
    device: torch.device,
    sizes: StateSizes,
) -> None:
    """Check that a state fits a call, before the call changes anything.

    It must be whole, have a row for each of `rows` sequences, be on `device` and have tensors of the layer's `sizes`.
    """
    for x in state.tensors():
        if x.shape[0] != rows:
            raise ValueError(f'past_key_values holds {x.shape[0]} sequences, got {rows}')
    if state.torn:
        raise ValueError(
            f'past_key_values[{layer_idx}] was partly changed by a step that failed: begin anew, or from a copy.deepcopy'
        )
    recurrent = None if state.recurrent is None else (state.recurrent,)
    stored = {'recurrent': recurrent, 'conv': state.conv, 'keys_values': state.keys_values}
    for name, tensors in stored.items():
        if tensors is None:
            continue
        wanted = sizes.get(name, ())
        if len(tensors) != len(wanted) or any(x.shape[-len(y) :] != y for x, y in zip(tensors, wanted, strict=True)):
            raise ValueError(
                f'past_key_values[{layer_idx}].{name} belongs to another layer: its sizes are '
                f'{[list(x.shape[1:]) for x in tensors]}, this layer needs {[list(y) for y in wanted] or "none"}; '
                'give each layer of a model its own layer_idx'
            )
        for x in tensors:
            if x.device != device:
                raise ValueError(f'past_key_values is on {x.device} and hidden_states on {device}: move them to one device')
