"""The gated delta rule: `chunk_gated_delta_rule` for whole sequences, `fused_recurrent_gated_delta_rule` for decoding."""

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
