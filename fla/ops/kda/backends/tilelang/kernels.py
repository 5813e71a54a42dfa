"""The gradients of Kimi delta attention that are parallel over chunks, in TileLang, for Hopper (arXiv 2510.26692).

One kernel computes what `pairs_backward` and `channels_backward` of the Triton backward do; their file
(`fla.ops.kda.kernels.backward`) has the equations and the names. A program has all channels of a chunk of one head. The
gradients of pairs of steps stay in registers and shared memory, and the inputs of both Triton kernels (G, the state, do, the
updates) are read once. Pairs of steps are products relative to the middle of the chunk. Where decays are stronger than e^60,
and always in float16, they are products at six levels of halves instead.

The kernel is compiled for the widths K and V, dtypes and flags. The numbers of tokens, heads and chunks are arguments.
"""

# The annotations of kernels are TileLang calls, with a shape and a dtype.
# mypy: disable-error-code="valid-type"

from typing import Any

import tilelang.language as T

from fla.ops.launch.tilelang_language import softplus, span

CHUNK = 64
THREADS = 256
# How far G may be from its value at the middle of the chunk, for products relative to that.
FURTHEST = 60.0


def relative(G_s: Any, i: Any, j: Any, levels: Any, half: Any, count: Any) -> Any:
    """Returns G relative to a reference step: the chunk's middle at one level, else the boundary of i's pair of blocks."""
    boundary = T.truncdiv(i, 2 * half) * 2 * half + half
    return G_s[i, j] - G_s[T.if_then_else(levels == 1, T.truncdiv(count, 2), boundary), j]


