"""Softmax attention: `parallel_attn`."""

from __future__ import annotations

from fla.ops.attn.naive import naive_parallel_attn
from fla.ops.attn.parallel import parallel_attn

__all__ = ['naive_parallel_attn', 'parallel_attn']
