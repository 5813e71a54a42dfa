"""Kimi delta attention: `chunk_kda` for whole sequences, `fused_recurrent_kda` for decoding.

The path of a call to `chunk_kda`, after `checks.py` has accepted it and the dispatcher has chosen the default:

1. `chunk.py`: the signature; its arguments become `Inputs` and `Options` (`recurrence/arguments.py`).
2. `autograd.py`: the opaque operator (`fla.opaque`), and its forward, backward and fake implementations.
3. `kernels/launch.py`: the kernels in their order, forward and backward; sizes of tiles are in `kernels/tuning.py`.
4. `launch/precompile.py`: before the first call of a kind, its kernels are compiled in parallel.
5. `launch/launch_cache.py`: launches the compiled kernel; kernels are in the other files of `kernels/`.

`fused_recurrent_kda`: `fused_recurrent.py`, then `recurrence/kernels/decode.py`; with gradients it calls `chunk_kda`.
"""

from __future__ import annotations

from fla.ops.kda.chunk import chunk_kda
from fla.ops.kda.fused_recurrent import fused_recurrent_kda
from fla.ops.kda.gate import fused_kda_gate, naive_kda_gate, naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_recurrent_kda

__all__ = [
    'chunk_kda',
    'fused_kda_gate',
    'fused_recurrent_kda',
    'naive_kda_gate',
    'naive_kda_lowerbound_gate',
    'naive_recurrent_kda',
]
