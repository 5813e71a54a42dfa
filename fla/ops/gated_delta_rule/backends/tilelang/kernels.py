"""The forward of the chunked gated delta rule in TileLang, for Hopper (Yang et al. 2024, arXiv 2412.06464).

G is the running log decay of a chunk of 64 steps, S the state before the chunk, b = beta, and rk and rq are 1 / norm of keys
and queries, 1 unless these are normalised:

    L = tril(b_i rk_i rk_j e^{G_i - G_j} k_i k_j, -1),   X = (I + L)^-1 - I
    M = tril(scale rq_i rk_j e^{G_i - G_j} q_i k_j)
    R = b V - b rk e^G (K S),   U = R + X R
    O = scale rq e^G (Q S) + M U
    S <- e^{G_C} S + K^T (rk e^{G_C - G} U)

`prepare` computes X, M and factors of each step, for all chunks in parallel. `scan` runs over the chunks of a sequence and
holds a block of columns of S in registers. It never writes the states, nor W and U of the usual WY form.

Kernels are compiled for the widths K and V, dtypes and flags. The numbers of tokens, heads and sequences are arguments.
"""

# The annotations of kernels are TileLang calls, with a shape and a dtype.
# mypy: disable-error-code="valid-type"

from typing import Any

import tilelang.language as T

from fla.ops.launch.tilelang_language import softplus, span

CHUNK = 64
BLOCK = 16
# Factors of each step: b, b rk e^G, scale rq e^G, rk e^{G_C - G}, and e^{G_C}, which is the same for all steps.
FACTORS = 5


