"""Softmax attention: `parallel_attn`, with windows, packed sequences, log decays and sinks.

The path of a call where the Triton default serves:

1. `parallel.py`: the public function and its docstring; `checks.py` checks the arguments.
2. `fla/backends/runtime`: the entry point chooses the default or a backend of `backends/`.
3. `autograd.py`: the kernels as one differentiable operator.
4. `kernels/launch.py`: launches and block sizes.
5. `kernels/forward.py`, `kernels/backward.py`: the kernels.
"""

from __future__ import annotations

from fla.ops.attn.naive import naive_parallel_attn
from fla.ops.attn.parallel import parallel_attn

__all__ = ['naive_parallel_attn', 'parallel_attn']
