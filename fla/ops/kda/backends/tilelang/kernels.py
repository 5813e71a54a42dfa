"""The gradients within a chunk of Kimi delta attention in TileLang, for Hopper: one kernel for what the Triton backward does
in `pairs_backward` and `channels_backward`, whose comments have the mathematics and the names.

A program has all channels of a chunk of one head: gradients of pairs of steps stay in registers and shared memory, and what
both Triton kernels read (G, the state, do, the updates) is read once. Pairs of steps meet through the middle of the chunk,
or, where decays are stronger than e^60 (for float16: always), at six levels of halves.

Only shapes of heads are compiled in; numbers of tokens, heads and chunks are arguments.
"""

# What stands as a type is a call in TileLang: a shape and a dtype.
# mypy: disable-error-code="valid-type"

from typing import Any

import tilelang.language as T

from fla.ops.launch.tilelang_language import softplus, span

CHUNK = 64
THREADS = 256
# of G from the middle of a chunk
MOST = 60.0


def within(
    K: int,
    V: int,
    dtype: str,
    gate_dtype: str,
    beta_dtype: str,
    index_dtype: str,
    packed: bool,
    normalise: bool,
    gate: bool,
    bounded: bool,
    sigmoid: bool,
    double: bool,
) -> Any:
    """One program for each row of the chunk table and each value head; rows without a chunk give zeros to sums over rows."""
    tokens, H, HV, rows, ends, entries, sums = (
        T.dynamic(n) for n in ('tokens', 'H', 'HV', 'rows', 'ends', 'entries', 'sums')
    )
    f32 = 'float32'
    # in the last part a thread has one channel of a segment of the steps
    segments = THREADS // K
    steps = CHUNK // segments

    @T.prim_func
    def kda_within(
        q: T.Tensor((tokens, H, K), dtype),
        k: T.Tensor((tokens, H, K), dtype),
        v: T.Tensor((tokens, HV, V), dtype),
        g: T.Tensor((tokens, HV, K), gate_dtype),
        beta: T.Tensor((tokens, HV), beta_dtype),
        rates: T.Tensor((HV,), f32),
        bias: T.Tensor((HV, K), f32),
        G: T.Tensor((tokens, HV, K), f32),
        lower: T.Tensor((tokens, HV, CHUNK), f32),
        inverse: T.Tensor((tokens, HV, CHUNK), dtype),
        v_new: T.Tensor((tokens, HV, V), dtype),
        h: T.Tensor((rows, HV, K, V), dtype),
        dh: T.Tensor((rows, HV, K, V), dtype),
        do: T.Tensor((tokens, HV, V), dtype),
        du: T.Tensor((tokens, HV, V), dtype),
        cu_seqlens: T.Tensor((ends,), index_dtype),
        table: T.Tensor((entries, 2), 'int32'),
        dq: T.Tensor((tokens, HV, K), dtype),
        dk: T.Tensor((tokens, HV, K), dtype),
        dv: T.Tensor((tokens, HV, V), dtype),
        dg: T.Tensor((tokens, HV, K), gate_dtype),
        dbeta: T.Tensor((tokens, HV), beta_dtype),
        d_rates: T.Tensor((sums, HV), f32),
        d_bias: T.Tensor((sums, HV, K), f32),
        length: T.int32,
        group: T.int32,
        scale: T.float32,
        lower_bound: T.float32,
    ):
        with T.Kernel(rows, HV, threads=THREADS) as (row, hv):
            dO_s = T.alloc_shared((CHUNK, V), dtype)
            dU_s = T.alloc_shared((CHUNK, V), dtype)
            U_s = T.alloc_shared((CHUNK, V), dtype)
            V_s = T.alloc_shared((CHUNK, V), dtype)
            S_s = T.alloc_shared((K, V), dtype)
            dS_s = T.alloc_shared((K, V), dtype)
            X_s = T.alloc_shared((CHUNK, CHUNK), dtype)
            T_s = T.alloc_shared((CHUNK, CHUNK), dtype)
            dX_s = T.alloc_shared((CHUNK, CHUNK), dtype)
            half_s = T.alloc_shared((CHUNK, CHUNK), dtype)
            M_s = T.alloc_shared((CHUNK, CHUNK), dtype)
            A_s = T.alloc_shared((CHUNK, CHUNK), dtype)
            dV_s = T.alloc_shared((CHUNK, V), dtype)
            dW_s = T.alloc_shared((CHUNK, K), dtype)
            grown_s = T.alloc_shared((CHUNK, K), dtype)
            Q_s = T.alloc_shared((CHUNK, K), dtype)
            K_s = T.alloc_shared((CHUNK, K), dtype)
            x_s = T.alloc_shared((CHUNK, K), dtype)
            y_s = T.alloc_shared((CHUNK, K), dtype)
            G_s = T.alloc_shared((CHUNK, K), f32)
            dG_s = T.alloc_shared((CHUNK, K), f32)
            square_s = T.alloc_shared((CHUNK, CHUNK), f32)
            b_s = T.alloc_shared((CHUNK,), f32)
            rq_s = T.alloc_shared((CHUNK,), f32)
            rk_s = T.alloc_shared((CHUNK,), f32)
            db_s = T.alloc_shared((CHUNK,), f32)
            rows_s = T.alloc_shared((CHUNK,), f32)
            diagonal_s = T.alloc_shared((CHUNK,), f32)
            kept_s = T.alloc_shared((K,), f32)
            last_s = T.alloc_shared((K,), f32)
            far_s = T.alloc_shared((CHUNK,), f32)
            total_s = T.alloc_shared((segments, K), f32)
            part_s = T.alloc_shared((segments, K), f32)
            rate_s = T.alloc_shared((THREADS // 32,), f32)

            wide = T.alloc_fragment((CHUNK, K), f32)
            d_query = T.alloc_fragment((CHUNK, K), f32)
            d_key = T.alloc_fragment((CHUNK, K), f32)
            dG = T.alloc_fragment((CHUNK, K), f32)
            dV = T.alloc_fragment((CHUNK, V), f32)
            both = T.alloc_fragment((K, V), f32)
            dM = T.alloc_fragment((CHUNK, CHUNK), f32)
            dT = T.alloc_fragment((CHUNK, CHUNK), f32)
            square = T.alloc_fragment((CHUNK, CHUNK), f32)
            # sums: each follows the layout of what it sums
            of_steps = T.alloc_fragment((CHUNK,), f32)
            of_rows = T.alloc_fragment((CHUNK,), f32)
            of_state = T.alloc_fragment((K,), f32)
            x = T.alloc_local((steps,), f32)
            first = T.alloc_var('int32')
            count = T.alloc_var('int32')
            head = T.alloc_var('int32')
            levels = T.alloc_var('int32')
            half = T.alloc_var('int32')
            total = T.alloc_var(f32)
            part = T.alloc_var(f32)
            for_rate = T.alloc_var(f32)
            raw = T.alloc_var(f32)
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

            # what has value columns
            for i, j in T.Parallel(CHUNK, V):
                dO_s[i, j] = T.if_then_else(i < count, do[first + i, hv, j], T.cast(0, dtype))
            for i, j in T.Parallel(CHUNK, V):
                dU_s[i, j] = T.if_then_else(i < count, du[first + i, hv, j], T.cast(0, dtype))
            for i, j in T.Parallel(CHUNK, V):
                U_s[i, j] = T.if_then_else(i < count, v_new[first + i, hv, j], T.cast(0, dtype))
            for i, j in T.Parallel(CHUNK, V):
                V_s[i, j] = T.if_then_else(i < count, v[first + i, hv, j], T.cast(0, dtype))
            for i, j in T.Parallel(K, V):
                S_s[i, j] = h[row, hv, i, j]
            for i, j in T.Parallel(K, V):
                dS_s[i, j] = dh[row, hv, i, j]
            for i in T.Parallel(CHUNK):
                b = T.if_then_else(i < count, T.cast(beta[first + i, hv], f32), 0.0)
                if sigmoid:
                    b = (2.0 if double else 1.0) / (1.0 + T.exp(-b))
                b_s[i] = T.if_then_else(i < count, b, 0.0)
            for i, j in T.Parallel(CHUNK, CHUNK):
                X_s[i, j] = T.if_then_else(i < count, inverse[first + i, hv, j], T.cast(0, dtype))
            for i, j in T.Parallel(CHUNK, CHUNK):
                T_s[i, j] = T.cast(T.cast(X_s[i, j], f32) * b_s[j], dtype)
            T.gemm(dU_s, S_s, wide, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(CHUNK, K):
                wide[i, j] = -wide[i, j]
            T.copy(wide, dW_s)
            T.gemm(dO_s, S_s, d_query, transpose_B=True, clear_accum=True)
            T.gemm(U_s, dS_s, d_key, transpose_B=True, clear_accum=True)
            T.gemm(dO_s, U_s, dM, transpose_B=True, clear_accum=True)
            T.gemm(dU_s, V_s, dT, transpose_B=True, clear_accum=True)
            T.gemm(T_s, dU_s, dV, transpose_A=True, clear_accum=True)
            T.copy(dV, dV_s)
            for i, j in T.Parallel(K, V):
                both[i, j] = T.cast(S_s[i, j], f32) * T.cast(dS_s[i, j], f32)
            T.reduce_sum(both, of_state, dim=1)
            for i in T.Parallel(K):
                kept_s[i] = of_state[i]
            for i, j in T.Parallel(CHUNK, V):
                if i < count:
                    dv[first + i, hv, j] = dV_s[i, j]

            # keys, queries and G
            for i, j in T.Parallel(CHUNK, K):
                K_s[i, j] = T.if_then_else(i < count, k[first + i, head, j], T.cast(0, dtype))
            for i, j in T.Parallel(CHUNK, K):
                Q_s[i, j] = T.if_then_else(i < count, q[first + i, head, j], T.cast(0, dtype))
            # steps behind the end are as the last one: nothing decays there
            for i, j in T.Parallel(CHUNK, K):
                G_s[i, j] = G[first + T.max(T.min(i, count - 1), 0), hv, j]
            if normalise:
                for i, j in T.Parallel(CHUNK, K):
                    wide[i, j] = T.cast(K_s[i, j], f32) * T.cast(K_s[i, j], f32)
                T.reduce_sum(wide, of_steps, dim=1)
                for i in T.Parallel(CHUNK):
                    rk_s[i] = T.rsqrt(of_steps[i] + 1e-6)
                for i, j in T.Parallel(CHUNK, K):
                    wide[i, j] = T.cast(Q_s[i, j], f32) * T.cast(Q_s[i, j], f32)
                T.reduce_sum(wide, of_steps, dim=1)
                for i in T.Parallel(CHUNK):
                    rq_s[i] = T.rsqrt(of_steps[i] + 1e-6)
            else:
                for i in T.Parallel(CHUNK):
                    rk_s[i] = 1.0
                    rq_s[i] = 1.0
            for i, j in T.Parallel(CHUNK, K):
                wide[i, j] = T.cast(K_s[i, j], f32) * T.exp(G_s[i, j]) * rk_s[i]
            T.copy(wide, grown_s)
            T.gemm(dW_s, grown_s, dT, transpose_B=True)

            # what comes through the states
            for i, j in T.Parallel(CHUNK, K):
                d_query[i, j] *= T.exp(G_s[i, j]) * scale
            for i, j in T.Parallel(CHUNK, K):
                d_key[i, j] *= T.exp(G_s[CHUNK - 1, j] - G_s[i, j])
            # the keys that the next state takes carry e^{G_C - G}, of the last step 1 whatever G is
            for i, j in T.Parallel(CHUNK, K):
                wide[i, j] = T.if_then_else(i < count - 1, T.cast(K_s[i, j], f32) * rk_s[i] * d_key[i, j], 0.0)
            # a sum over steps goes through shared memory: across warps it would take a barrier for each of its parts
            T.copy(wide, dG_s)
            T.sync_threads()
            tx = T.get_thread_binding()
            column = T.truncmod(tx, K)
            segment = T.truncdiv(tx, K)
            total = 0.0
            for i in T.unroll(steps):
                total += dG_s[segment * steps + i, column]
            total_s[segment, column] = total
            T.sync_threads()
            if segment == 0:
                total = kept_s[column] * T.exp(G_s[CHUNK - 1, column])
                for i in T.unroll(segments):
                    total += total_s[i, column]
                last_s[column] = total
            T.sync_threads()
            for i, j in T.Parallel(CHUNK, K):
                dG[i, j] = T.cast(Q_s[i, j], f32) * rq_s[i] * d_query[i, j] + T.if_then_else(
                    i == count - 1, last_s[j], -wide[i, j]
                )
            T.gemm(T_s, dW_s, wide, transpose_A=True, clear_accum=True)
            for i, j in T.Parallel(CHUNK, K):
                wide[i, j] *= T.exp(G_s[i, j])
            for i, j in T.Parallel(CHUNK, K):
                dG[i, j] += T.cast(K_s[i, j], f32) * rk_s[i] * wide[i, j]
                d_key[i, j] += wide[i, j]

            # L = diag(beta) A; of its inverse X, dL = -X^T dX X^T below the diagonal
            for i, j in T.Parallel(CHUNK, CHUNK):
                square[i, j] = dT[i, j] * T.cast(X_s[i, j], f32)
            T.copy(square, square_s)
            T.sync_threads()
            if tx < CHUNK:
                total = 0.0
                for i in T.unroll(CHUNK):
                    total += square_s[i, tx]
                db_s[tx] = total
            T.sync_threads()
            for i, j in T.Parallel(CHUNK, CHUNK):
                dT[i, j] = T.if_then_else(i > j, dT[i, j] * b_s[j], 0.0)
            T.copy(dT, dX_s)
            T.gemm(X_s, dX_s, square, transpose_A=True, clear_accum=True)
            T.copy(square, half_s)
            T.gemm(half_s, X_s, dT, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(CHUNK, CHUNK):
                dT[i, j] = T.if_then_else(i > j, -dT[i, j], 0.0)
            for i, j in T.Parallel(CHUNK, CHUNK):
                square[i, j] = dT[i, j] * T.if_then_else(i < count, lower[first + i, hv, j], 0.0)
            T.reduce_sum(square, of_rows, dim=1)
            for i in T.Parallel(CHUNK):
                rows_s[i] = of_rows[i]
            for i in T.Parallel(CHUNK):
                db = db_s[i] + rows_s[i]
                if sigmoid:
                    db = db * b_s[i] * ((1.0 - b_s[i] * 0.5) if double else (1.0 - b_s[i]))
                if i < count:
                    dbeta[first + i, hv] = T.cast(db, beta_dtype)
            for i, j in T.Parallel(CHUNK, CHUNK):
                dT[i, j] *= b_s[i]
            for i, j in T.Parallel(CHUNK, CHUNK):
                dM[i, j] *= scale
            # a step with itself
            for i, j in T.Parallel(CHUNK, CHUNK):
                if i == j:
                    diagonal_s[i] = dM[i, j]
            for i, j in T.Parallel(CHUNK, K):
                d_query[i, j] += diagonal_s[i] * T.cast(K_s[i, j], f32) * rk_s[i]
                d_key[i, j] += diagonal_s[i] * T.cast(Q_s[i, j], f32) * rq_s[i]

            # pairs of steps
            levels = 6
            if dtype == 'bfloat16':
                for i, j in T.Parallel(CHUNK, K):
                    wide[i, j] = T.abs(G_s[i, j] - G_s[T.truncdiv(count, 2), j])
                T.reduce_max(wide, of_steps, dim=1)
                for i in T.Parallel(CHUNK):
                    far_s[i] = of_steps[i]
                total = 0.0
                for i in T.serial(CHUNK):
                    total = T.max(total, far_s[i])
                levels = T.if_then_else(total <= MOST, 1, 6)
            for level in T.serial(levels):
                half = T.shift_right(CHUNK // 2, level)
                # of a level: G at the boundary of the pair of blocks, which steps of either side reach with exponents <= 0
                for i, j in T.Parallel(CHUNK, CHUNK):
                    square[i, j] = T.if_then_else(
                        i > j and (levels == 1 or T.bitwise_xor(T.truncdiv(i, half), T.truncdiv(j, half)) == 1),
                        dM[i, j],
                        0.0,
                    )
                T.copy(square, M_s)
                for i, j in T.Parallel(CHUNK, CHUNK):
                    square[i, j] = T.if_then_else(
                        i > j and (levels == 1 or T.bitwise_xor(T.truncdiv(i, half), T.truncdiv(j, half)) == 1),
                        dT[i, j],
                        0.0,
                    )
                T.copy(square, A_s)
                for i, j in T.Parallel(CHUNK, K):
                    away = (
                        G_s[i, j]
                        - G_s[
                            T.if_then_else(levels == 1, T.truncdiv(count, 2), T.truncdiv(i, 2 * half) * 2 * half + half), j
                        ]
                    )
                    wide[i, j] = T.cast(K_s[i, j], f32) * rk_s[i] * T.exp(T.if_then_else(levels == 1, -away, -T.abs(away)))
                T.copy(wide, y_s)
                for i, j in T.Parallel(CHUNK, K):
                    away = (
                        G_s[i, j]
                        - G_s[
                            T.if_then_else(levels == 1, T.truncdiv(count, 2), T.truncdiv(i, 2 * half) * 2 * half + half), j
                        ]
                    )
                    wide[i, j] = T.cast(Q_s[i, j], f32) * rq_s[i] * T.exp(T.if_then_else(levels == 1, away, -T.abs(away)))
                T.copy(wide, x_s)
                # rows of the scores of q, then of k; then columns of both
                T.gemm(M_s, y_s, wide, clear_accum=True)
                for i, j in T.Parallel(CHUNK, K):
                    away = (
                        G_s[i, j]
                        - G_s[
                            T.if_then_else(levels == 1, T.truncdiv(count, 2), T.truncdiv(i, 2 * half) * 2 * half + half), j
                        ]
                    )
                    dG[i, j] += T.cast(x_s[i, j], f32) * wide[i, j]
                    d_query[i, j] += wide[i, j] * T.exp(T.if_then_else(levels == 1, away, -T.abs(away)))
                T.gemm(M_s, x_s, wide, transpose_A=True, clear_accum=True)
                for i, j in T.Parallel(CHUNK, K):
                    away = (
                        G_s[i, j]
                        - G_s[
                            T.if_then_else(levels == 1, T.truncdiv(count, 2), T.truncdiv(i, 2 * half) * 2 * half + half), j
                        ]
                    )
                    x_s[i, j] = T.cast(
                        T.cast(K_s[i, j], f32) * rk_s[i] * T.exp(T.if_then_else(levels == 1, away, -T.abs(away))), dtype
                    )
                T.gemm(A_s, x_s, wide, transpose_A=True)
                for i, j in T.Parallel(CHUNK, K):
                    away = (
                        G_s[i, j]
                        - G_s[
                            T.if_then_else(levels == 1, T.truncdiv(count, 2), T.truncdiv(i, 2 * half) * 2 * half + half), j
                        ]
                    )
                    dG[i, j] -= T.cast(y_s[i, j], f32) * wide[i, j]
                    d_key[i, j] += wide[i, j] * T.exp(T.if_then_else(levels == 1, -away, -T.abs(away)))
                T.gemm(A_s, y_s, wide, clear_accum=True)
                for i, j in T.Parallel(CHUNK, K):
                    away = (
                        G_s[i, j]
                        - G_s[
                            T.if_then_else(levels == 1, T.truncdiv(count, 2), T.truncdiv(i, 2 * half) * 2 * half + half), j
                        ]
                    )
                    dG[i, j] += T.cast(x_s[i, j], f32) * wide[i, j]
                    d_key[i, j] += wide[i, j] * T.exp(T.if_then_else(levels == 1, away, -T.abs(away)))

            T.copy(d_query, x_s)
            T.copy(d_key, y_s)
            T.copy(dG, dG_s)
            for i, j in T.Parallel(CHUNK, K):
                if i < count:
                    dq[first + i, hv, j] = x_s[i, j]
            for i, j in T.Parallel(CHUNK, K):
                if i < count:
                    dk[first + i, hv, j] = y_s[i, j]
            T.sync_threads()
            # the gradient of a log decay is the sum over the steps from it on
            total = 0.0
            for i in T.unroll(steps):
                x[steps - 1 - i] = T.if_then_else(
                    segment * steps + steps - 1 - i < count, dG_s[segment * steps + steps - 1 - i, column], 0.0
                )
                total += x[steps - 1 - i]
                x[steps - 1 - i] = total
            total_s[segment, column] = total
            T.sync_threads()
            total = 0.0
            for i in T.unroll(segments):
                if i > segment:
                    total += total_s[i, column]
            part = 0.0
            for_rate = 0.0
            for i in T.unroll(steps):
                if segment * steps + i < count:
                    x[i] += total
                    if gate:
                        raw = T.cast(g[first + segment * steps + i, hv, column], f32) + bias[hv, column]
                        if bounded:
                            raw *= rates[hv]
                            x[i] *= lower_bound / (1.0 + T.exp(-raw)) / (1.0 + T.exp(raw))
                            for_rate += x[i] * raw
                            x[i] *= rates[hv]
                        else:
                            for_rate -= rates[hv] * x[i] * softplus(raw)
                            x[i] *= -rates[hv] / (1.0 + T.exp(-raw))
                        part += x[i]
                    dg[first + segment * steps + i, hv, column] = T.cast(x[i], gate_dtype)
            if gate:
                part_s[segment, column] = part
                for_rate = T.warp_reduce_sum(for_rate)
                if T.truncmod(tx, 32) == 0:
                    rate_s[T.truncdiv(tx, 32)] = for_rate
                T.sync_threads()
                if segment == 0:
                    part = 0.0
                    for i in T.unroll(segments):
                        part += part_s[i, column]
                    d_bias[row, hv, column] = part
                if tx == 0:
                    for_rate = 0.0
                    for i in T.unroll(THREADS // 32):
                        for_rate += rate_s[i]
                    d_rates[row, hv] = for_rate

    return kda_within
