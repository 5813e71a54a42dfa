"""The state of a recurrence inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def state_tile(nh, vb, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr):
    """Returns key channels `[BK]`, value columns `[BV]`, mask and offsets `[BK, BV]` of a tile of a state.

    The tile has all key channels and block vb of the value columns of state nh, which stands in `[N * HV, K, V]` or, with
    V_FIRST, in `[N * HV, V, K]`."""
    rows = tl.arange(0, BK)
    cols = vb * BV + tl.arange(0, BV)
    mask = (rows[:, None] < K) & (cols[None, :] < V)
    at = nh.to(tl.int64) * K * V + (cols[None, :] * K + rows[:, None] if V_FIRST else rows[:, None] * V + cols[None, :])
    return rows, cols, mask, at
