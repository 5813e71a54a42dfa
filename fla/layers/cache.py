"""The states of a model's layers between calls."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from fla.backends import check_tensors
from fla.layers.keys import GrowingBuffer, KeysValues
from fla.modules.checks import check_int
from fla.ops.checks import check_given, readable


@dataclass
class LayerState:
    """The state of one layer, which sets the attributes that it needs.

    A call may change `conv` in place and replaces the other tensors: to keep an earlier state, take a deep copy.

    Attributes:
        recurrent: state of the recurrence `[N, HV, K, V]`, float32; float64 for layers in float64. A head with V above 256
            is stored as its n parts, `[N, n HV, K, V / n]`.
        conv: last W steps before each convolution, `[N, D, W]`.
        keys_values: `[B, S, H, K]` and `[B, S, H, V]`; views of `buffer` if steps were added without gradients.
        length: number of steps that the layer has seen, padding included; the sum over packed sequences.
        buffer: the memory of `keys_values`, with room for more steps.
        torn: whether a call is changing the state, or failed while it did.
    """

    recurrent: torch.Tensor | None = None
    conv: tuple[torch.Tensor, ...] | None = None
    keys_values: KeysValues | None = None
    length: int = 0
    buffer: GrowingBuffer | None = field(default=None, repr=False, compare=False)
    torn: bool = field(default=False, repr=False, compare=False)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the state."""
        return [x for x in (self.recurrent, *(self.conv or ()), *(self.keys_values or ())) if x is not None]

    def __deepcopy__(self, memo: dict[int, object]) -> LayerState:
        """Clones that stay in the autograd graph; PyTorch's own deep copy refuses tensors that are not leaves."""
        copied = LayerState(self.recurrent, self.conv, self.keys_values, self.length, torn=self.torn)
        copied.replace(torch.clone)
        return copied

    def __copy__(self) -> LayerState:
        return dataclasses.replace(self)

    def __getstate__(self) -> dict[str, object]:
        """For pickle: without the buffer's spare memory."""
        return vars(self if self.buffer is None else copy.deepcopy(self))

    def replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each tensor x by `change(x)`."""
        if self.recurrent is not None:
            self.recurrent = change(self.recurrent)
        if self.conv is not None:
            self.conv = tuple(change(x) for x in self.conv)
        if self.keys_values is not None:
            self.set_keys_values(change(self.keys_values[0]), change(self.keys_values[1]))

    def set_keys_values(self, keys: torch.Tensor, values: torch.Tensor, buffer: GrowingBuffer | None = None) -> None:
        """Replace keys and values, and the buffer that they are views of."""
        self.keys_values, self.buffer = (keys, values), buffer
        if buffer is not None:
            buffer.newest.append(self.keys_values)


class Cache:
    """The states of a model's layers, by their `layer_idx`. A new cache is empty; layers fill it when called with it.

    Each row is a sequence. Methods that change rows, as beam search does, replace all tensors. To continue from one cache
    more than once, `copy.deepcopy` it.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerState] = {}

    def __getitem__(self, layer_idx: int) -> LayerState:
        """The state of a layer; empty before its first call."""
        return self.layers.setdefault(layer_idx, LayerState())

    def __contains__(self, layer_idx: object) -> bool:
        """Whether a layer has a state."""
        return layer_idx in self.layers and bool(self.layers[layer_idx].tensors())

    def __iter__(self) -> Iterator[int]:
        """The `layer_idx` of each layer that has a state, in order."""
        return (layer_idx for layer_idx in sorted(self.layers) if layer_idx in self)

    def __len__(self) -> int:
        """The number of layers that have a state."""
        return sum(1 for state in self.layers.values() if state.tensors())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of steps that a layer has seen."""
        return self.layers[layer_idx].length if layer_idx in self.layers else 0

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences with these indices, in this order; an index may be repeated.

        Args:
            indices: `[M]`, int32 or int64, each at least 0 and less than the number of sequences.

        Raises:
            TypeError, ValueError: for indices of another kind or out of range. On a GPU, where reading them would wait,
                PyTorch reports indices out of range later.
        """
        self._check_rows('indices', indices)
        for state in self.layers.values():
            state.replace(lambda x: x.index_select(0, indices.to(x.device)))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each beam continue from the beam `beam_idx` `[N]`, int32 or int64; raises as `batch_select_indices` does."""
        self._check_rows('beam_idx', beam_idx)
        self.batch_select_indices(beam_idx)

    def _check_rows(self, name: str, indices: torch.Tensor) -> None:
        check_given(**{name: indices})
        check_tensors(**{name: indices})
        if indices.dim() != 1:
            raise ValueError(f'{name} must be [M], got shape {list(indices.shape)}')
        if indices.dtype not in (torch.int32, torch.int64):
            raise TypeError(f'{name} must be int32 or int64, got {indices.dtype}')
        tensors = [x for state in self.layers.values() for x in state.tensors()]
        if indices.is_meta and not all(x.is_meta for x in tensors):
            raise ValueError(f'{name} must have values, got a tensor on meta')
        rows = [x.shape[0] for x in tensors]
        if rows and indices.numel() and readable(indices):
            least, most = (int(x) for x in indices.aminmax())
            if least < 0 or most >= min(rows):
                raise ValueError(f'{name} must be in [0, {min(rows)}), the number of sequences, got {least} to {most}')

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, the copies next to each other."""
        check_int('repeats', repeats)
        if repeats < 0:
            raise ValueError(f'repeats must be at least 0, got {repeats}')
        for state in self.layers.values():
            state.replace(lambda x: x.repeat_interleave(repeats, 0))


__all__ = ['Cache', 'LayerState']