def prepare(
    K: int,
    dtype: str,
    gate_dtype: str,
    beta_dtype: str,
    index_dtype: str,
    packed: bool,
    normalise: bool,
    gate: bool,
    sigmoid: bool,
    double: bool,
) -> Any:
    """Returns the kernel that computes X, M and the factors, with grid (rows, HV).

    K is the width of keys. Flags: sequences are `packed`, `normalise` q and k, g is a raw `gate`, beta is the `sigmoid` of
    logits and `double` that. The arguments of the kernel are contiguous:

        q, k: `[tokens, H, K]`. g, beta: `[tokens, HV]`. A_log, dt_bias: float32 `[HV]`, read with `gate`.
        cu_seqlens, table: of the chunk table (`fla.ops.launch.kernels.layout`), read with `packed`.
        G: written, running log decay, float32 `[tokens, HV]`.
        inverse: written, X, strictly lower triangular, `[tokens, HV, 64]` in q's dtype.
        attend: written, M, `[tokens, HV, 64]` in q's dtype.
        factors: written, float32 `[rows, HV, 5, 64]`; rows without a chunk get zeros.
        length: steps of a sequence, or of all packed sequences. group: value heads of each head.
    """
    tokens, H, HV, rows, ends, entries = (T.dynamic(n) for n in ('tokens', 'H', 'HV', 'rows', 'ends', 'entries'))

    @T.prim_func
    def gdn_prepare(
        q: T.Tensor((tokens, H, K), dtype),
        k: T.Tensor((tokens, H, K), dtype),
        g: T.Tensor((tokens, HV), gate_dtype),
        beta: T.Tensor((tokens, HV), beta_dtype),
        A_log: T.Tensor((HV,), 'float32'),
        dt_bias: T.Tensor((HV,), 'float32'),
        cu_seqlens: T.Tensor((ends,), index_dtype),
        table: T.Tensor((entries, 2), 'int32'),
        G: T.Tensor((tokens, HV), 'float32'),
        inverse: T.Tensor((tokens, HV, CHUNK), dtype),
        attend: T.Tensor((tokens, HV, CHUNK), dtype),
        factors: T.Tensor((rows, HV, FACTORS, CHUNK), 'float32'),
        length: T.int32,
        group: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(rows, HV, threads=128) as (row, hv):
            Q_s = T.alloc_shared((CHUNK, K), dtype)
            K_s = T.alloc_shared((CHUNK, K), dtype)
            # Padded, because a row is written four numbers at a time.
            L_s = T.alloc_shared((CHUNK, CHUNK + 4), 'float32')
            M_s = T.alloc_shared((CHUNK, CHUNK), dtype)
            X_s = T.alloc_shared((CHUNK, CHUNK), 'float32')
            g_s = T.alloc_shared((CHUNK,), 'float32')
            G_s = T.alloc_shared((CHUNK,), 'float32')
            b_s = T.alloc_shared((CHUNK,), 'float32')
            rk_s = T.alloc_shared((CHUNK,), 'float32')
            rq_s = T.alloc_shared((CHUNK,), 'float32')
            scores = T.alloc_fragment((CHUNK, CHUNK), 'float32')
            squares = T.alloc_fragment((CHUNK, K), 'float32')
            row_sum = T.alloc_fragment((CHUNK,), 'float32')
            x = T.alloc_local((BLOCK,), 'float32')
            first = T.alloc_var('int32')
            count = T.alloc_var('int32')
            head = T.alloc_var('int32')
            head = T.truncdiv(hv, group)
            if packed:
                n = table[row, 0]
                start, end = span(cu_seqlens, T.max(n, 0), length)
                first = T.if_then_else(n < 0, 0, start + table[row, 1] * CHUNK)
                count = T.if_then_else(n < 0, 0, T.min(end - first, CHUNK))
            else:
                chunks = T.truncdiv(length + CHUNK - 1, CHUNK)
                first = T.truncdiv(row, chunks) * length + T.truncmod(row, chunks) * CHUNK
                count = T.min(length - T.truncmod(row, chunks) * CHUNK, CHUNK)
            for i, j in T.Parallel(CHUNK, K):
                K_s[i, j] = T.if_then_else(i < count, k[first + i, head, j], T.cast(0, dtype))
            for i, j in T.Parallel(CHUNK, K):
                Q_s[i, j] = T.if_then_else(i < count, q[first + i, head, j], T.cast(0, dtype))
            for i in T.Parallel(CHUNK):
                raw = T.if_then_else(i < count, T.cast(g[first + i, hv], 'float32'), 0.0)
                if gate:
                    raw = -T.exp(A_log[hv]) * softplus(raw + dt_bias[hv])
                # In float32 a decay below e^-104 is 0. A difference of sums that hold -inf is NaN.
                g_s[i] = T.if_then_else(i < count, T.max(raw, -128.0), 0.0)
            for i in T.Parallel(CHUNK):
                b = T.if_then_else(i < count, T.cast(beta[first + i, hv], 'float32'), 0.0)
                if sigmoid:
                    b = (2.0 if double else 1.0) / (1.0 + T.exp(-b))
                b_s[i] = T.if_then_else(i < count, b, 0.0)
            T.cumsum(src=g_s, dst=G_s, dim=0)
            if normalise:
                for i, j in T.Parallel(CHUNK, K):
                    squares[i, j] = T.cast(K_s[i, j], 'float32') * T.cast(K_s[i, j], 'float32')
                T.reduce_sum(squares, row_sum, dim=1)
                for i in T.Parallel(CHUNK):
                    rk_s[i] = T.rsqrt(row_sum[i] + 1e-6)
                for i, j in T.Parallel(CHUNK, K):
                    squares[i, j] = T.cast(Q_s[i, j], 'float32') * T.cast(Q_s[i, j], 'float32')
                T.reduce_sum(squares, row_sum, dim=1)
                for i in T.Parallel(CHUNK):
                    rq_s[i] = T.rsqrt(row_sum[i] + 1e-6) * scale
            else:
                for i in T.Parallel(CHUNK):
                    rk_s[i] = 1.0
                    rq_s[i] = scale
            T.gemm(Q_s, K_s, scores, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(CHUNK, CHUNK):
                M_s[i, j] = T.cast(
                    T.if_then_else(i >= j, scores[i, j] * T.exp(T.min(G_s[i] - G_s[j], 0.0)) * rq_s[i] * rk_s[j], 0.0),
                    dtype,
                )
            T.gemm(K_s, K_s, scores, transpose_B=True, clear_accum=True)
            # L_s holds the transpose of L, because the solve below reads columns of L.
            for i, j in T.Parallel(CHUNK, CHUNK):
                L_s[j, i] = T.if_then_else(
                    i > j, scores[i, j] * T.exp(T.min(G_s[i] - G_s[j], 0.0)) * (b_s[i] * rk_s[i]) * rk_s[j], 0.0
                )
            T.sync_threads()
            # Each thread solves for one column of I + X by substitution in float32: the most accurate way, and faster than
            # products that join inverses of blocks. It loops over blocks of 16 rows, because the code of a full unroll waits
            # for its instructions.
            tx = T.get_thread_binding()
            if tx < CHUNK:
                for block in T.serial(CHUNK // BLOCK):
                    for i in T.unroll(BLOCK):
                        x[i] = T.if_then_else(block * BLOCK + i == tx, 1.0, 0.0)
                    for j in T.serial(block * BLOCK):
                        for i in T.unroll(BLOCK):
                            x[i] -= L_s[j, block * BLOCK + i] * X_s[j, tx]
                    for j in T.unroll(BLOCK - 1):
                        for i in T.unroll(BLOCK - 1 - j):
                            x[j + 1 + i] -= L_s[block * BLOCK + j, block * BLOCK + j + 1 + i] * x[j]
                    for i in T.unroll(BLOCK):
                        X_s[block * BLOCK + i, tx] = x[i]
            T.sync_threads()
            for i, j in T.Parallel(CHUNK, CHUNK):
                if i < count:
                    attend[first + i, hv, j] = M_s[i, j]
            for i, j in T.Parallel(CHUNK, CHUNK):
                if i < count:
                    inverse[first + i, hv, j] = T.cast(T.if_then_else(i > j, X_s[i, j], 0.0), dtype)
            for i in T.Parallel(CHUNK):
                if i < count:
                    G[first + i, hv] = G_s[i]
                factors[row, hv, 0, i] = b_s[i]
                factors[row, hv, 1, i] = b_s[i] * rk_s[i] * T.exp(G_s[i])
                factors[row, hv, 2, i] = rq_s[i] * T.exp(G_s[i])
                factors[row, hv, 3, i] = T.if_then_else(i < count, rk_s[i] * T.exp(G_s[CHUNK - 1] - G_s[i]), 0.0)
                factors[row, hv, 4, i] = T.exp(G_s[CHUNK - 1])

    return gdn_prepare


def scan(
    K: int,
    V: int,
    dtype: str,
    initial_dtype: str,
    index_dtype: str,
    packed: bool,
    has_initial: bool,
    has_final: bool,
    v_first: bool,
    BV: int = 64,
    stages: int = 2,
    threads: int = 128,
) -> Any:
    """Returns the kernel of the recurrence, with grid (sequences * V / BV, HV): a program has BV value columns.

    The last chunk of a sequence is read as a whole, with steps of the next sequence after it. Selections, and zeros written
    over their keys, keep these steps out even if they are infinite or NaN. The arguments of the kernel are contiguous:

        q, k: `[tokens, H, K]`. v: `[tokens, HV, V]`. inverse, attend, factors: of `prepare`.
        initial, final: `[N, HV, K, V]` or, with `v_first`, `[N, HV, V, K]`, flat; read with `has_initial`, written with
            `has_final` in float32.
        cu_seqlens, offsets: `[N + 1]`, of the chunk table, read with `packed`.
        o: written, `[tokens, HV, V]`.
        sequences: N. length: steps of a sequence, or of all packed sequences. group: value heads of each head.
    """
    tokens, H, HV, rows, ends, initials, finals = (
        T.dynamic(n) for n in ('tokens', 'H', 'HV', 'rows', 'ends', 'initials', 'finals')
    )
    blocks = V // BV

    @T.prim_func
    def gdn_scan(
        q: T.Tensor((tokens, H, K), dtype),
        k: T.Tensor((tokens, H, K), dtype),
        v: T.Tensor((tokens, HV, V), dtype),
        inverse: T.Tensor((tokens, HV, CHUNK), dtype),
        attend: T.Tensor((tokens, HV, CHUNK), dtype),
        factors: T.Tensor((rows, HV, FACTORS, CHUNK), 'float32'),
        initial: T.Tensor((initials,), initial_dtype),
        final: T.Tensor((finals,), 'float32'),
        cu_seqlens: T.Tensor((ends,), index_dtype),
        offsets: T.Tensor((ends,), 'int32'),
        o: T.Tensor((tokens, HV, V), dtype),
        sequences: T.int32,
        length: T.int32,
        group: T.int32,
    ):
        # Blocks of one head are neighbours in the grid, because they read the same keys.
        with T.Kernel(sequences * blocks, HV, threads=threads) as (pid, hv):
            Q_s = T.alloc_shared((CHUNK, K), dtype)
            K_s = T.alloc_shared((CHUNK, K), dtype)
            V_s = T.alloc_shared((CHUNK, BV), dtype)
            X_s = T.alloc_shared((CHUNK, CHUNK), dtype)
            M_s = T.alloc_shared((CHUNK, CHUNK), dtype)
            F_s = T.alloc_shared((FACTORS, CHUNK), 'float32')
            S_s = T.alloc_shared((K, BV), dtype)
            R_s = T.alloc_shared((CHUNK, BV), dtype)
            U_s = T.alloc_shared((CHUNK, BV), dtype)
            kU_s = T.alloc_shared((CHUNK, BV), dtype)
            S = T.alloc_fragment((K, BV), 'float32')
            R = T.alloc_fragment((CHUNK, BV), 'float32')
            U = T.alloc_fragment((CHUNK, BV), 'float32')
            out = T.alloc_fragment((CHUNK, BV), 'float32')
            start = T.alloc_var('int32')
            end = T.alloc_var('int32')
            row = T.alloc_var('int32')
            head = T.alloc_var('int32')
            n = T.truncdiv(pid, blocks)
            at = T.truncmod(pid, blocks) * BV
            head = T.truncdiv(hv, group)
            if packed:
                begin, stop = span(cu_seqlens, n, length)
                start = begin
                end = stop
                row = offsets[n]
            else:
                start = n * length
                end = start + length
                row = n * T.truncdiv(length + CHUNK - 1, CHUNK)
            if has_initial:
                for i, j in T.Parallel(K, BV):
                    if v_first:
                        S[i, j] = T.cast(initial[((n * HV + hv) * V + at + j) * K + i], 'float32')
                    else:
                        S[i, j] = T.cast(initial[((n * HV + hv) * K + i) * V + at + j], 'float32')
            else:
                T.clear(S)
            for c in T.Pipelined(T.truncdiv(end - start + CHUNK - 1, CHUNK), num_stages=stages):
                t = start + c * CHUNK
                T.copy(k[t : t + CHUNK, head, 0:K], K_s)
                T.copy(factors[row + c, hv, 0:FACTORS, 0:CHUNK], F_s)
                T.copy(v[t : t + CHUNK, hv, at : at + BV], V_s)
                T.copy(inverse[t : t + CHUNK, hv, 0:CHUNK], X_s)
                T.copy(q[t : t + CHUNK, head, 0:K], Q_s)
                T.copy(attend[t : t + CHUNK, hv, 0:CHUNK], M_s)
                T.copy(S, S_s)
                T.gemm(K_s, S_s, R, clear_accum=True)
                for i, j in T.Parallel(CHUNK, BV):
                    R[i, j] = T.if_then_else(
                        t + i < end, F_s[0, i] * T.cast(V_s[i, j], 'float32') - F_s[1, i] * R[i, j], 0.0
                    )
                T.copy(R, R_s)
                T.copy(R, U)
                T.gemm(X_s, R_s, U)
                for i, j in T.Parallel(CHUNK, BV):
                    U[i, j] = T.if_then_else(t + i < end, U[i, j], 0.0)
                T.copy(U, U_s)
                for i, j in T.Parallel(CHUNK, BV):
                    U[i, j] *= F_s[3, i]
                T.copy(U, kU_s)
                for i, j in T.Parallel(K, BV):
                    S[i, j] *= F_s[4, 0]
                # After the first product with K_s, which waits for its arrival.
                if t + CHUNK > end:
                    for i, j in T.Parallel(CHUNK, K):
                        if t + i >= end:
                            K_s[i, j] = T.cast(0, dtype)
                T.gemm(K_s, kU_s, S, transpose_A=True)
                T.gemm(Q_s, S_s, out, clear_accum=True)
                for i, j in T.Parallel(CHUNK, BV):
                    out[i, j] *= F_s[2, i]
                T.gemm(M_s, U_s, out)
                for i, j in T.Parallel(CHUNK, BV):
                    if t + i < end:
                        o[t + i, hv, at + j] = T.cast(out[i, j], dtype)
            if has_final:
                for i, j in T.Parallel(K, BV):
                    if v_first:
                        final[((n * HV + hv) * V + at + j) * K + i] = S[i, j]
                    else:
                        final[((n * HV + hv) * K + i) * V + at + j] = S[i, j]

    return gdn_scan
