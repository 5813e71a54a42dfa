"""Kimi delta attention: `chunk_kda` for whole sequences, `fused_recurrent_kda` for decoding."""

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
