"""What the layers of one model remember between calls."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from fla.backends import check_tensors
from fla.layers.keys import Pair, Room
from fla.modules.checks import check_int
from fla.ops.checks import check_given, readable


@dataclass
class LayerState:
    """Of one layer; a kind of layer uses what it needs. A call may change `conv` in place, and puts new tensors in place of
    the others: what is to be kept from before it is a deep copy.

    Attributes:
        recurrent: state of the recurrence `[N, HV, K, V]`, float32; float64 of layers in float64. Of heads with V above 256
            that of their parts, `[N, n HV, K, V / n]`.
        conv: last W steps before each convolution, `[N, D, W]`.
        keys_values: `[B, S, H, K]` and `[B, S, H, V]`; of steps added without gradients, views of memory with room for more.
        length: how many steps the layer has seen, padding included; of packed sequences, all together.
        room: that memory.
        torn: whether a call is changing it, or failed while it did.
    """

    recurrent: torch.Tensor | None = None
    conv: tuple[torch.Tensor, ...] | None = None
    keys_values: Pair | None = None
    length: int = 0
    room: Room | None = field(default=None, repr=False, compare=False)
    torn: bool = field(default=False, repr=False, compare=False)

    def tensors(self) -> list[torch.Tensor]:
        """All that there are."""
        return [x for x in (self.recurrent, *(self.conv or ()), *(self.keys_values or ())) if x is not None]

    def __deepcopy__(self, memo: dict[int, object]) -> LayerState:
        """Copies that stay in the graph, where there is one: PyTorch's own are of leaves alone."""
        copied = LayerState(self.recurrent, self.conv, self.keys_values, self.length, torn=self.torn)
        copied.replace(torch.clone)
        return copied

    def __copy__(self) -> LayerState:
        return dataclasses.replace(self)

    def __getstate__(self) -> dict[str, object]:
        """For pickle: without the memory that waits for more steps."""
        return vars(self if self.room is None else copy.deepcopy(self))

    def replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put `change` of each tensor in its place."""
        if self.recurrent is not None:
            self.recurrent = change(self.recurrent)
        if self.conv is not None:
            self.conv = tuple(change(x) for x in self.conv)
        if self.keys_values is not None:
            self.keep(change(self.keys_values[0]), change(self.keys_values[1]))

    def keep(self, keys: torch.Tensor, values: torch.Tensor, room: Room | None = None) -> None:
        """Keys and values in place of those that there are, and the room that they lie in."""
        self.keys_values, self.room = (keys, values), room
        if room is not None:
            room.ends.append(self.keys_values)


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

    def __contains__(self, layer_idx: object) -> bool:
        """Whether a layer has a state."""
        return layer_idx in self.layers and bool(self.layers[layer_idx].tensors())

    def __iter__(self) -> Iterator[int]:
        """The `layer_idx` of each layer that has a state."""
        return (layer_idx for layer_idx in sorted(self.layers) if layer_idx in self)

    def __len__(self) -> int:
        """How many layers have a state."""
        return sum(1 for state in self.layers.values() if state.tensors())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many steps a layer has seen."""
        return self.layers[layer_idx].length if layer_idx in self.layers else 0

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences of these numbers `[M]`, int32 or int64, in this order; one may come several times.

        Raises:
            TypeError, ValueError: for numbers that are none of sequences; on a GPU, where reading them would wait, PyTorch
                says so later.
        """
        self._check_rows('indices', indices)
        for state in self.layers.values():
            state.replace(lambda x: x.index_select(0, indices.to(x.device)))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each beam go on from that of number `beam_idx` `[N]`, int32 or int64."""
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
        held = [x.shape[0] for x in tensors]
        if held and indices.numel() and readable(indices):
            least, most = (int(x) for x in indices.aminmax())
            if least < 0 or most >= min(held):
                raise ValueError(f'{name} must be in [0, {min(held)}), the number of sequences, got {least} to {most}')

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each sequence `repeats` times, one after the other."""
        check_int('repeats', repeats)
        if repeats < 0:
            raise ValueError(f'repeats must be at least 0, got {repeats}')
        for state in self.layers.values():
            state.replace(lambda x: x.repeat_interleave(repeats, 0))


def check_rows(state: LayerState, count: int | torch.SymInt) -> None:
    """A state to go on from has a row for each of `count` sequences."""
    for x in state.tensors():
        if x.shape[0] != count:
            raise ValueError(f'past_key_values holds {x.shape[0]} sequences, got {count}')


def check_state(state: LayerState, layer_idx: int | None, device: torch.device, **sizes: list[tuple[int, ...]]) -> None:
    """A state to go on from is of such a layer, and on its device, before anything of it is changed. `sizes` are the last
    ones of the tensors that the layer keeps, by the names of `LayerState`."""
    if state.torn:
        raise ValueError(
            f'past_key_values[{layer_idx}] was changed in part by a step that failed: begin anew, or from a copy.deepcopy'
        )
    recurrent = None if state.recurrent is None else (state.recurrent,)
    held = {'recurrent': recurrent, 'conv': state.conv, 'keys_values': state.keys_values}
    for name, tensors in held.items():
        if tensors is None:
            continue
        wanted = sizes.get(name, [])
        if len(tensors) != len(wanted) or any(x.shape[-len(y) :] != y for x, y in zip(tensors, wanted, strict=True)):
            raise ValueError(
                f'past_key_values[{layer_idx}].{name} is of another layer, with sizes '
                f'{[list(x.shape[1:]) for x in tensors]} and not {[list(y) for y in wanted] or "there"}: '
                'each layer of a model needs a layer_idx of its own'
            )
        for x in tensors:
            if x.device != device:
                raise ValueError(f'past_key_values is on {x.device} and hidden_states on {device}: move them to one device')


def check_cache(cache: object, layer_idx: int | None) -> None:
    """A cache is a `Cache`, and a layer that is given one knows its own place in it."""
    if cache is None:
        return
    if not isinstance(cache, Cache):
        raise TypeError(f'past_key_values must be a fla.layers.Cache or None, got {type(cache).__name__}')
    if layer_idx is None:
        raise ValueError('a layer with past_key_values needs a layer_idx: pass it to its constructor')


__all__ = ['Cache', 'LayerState', 'check_cache', 'check_rows', 'check_state']
