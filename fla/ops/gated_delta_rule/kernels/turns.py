"""Turns of a recurrence: several launches that spread slightly too many programs evenly over the multiprocessors.

Turns help where there are up to 1.5 times as many programs as multiprocessors, and a multiprocessor holds one program or is
slowed down by a second one. In a single launch, the programs that find no free multiprocessor wait for another to end or
share one, so that the GPU takes about as long as for twice as many programs. With n turns there are n launches. In each of
them 1 / n of the heads rest, and each other head advances by 1 / (n - 1) of its chunks, from the state in which it stopped.
All turns together take n / (n - 1) times as long as one program.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Least chunks of a turn: a turn reads and writes its state, which takes as long as a few chunks.
LEAST_CHUNKS = 16
MOST_TURNS = 8


def turns_of(heads: int, blocks: int, chunks: int, multiprocessors: int) -> int:
    """Returns the number of turns, 1 for a plain launch, and never so many that a turn has no chunks.

    Args:
        heads: heads of all sequences. blocks: programs of a head. chunks: chunks of a head.
        multiprocessors: of the GPU.
    """
    if heads * blocks <= multiprocessors:
        return 1
    for turns in range(min(MOST_TURNS, chunks // LEAST_CHUNKS + 1), 2, -1):
        if programs_of(heads, blocks, turns) <= multiprocessors:
            return turns
    return 1


def programs_of(heads: int, blocks: int, turns: int) -> int:
    """Returns the number of programs of one turn."""
    return heads * blocks if turns == 1 else -(-heads // turns) * (turns - 1) * blocks


@triton.jit
def of_turn(pid, turn, chunks, blocks, TURNS: tl.constexpr):
    """Returns a program's head, which may be past the last one, its block, and the first and end chunk of its turn."""
    nh = pid // blocks
    begin, stop = pid * 0, chunks
    if TURNS > 1:
        place = nh % (TURNS - 1)
        group = place + (place >= turn).to(tl.int32)
        nh = nh // (TURNS - 1) * TURNS + group
        each = tl.cdiv(chunks, TURNS - 1)
        begin = tl.minimum((turn - (group < turn).to(tl.int32)) * each, chunks)
        stop = tl.minimum(begin + each, chunks)
    return nh, pid % blocks, begin, stop
