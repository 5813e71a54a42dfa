"""Keys and values that grow by one step at a time."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from fla.backends.core.tensors import in_func_transform

KeysValues = tuple[torch.Tensor, torch.Tensor]

# A new buffer has an eighth of its steps to spare, within these bounds. More spare steps take more memory and save copies.
MIN_SPARE, MAX_SPARE = 16, 256


class GrowingBuffer:
    """Memory for keys and values, with spare steps at its end.

    Attributes:
        keys_values: tensors `[B, S', H, K]` and `[B, S', H, V]`.
        newest: a list of one pair, the views `[B, S, ...]` that end at the last step written. Popping it is atomic, so that
            of several caches with the same views only one writes behind them. The list stays empty if that call fails.
    """

    def __init__(self, old: KeysValues, more: int) -> None:
        """Copy `old` into a new buffer that has room for `more` steps and the spare ones."""
        length = old[0].shape[1] + more
        capacity = length + min(MAX_SPARE, max(MIN_SPARE, length // 8))
        self.keys_values = tuple(x.new_empty(x.shape[0], capacity, *x.shape[2:]) for x in old)
        for buffer, x in zip(self.keys_values, old, strict=True):
            buffer[:, : x.shape[1]] = x
        self.newest: list[KeysValues] = []

    def claim(self, old: KeysValues, new: KeysValues) -> bool:
        """Whether `new` fits and `old` is the newest pair. If so, the caller alone may write behind `old`, and must."""
        fits = old[0].shape[1] + new[0].shape[1] <= self.keys_values[0].shape[1]
        if not fits or self.keys_values[0].is_inference() != torch.is_inference_mode_enabled():
            return False
        try:
            newest = self.newest.pop()
        except IndexError:
            return False
        return newest[0] is old[0] and newest[1] is old[1]

    def write(self, start: int, new: KeysValues) -> KeysValues:
        """Write `new` from step `start` on; returns views of all steps up to its end."""
        stop = start + new[0].shape[1]
        for buffer, x in zip(self.keys_values, new, strict=True):
            # .data leaves the version counter: graphs that saved views of earlier steps remain valid
            buffer.data[:, start:stop] = x
        keys, values = (buffer[:, :stop] for buffer in self.keys_values)
        return keys, values


def append_steps(old: KeysValues, new: KeysValues, buffer: GrowingBuffer | None) -> tuple[KeysValues, GrowingBuffer | None]:
    """Concatenate keys and values `old` `[B, S, H, K]` and `new` `[B, T, H, K]`.

    Without gradients they are written into `buffer` if `old` is its newest pair, else into a new buffer. Where a gradient
    may be wanted, they become new tensors.

    Returns:
        Keys and values `[B, S + T, H, K]`, and the buffer that they are views of, or None. `LayerState.set_keys_values`
        stores both and makes them the buffer's newest pair.
    """
    if _may_write_in_place(old, new):
        if buffer is None or not buffer.claim(old, new):
            buffer = GrowingBuffer(old, new[0].shape[1])
        return buffer.write(old[0].shape[1], new), buffer
    keys, values = (torch.cat(both, 1) for both in zip(old, new, strict=True))
    return (keys, values), None


def _may_write_in_place(old: KeysValues, new: KeysValues) -> bool:
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or in_func_transform() or forward_ad._current_level >= 0:
        return False
    return all(
        type(x) is type(y) is torch.Tensor and torch.promote_types(x.dtype, y.dtype) == x.dtype
        for x, y in zip(old, new, strict=True)
    )
