"""Keys and values that grow by a step at a time."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from fla.backends.core.tensors import in_func_transform

Pair = tuple[torch.Tensor, torch.Tensor]

# Steps that there is room for at most, and at least, where an eighth of what there is would be more, or less: the more, the
# more memory waits, and the fewer copies there are.
MOST, LEAST = 256, 16


class Room:
    """Memory with room for more steps than are in it.

    Attributes:
        buffers: of keys and values, `[B, S', H, K]` and `[B, S', H, V]`.
        ends: the views `[B, S, ...]` of them that reach to the last step, in a list so that taking them out is one act: who
            finds there what it holds may write behind it, and nobody else. It is empty meanwhile, and stays so if the call
            fails.
    """

    def __init__(self, old: Pair, more: int) -> None:
        """With copies of `old`, for so many steps, and then more."""
        length = old[0].shape[1] + more
        room = length + min(MOST, max(LEAST, length // 8))
        self.buffers = tuple(x.new_empty(x.shape[0], room, *x.shape[2:]) for x in old)
        for buffer, x in zip(self.buffers, old, strict=True):
            buffer[:, : x.shape[1]] = x
        self.ends: list[Pair] = []

    def takes(self, old: Pair, new: Pair) -> bool:
        """Whether `new` may be written behind `old`; then it is to be, as nobody else may any more."""
        fits = old[0].shape[1] + new[0].shape[1] <= self.buffers[0].shape[1]
        if not fits or self.buffers[0].is_inference() != torch.is_inference_mode_enabled():
            return False
        try:
            ends = self.ends.pop()
        except IndexError:
            return False
        return ends[0] is old[0] and ends[1] is old[1]

    def write(self, start: int, new: Pair) -> Pair:
        """What is in it, with `new` from step `start` on."""
        stop = start + new[0].shape[1]
        for buffer, x in zip(self.buffers, new, strict=True):
            # not by a version of the buffer: a graph that holds views of sooner steps sees no change of them
            buffer.data[:, start:stop] = x
        keys, values = (buffer[:, :stop] for buffer in self.buffers)
        return keys, values


def joined(old: Pair, new: Pair, room: Room | None) -> tuple[Pair, Room | None]:
    """Keys and values `[B, S + T, H, K]` of `old` `[B, S, H, K]` and `new` `[B, T, H, K]`, and the room that they lie in,
    whose `ends` is to be given them once they are kept.

    If `old` is the end of what is in `room`, `new` is written behind it. Where a gradient may be asked for they are tensors
    of their own, and there is no room.
    """
    if _in_place(old, new):
        if room is None or not room.takes(old, new):
            room = Room(old, new[0].shape[1])
        return room.write(old[0].shape[1], new), room
    keys, values = (torch.cat(both, 1) for both in zip(old, new, strict=True))
    return (keys, values), None


def _in_place(old: Pair, new: Pair) -> bool:
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or in_func_transform() or forward_ad._current_level >= 0:
        return False
    return all(
        type(x) is type(y) is torch.Tensor and torch.promote_types(x.dtype, y.dtype) == x.dtype
        for x, y in zip(old, new, strict=True)
    )
