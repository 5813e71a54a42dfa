"""What the layers of one model remember between calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class LayerState:
    """Of one layer; a kind of layer uses what it needs. A call may change `conv` in place, and puts new tensors in place of
    the others: what is to be kept from before it is a deep copy.

    Attributes:
        recurrent: state of the recurrence `[N, HV, K, V]`, float32; float64 of layers in float64.
        conv: last W steps before each convolution, `[N, D, W]`.
        keys_values: `[B, S, H, K]` and `[B, S, H, V]`.
        length: how many steps the layer has seen, padding included; of packed sequences, all together.
    """

    recurrent: torch.Tensor | None = None
    conv: tuple[torch.Tensor, ...] | None = None
    keys_values: tuple[torch.Tensor, torch.Tensor] | None = None
    length: int = 0

    def replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put `change` of each tensor in its place."""
        if self.recurrent is not None:
            self.recurrent = change(self.recurrent)
        if self.conv is not None:
            self.conv = tuple(change(x) for x in self.conv)
        if self.keys_values is not None:
            keys, values = self.keys_values
            self.keys_values = change(keys), change(values)


class Cache:
    """The states of a model's layers, by their `layer_idx`. A new one is empty; layers fill it when called with it.

    A row of it is a sequence. What changes rows, as a beam search does, puts new tensors in place of all; `copy.deepcopy`
    keeps a cache to go on from more than once.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerState] = {}

    def __getitem__(self, layer_idx: int) -> LayerState:
        """The state of a layer, which is empty before its first call."""
        return self.layers.setdefault(layer_idx, LayerState())

    def __len__(self) -> int:
        """How many layers have a state."""
        return len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many steps a layer has seen."""
        return self.layers[layer_idx].length if layer_idx in self.layers else 0

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences of these numbers `[M]`, in this order; one may come several times."""
        for state in self.layers.values():
            state.replace(lambda x: x.index_select(0, indices.to(x.device)))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each beam go on from that of number `beam_idx` `[N]`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each sequence `repeats` times, one after the other."""
        for state in self.layers.values():
            state.replace(lambda x: x.repeat_interleave(repeats, 0))


def check_rows(state: LayerState, count: int | torch.SymInt) -> None:
    """A state to go on from has a row for each of `count` sequences."""
    tensors = state.recurrent, *(state.conv or ()), *(state.keys_values or ())
    for x in tensors:
        if x is not None and x.shape[0] != count:
            raise ValueError(f'past_key_values holds {x.shape[0]} sequences, got {count}')


def check_cache(cache: object, layer_idx: int | None) -> None:
    """A cache is a `Cache`, and a layer that is given one knows its own place in it."""
    if cache is None:
        return
    if not isinstance(cache, Cache):
        raise TypeError(f'past_key_values must be a fla.layers.Cache or None, got {type(cache).__name__}')
    if layer_idx is None:
        raise ValueError('a layer with past_key_values needs a layer_idx: pass it to its constructor')


__all__ = ['Cache', 'LayerState', 'check_cache', 'check_rows']