def intra_chunk_bwd(
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
    """Returns the kernel, with grid (rows, HV). Rows without a chunk write zeros to d_rates and d_bias.

    K and V are the widths of keys and values. Flags: sequences are `packed`, `normalise` q and k, g is a raw `gate`, and
    `bounded`, beta is the `sigmoid` of logits and `double` that. The arguments of the kernel are contiguous, and in q's
    dtype unless a dtype is given:

        q, k: `[tokens, H, K]`. v: `[tokens, HV, V]`. g: `[tokens, HV, K]`. beta: `[tokens, HV]`.
        rates, bias: e^A_log and dt_bias, float32 `[HV]` and `[HV, K]`, read with `gate`.
        G: running log decay, float32 `[tokens, HV, K]`. v_new: U', `[tokens, HV, V]`.
        lower: scores of k, float32 `[tokens, HV, 64]`. inverse: (I + beta lower)^-1, `[tokens, HV, 64]`.
        h, dh: state before and gradient of the state after each chunk, `[rows, HV, K, V]`.
        do, du: gradients of o and U', `[tokens, HV, V]`.
        cu_seqlens, table: of the chunk table (`fla.ops.launch.kernels.layout`), read with `packed`.
        dq, dk: written, for each value head, with `normalise` of the normalised rows, `[tokens, HV, K]`. dv, dg, dbeta:
            written, of the shapes of v, g and beta. They may be the memory of inputs that are not read after them.
        d_rates, d_bias: written with `gate`, each chunk's part, float32 `[sums, HV]` and `[sums, HV, K]`.
        length: steps of a sequence, or of all packed sequences. group: value heads of each head.
    """
    tokens, H, HV, rows, ends, entries, sums = (
        T.dynamic(n) for n in ('tokens', 'H', 'HV', 'rows', 'ends', 'entries', 'sums')
    )
    f32 = 'float32'
    # In the last part of the kernel, a thread has one channel of a segment of the steps.
    segments = THREADS // K
    steps = CHUNK // segments

    @T.prim_func
    def kda_intra_chunk_bwd(
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
            product_s = T.alloc_shared((CHUNK, CHUNK), dtype)
            M_s = T.alloc_shared((CHUNK, CHUNK), dtype)
            A_s = T.alloc_shared((CHUNK, CHUNK), dtype)
            dV_s = T.alloc_shared((CHUNK, V), dtype)
            dW_s = T.alloc_shared((CHUNK, K), dtype)
            k_start_s = T.alloc_shared((CHUNK, K), dtype)
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
            dG_chunk_s = T.alloc_shared((K,), f32)
            dG_last_s = T.alloc_shared((K,), f32)
            distance_s = T.alloc_shared((CHUNK,), f32)
            total_s = T.alloc_shared((segments, K), f32)
            part_s = T.alloc_shared((segments, K), f32)
            rate_s = T.alloc_shared((THREADS // 32,), f32)

            tile = T.alloc_fragment((CHUNK, K), f32)
            d_query = T.alloc_fragment((CHUNK, K), f32)
            d_key = T.alloc_fragment((CHUNK, K), f32)
            dG = T.alloc_fragment((CHUNK, K), f32)
            dV = T.alloc_fragment((CHUNK, V), f32)
            state_tile = T.alloc_fragment((K, V), f32)
            dM = T.alloc_fragment((CHUNK, CHUNK), f32)
            dT = T.alloc_fragment((CHUNK, CHUNK), f32)
            square = T.alloc_fragment((CHUNK, CHUNK), f32)
            # A sum has the layout of its summands, so that each layout has sums of its own.
            step_sums = T.alloc_fragment((CHUNK,), f32)
            square_sums = T.alloc_fragment((CHUNK,), f32)
            state_sums = T.alloc_fragment((K,), f32)
            x = T.alloc_local((steps,), f32)
            first = T.alloc_var('int32')
            count = T.alloc_var('int32')
            head = T.alloc_var('int32')
            levels = T.alloc_var('int32')
            half = T.alloc_var('int32')
            total = T.alloc_var(f32)
            d_bias_part = T.alloc_var(f32)
            d_rate = T.alloc_var(f32)
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

            # Products over value columns.
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
            T.gemm(dU_s, S_s, tile, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(CHUNK, K):
                tile[i, j] = -tile[i, j]
            T.copy(tile, dW_s)
            T.gemm(dO_s, S_s, d_query, transpose_B=True, clear_accum=True)
            T.gemm(U_s, dS_s, d_key, transpose_B=True, clear_accum=True)
            T.gemm(dO_s, U_s, dM, transpose_B=True, clear_accum=True)
            T.gemm(dU_s, V_s, dT, transpose_B=True, clear_accum=True)
            T.gemm(T_s, dU_s, dV, transpose_A=True, clear_accum=True)
            T.copy(dV, dV_s)
            for i, j in T.Parallel(K, V):
                state_tile[i, j] = T.cast(S_s[i, j], f32) * T.cast(dS_s[i, j], f32)
            T.reduce_sum(state_tile, state_sums, dim=1)
            for i in T.Parallel(K):
                dG_chunk_s[i] = state_sums[i]
            for i, j in T.Parallel(CHUNK, V):
                if i < count:
                    dv[first + i, hv, j] = dV_s[i, j]

            # Keys, queries and G.
            for i, j in T.Parallel(CHUNK, K):
                K_s[i, j] = T.if_then_else(i < count, k[first + i, head, j], T.cast(0, dtype))
            for i, j in T.Parallel(CHUNK, K):
                Q_s[i, j] = T.if_then_else(i < count, q[first + i, head, j], T.cast(0, dtype))
            # Steps past the end repeat G of the last one, so that their decay is 1.
            for i, j in T.Parallel(CHUNK, K):
                G_s[i, j] = G[first + T.max(T.min(i, count - 1), 0), hv, j]
            if normalise:
                for i, j in T.Parallel(CHUNK, K):
                    tile[i, j] = T.cast(K_s[i, j], f32) * T.cast(K_s[i, j], f32)
                T.reduce_sum(tile, step_sums, dim=1)
                for i in T.Parallel(CHUNK):
                    rk_s[i] = T.rsqrt(step_sums[i] + 1e-6)
                for i, j in T.Parallel(CHUNK, K):
                    tile[i, j] = T.cast(Q_s[i, j], f32) * T.cast(Q_s[i, j], f32)
                T.reduce_sum(tile, step_sums, dim=1)
                for i in T.Parallel(CHUNK):
                    rq_s[i] = T.rsqrt(step_sums[i] + 1e-6)
            else:
                for i in T.Parallel(CHUNK):
                    rk_s[i] = 1.0
                    rq_s[i] = 1.0
            for i, j in T.Parallel(CHUNK, K):
                tile[i, j] = T.cast(K_s[i, j], f32) * T.exp(G_s[i, j]) * rk_s[i]
            T.copy(tile, k_start_s)
            T.gemm(dW_s, k_start_s, dT, transpose_B=True)

            # Terms that pass the states before and after the chunk.
            for i, j in T.Parallel(CHUNK, K):
                d_query[i, j] *= T.exp(G_s[i, j]) * scale
            for i, j in T.Parallel(CHUNK, K):
                d_key[i, j] *= T.exp(G_s[CHUNK - 1, j] - G_s[i, j])
            # The keys that enter the next state have the factor e^{G_C - G}, which is 1 at the last step for any G.
            for i, j in T.Parallel(CHUNK, K):
                tile[i, j] = T.if_then_else(i < count - 1, T.cast(K_s[i, j], f32) * rk_s[i] * d_key[i, j], 0.0)
            # Sums over steps use shared memory. Across warps each part of a sum would need a barrier.
            T.copy(tile, dG_s)
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
                total = dG_chunk_s[column] * T.exp(G_s[CHUNK - 1, column])
                for i in T.unroll(segments):
                    total += total_s[i, column]
                dG_last_s[column] = total
            T.sync_threads()
            for i, j in T.Parallel(CHUNK, K):
                dG[i, j] = T.cast(Q_s[i, j], f32) * rq_s[i] * d_query[i, j] + T.if_then_else(
                    i == count - 1, dG_last_s[j], -tile[i, j]
                )
            T.gemm(T_s, dW_s, tile, transpose_A=True, clear_accum=True)
            for i, j in T.Parallel(CHUNK, K):
                tile[i, j] *= T.exp(G_s[i, j])
            for i, j in T.Parallel(CHUNK, K):
                dG[i, j] += T.cast(K_s[i, j], f32) * rk_s[i] * tile[i, j]
                d_key[i, j] += tile[i, j]

            # For the inverse X of I + L with L = diag(beta) A, dL = -X^T dX X^T below the diagonal.
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
            T.copy(square, product_s)
            T.gemm(product_s, X_s, dT, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(CHUNK, CHUNK):
                dT[i, j] = T.if_then_else(i > j, -dT[i, j], 0.0)
            for i, j in T.Parallel(CHUNK, CHUNK):
                square[i, j] = dT[i, j] * T.if_then_else(i < count, lower[first + i, hv, j], 0.0)
            T.reduce_sum(square, square_sums, dim=1)
            for i in T.Parallel(CHUNK):
                rows_s[i] = square_sums[i]
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
            # Gradients of the score of each step with itself.
            for i, j in T.Parallel(CHUNK, CHUNK):
                if i == j:
                    diagonal_s[i] = dM[i, j]
            for i, j in T.Parallel(CHUNK, K):
                d_query[i, j] += diagonal_s[i] * T.cast(K_s[i, j], f32) * rk_s[i]
                d_key[i, j] += diagonal_s[i] * T.cast(Q_s[i, j], f32) * rq_s[i]

            # Pairs of steps: relative to the middle of the chunk (one level), or at six levels.
            levels = 6
            if dtype == 'bfloat16':
                for i, j in T.Parallel(CHUNK, K):
                    tile[i, j] = T.abs(G_s[i, j] - G_s[T.truncdiv(count, 2), j])
                T.reduce_max(tile, step_sums, dim=1)
                for i in T.Parallel(CHUNK):
                    distance_s[i] = step_sums[i]
                total = 0.0
                for i in T.serial(CHUNK):
                    total = T.max(total, distance_s[i])
                levels = T.if_then_else(total <= FURTHEST, 1, 6)
            for level in T.serial(levels):
                half = T.shift_right(CHUNK // 2, level)
                # At a level, the reference is the boundary of a pair of blocks, and both sides have exponents <= 0.
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
                    G_rel = relative(G_s, i, j, levels, half, count)
                    tile[i, j] = T.cast(K_s[i, j], f32) * rk_s[i] * T.exp(T.if_then_else(levels == 1, -G_rel, -T.abs(G_rel)))
                T.copy(tile, y_s)
                for i, j in T.Parallel(CHUNK, K):
                    G_rel = relative(G_s, i, j, levels, half, count)
                    tile[i, j] = T.cast(Q_s[i, j], f32) * rq_s[i] * T.exp(T.if_then_else(levels == 1, G_rel, -T.abs(G_rel)))
                T.copy(tile, x_s)
                # Row gradients of the scores of q, column gradients of both scores, then row gradients of those of k.
                T.gemm(M_s, y_s, tile, clear_accum=True)
                for i, j in T.Parallel(CHUNK, K):
                    G_rel = relative(G_s, i, j, levels, half, count)
                    dG[i, j] += T.cast(x_s[i, j], f32) * tile[i, j]
                    d_query[i, j] += tile[i, j] * T.exp(T.if_then_else(levels == 1, G_rel, -T.abs(G_rel)))
                T.gemm(M_s, x_s, tile, transpose_A=True, clear_accum=True)
                for i, j in T.Parallel(CHUNK, K):
                    G_rel = relative(G_s, i, j, levels, half, count)
                    x_s[i, j] = T.cast(
                        T.cast(K_s[i, j], f32) * rk_s[i] * T.exp(T.if_then_else(levels == 1, G_rel, -T.abs(G_rel))), dtype
                    )
                T.gemm(A_s, x_s, tile, transpose_A=True)
                for i, j in T.Parallel(CHUNK, K):
                    G_rel = relative(G_s, i, j, levels, half, count)
                    dG[i, j] -= T.cast(y_s[i, j], f32) * tile[i, j]
                    d_key[i, j] += tile[i, j] * T.exp(T.if_then_else(levels == 1, -G_rel, -T.abs(G_rel)))
                T.gemm(A_s, y_s, tile, clear_accum=True)
                for i, j in T.Parallel(CHUNK, K):
                    G_rel = relative(G_s, i, j, levels, half, count)
                    dG[i, j] += T.cast(x_s[i, j], f32) * tile[i, j]
                    d_key[i, j] += tile[i, j] * T.exp(T.if_then_else(levels == 1, G_rel, -T.abs(G_rel)))

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
            # The gradient of a log decay is the sum of dG over its step and all later ones.
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
            d_bias_part = 0.0
            d_rate = 0.0
            for i in T.unroll(steps):
                if segment * steps + i < count:
                    x[i] += total
                    if gate:
                        raw = T.cast(g[first + segment * steps + i, hv, column], f32) + bias[hv, column]
                        if bounded:
                            raw *= rates[hv]
                            x[i] *= lower_bound / (1.0 + T.exp(-raw)) / (1.0 + T.exp(raw))
                            d_rate += x[i] * raw
                            x[i] *= rates[hv]
                        else:
                            d_rate -= rates[hv] * x[i] * softplus(raw)
                            x[i] *= -rates[hv] / (1.0 + T.exp(-raw))
                        d_bias_part += x[i]
                    dg[first + segment * steps + i, hv, column] = T.cast(x[i], gate_dtype)
            if gate:
                part_s[segment, column] = d_bias_part
                d_rate = T.warp_reduce_sum(d_rate)
                if T.truncmod(tx, 32) == 0:
                    rate_s[T.truncdiv(tx, 32)] = d_rate
                T.sync_threads()
                if segment == 0:
                    d_bias_part = 0.0
                    for i in T.unroll(segments):
                        d_bias_part += part_s[i, column]
                    d_bias[row, hv, column] = d_bias_part
                if tx == 0:
                    d_rate = 0.0
                    for i in T.unroll(THREADS // 32):
                        d_rate += rate_s[i]
                    d_rates[row, hv] = d_rate

    return kda_intra_chunk_bwd
