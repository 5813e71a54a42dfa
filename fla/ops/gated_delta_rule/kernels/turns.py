"""Turns of a recurrence, for when its programs are up to half as many again as the multiprocessors, each of which holds one
or is slowed down by a second.

In one launch, what does not find a place of its own waits for a whole program to end, or shares: the GPU takes about as
long as for twice as many. Instead there are n launches. In each of them 1 / n of the heads rest, and each of the others goes
on by 1 / (n - 1) of its chunks, from the state in which it stopped. That takes n / (n - 1) of a program's time.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A turn reads and writes its state, which takes as long as a few chunks.
LEAST_CHUNKS = 16
MOST_TURNS = 8


def turns_of(heads: int, blocks: int, chunks: int, multiprocessors: int) -> int:
    """How many turns the heads of all sequences take, of `blocks` programs and `chunks` chunks each; 1 for a plain launch.
    So few that no turn is without chunks."""
    if heads * blocks <= multiprocessors:
        return 1
    for turns in range(min(MOST_TURNS, chunks // LEAST_CHUNKS + 1), 2, -1):
        if programs_of(heads, blocks, turns) <= multiprocessors:
            return turns
    return 1


def programs_of(heads: int, blocks: int, turns: int) -> int:
    """The programs of one turn."""
    return heads * blocks if turns == 1 else -(-heads // turns) * (turns - 1) * blocks


@triton.jit
def of_turn(pid, turn, chunks, blocks, TURNS: tl.constexpr):
    """Head and block of a program, and the first chunk and the end of its turn. The head may be past the last one."""
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
