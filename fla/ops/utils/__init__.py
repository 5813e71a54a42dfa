"""Helpers for users of chunked operations: tables of packed sequences, sums within chunks, triangular inverses. They are
plain PyTorch for every device; sums and inverses are differentiable. The kernels of this package do not use them."""

from fla.ops.utils.cumsum import chunk_global_cumsum, chunk_local_cumsum
from fla.ops.utils.index import prepare_chunk_indices, prepare_chunk_offsets, prepare_lens
from fla.ops.utils.solve_tril import solve_tril

__all__ = [
    'chunk_global_cumsum',
    'chunk_local_cumsum',
    'prepare_chunk_indices',
    'prepare_chunk_offsets',
    'prepare_lens',
    'solve_tril',
]
