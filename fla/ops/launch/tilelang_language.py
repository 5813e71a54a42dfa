"""Device functions that TileLang kernels share. Imports tilelang: only modules of kernels import this one."""

from typing import Any

import tilelang.language as T


def span(cu_seqlens: Any, n: Any, length: Any) -> Any:
    """Start and end of sequence n, clamped so that 0 <= start <= end <= length."""
    start = T.min(T.max(T.cast(cu_seqlens[n], 'int32'), 0), length)
    return start, T.min(T.max(T.cast(cu_seqlens[n + 1], 'int32'), start), length)


def softplus(x: Any) -> Any:
    """log(1 + e^x) without overflow; below -4 by its series, because 1 + e^x rounds e^x away."""
    y = T.exp(T.min(x, -4.0))
    series = y * (1.0 - y * (0.5 - y / 3.0))
    return T.if_then_else(x < -4.0, series, T.max(x, 0.0) + T.log(1.0 + T.exp(-T.abs(x))))
