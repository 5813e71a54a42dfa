"""What the layers of one model remember between calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class LayerState:
    """Of one layer; a kind of layer uses what it needs.

    Attributes:
        recurrent: state of the recurrence `[N, HV, K, V]`, float32.
        conv: last W steps before each convolution, `[N, D, W]`.
        keys_values: `[B, S, H, K]` and `[B, S, H, V]`.
        length: how many steps the layer has seen, padding included; of packed sequences, all together.
    """

    recurrent: torch.Tensor | None = None
    conv: tuple[torch.Tensor, ...] | None = None
    keys_values: tuple[torch.Tensor, torch.Tensor] | None = None
    length: int = 0


class Cache:
    """The states of a model's layers, by their `layer_idx`. A new one is empty; layers fill it when called with it."""

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


def check_cache(cache: object, layer_idx: int | None) -> None:
    """A cache is a `Cache`, and a layer that is given one knows its own place in it."""
    if cache is None:
        return
    if not isinstance(cache, Cache):
        raise TypeError(f'past_key_values must be a fla.layers.Cache or None, got {type(cache).__name__}')
    if layer_idx is None:
        raise ValueError('a layer with past_key_values needs a layer_idx: pass it to its constructor')


__all__ = ['Cache', 'LayerState', 'check_cache']
