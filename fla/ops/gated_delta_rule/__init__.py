"""The gated delta rule: `chunk_gated_delta_rule` for whole sequences, `fused_recurrent_gated_delta_rule` for decoding.

The path of a call to `chunk_gated_delta_rule`, after `checks.py` has accepted it and the dispatcher has chosen the default:

1. `chunk.py`: the signature; its arguments become `Inputs` and `Options` (`recurrence/arguments.py`).
2. `autograd.py`: the opaque operator (`fla.opaque`), and its forward, backward and fake implementations.
3. `kernels/launch.py`: the kernels in their order, forward and backward; sizes of tiles are in `kernels/tuning.py`.
4. `launch/precompile.py`: before the first call of a kind, its kernels are compiled in parallel.
5. `launch/launch_cache.py`: launches the compiled kernel; kernels are in the other files of `kernels/`.

`fused_recurrent_gated_delta_rule`: `fused_recurrent.py`, then `recurrence/kernels/decode.py`; with gradients it calls
`chunk_gated_delta_rule`.
"""

from __future__ import annotations

from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule, chunk_gdn
from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule
from fla.ops.gated_delta_rule.gate import fused_gdn_gate, naive_gdn_gate
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

__all__ = [
    'chunk_gated_delta_rule',
    'chunk_gdn',
    'fused_gdn_gate',
    'fused_recurrent_gated_delta_rule',
    'naive_gdn_gate',
    'naive_recurrent_gated_delta_rule',
]
