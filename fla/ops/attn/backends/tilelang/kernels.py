"""The forward of attention in TileLang, for Hopper.

FlashAttention-2 (Dao 2023, arXiv 2307.08691), as in `fla.ops.attn.kernels.forward`: a program takes a block of queries of
one head, and loops over their visible keys with an online softmax. Exponents are in base 2 and at most 0.

Only the head dim is a constant; numbers of steps, heads and sequences, the window and the scale are arguments.
"""

# Annotations are calls in TileLang: a shape and a dtype.
# mypy: disable-error-code="valid-type"

from typing import Any

import tilelang.language as T

from fla.ops.launch.tilelang_language import span

# queries of a program, 64 for each of two warp groups, and keys of an iteration
QUERIES = 128
KEYS = 128


def forward(D: int, dtype: str, index_dtype: str, packed: bool, windowed: bool) -> Any:
    """The kernel, with a program for each query head and each row of the chunk table or block of a batch row.

    The last block of keys of a sequence may also read memory past its end. Those scores are masked, and those values, which
    may be NaN, are replaced by zeros.
    """
    tokens, steps, HQ, H, ends, entries, places = (
        T.dynamic(n) for n in ('tokens', 'steps', 'HQ', 'H', 'ends', 'entries', 'places')
    )

    @T.prim_func
    def attn_forward(
        q: T.Tensor((tokens, HQ, D), dtype),
        k: T.Tensor((steps, H, D), dtype),
        v: T.Tensor((steps, H, D), dtype),
        cu_seqlens: T.Tensor((ends,), index_dtype),
        table: T.Tensor((entries, 2), 'int32'),
        o: T.Tensor((tokens, HQ, D), dtype),
        lse: T.Tensor((places,), 'float32'),
        rows: T.int32,
        length: T.int32,
        past: T.int32,
        window: T.int32,
        group: T.int32,
        scale: T.float32,
    ):
        # blocks of one head are adjacent: they read the same keys
        with T.Kernel(rows, HQ, threads=256) as (row, hq):
            Q_s = T.alloc_shared((QUERIES, D), dtype)
            K_s = T.alloc_shared((KEYS, D), dtype)
            V_s = T.alloc_shared((KEYS, D), dtype)
            scores = T.alloc_fragment((QUERIES, KEYS), 'float32')
            weights = T.alloc_fragment((QUERIES, KEYS), dtype)
            acc = T.alloc_fragment((QUERIES, D), 'float32')
            top = T.alloc_fragment((QUERIES,), 'float32')
            before = T.alloc_fragment((QUERIES,), 'float32')
            shrink = T.alloc_fragment((QUERIES,), 'float32')
            total = T.alloc_fragment((QUERIES,), 'float32')
            added = T.alloc_fragment((QUERIES,), 'float32')
            # start of the sequence in q and in k, the program's first query, queries from there on, keys of the sequence
            at_q = T.alloc_var('int32')
            at_k = T.alloc_var('int32')
            first = T.alloc_var('int32')
            count = T.alloc_var('int32')
            keys = T.alloc_var('int32')
            head = T.alloc_var('int32')
            head = T.truncdiv(hq, group)
            if packed:
                n = table[row, 0]
                start, end = span(cu_seqlens, T.max(n, 0), length)
                at_q = start
                at_k = start
                first = T.if_then_else(n < 0, 0, table[row, 1] * QUERIES)
                count = T.if_then_else(n < 0, 0, end - start - first)
                keys = end - start
            else:
                blocks = T.truncdiv(length + QUERIES - 1, QUERIES)
                batch = T.truncdiv(row, blocks)
                at_q = batch * length
                at_k = batch * (length + past)
                # later blocks see more keys, and come first
                first = (blocks - 1 - T.truncmod(row, blocks)) * QUERIES
                count = length - first
                keys = length + past
            # position of the first query among the keys, start of the first block of keys that it sees, blocks from there on
            own = first + past
            begin = T.truncdiv(T.max(own - window + 1, 0), KEYS) * KEYS if windowed else 0
            # an unused row of the table takes one iteration too: no program may end before its copy of queries has
            iterations = T.max(T.truncdiv(T.min(own + QUERIES, keys) - begin + KEYS - 1, KEYS), 1)
            T.copy(q[at_q + first : at_q + first + QUERIES, hq, 0:D], Q_s)
            T.clear(acc)
            T.clear(total)
            # finite, which avoids -inf - -inf before a query has seen a key
            T.fill(top, T.min_value('float32'))
            for iteration in T.Pipelined(iterations, num_stages=2):
                key = begin + iteration * KEYS
                T.copy(k[at_k + key : at_k + key + KEYS, head, 0:D], K_s)
                T.copy(v[at_k + key : at_k + key + KEYS, head, 0:D], V_s)
                T.gemm(Q_s, K_s, scores, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(QUERIES, KEYS):
                    scores[i, j] *= scale
                if key + KEYS > own + 1:
                    for i, j in T.Parallel(QUERIES, KEYS):
                        scores[i, j] = T.if_then_else(key + j <= own + i, scores[i, j], -T.infinity('float32'))
                if windowed and key + window < own + QUERIES:
                    for i, j in T.Parallel(QUERIES, KEYS):
                        scores[i, j] = T.if_then_else(key + j > own + i - window, scores[i, j], -T.infinity('float32'))
                T.copy(top, before)
                T.reduce_max(scores, top, dim=1, clear=False)
                for i in T.Parallel(QUERIES):
                    shrink[i] = T.exp2(before[i] - top[i])
                for i, j in T.Parallel(QUERIES, KEYS):
                    scores[i, j] = T.exp2(scores[i, j] - top[i])
                T.reduce_sum(scores, added, dim=1)
                for i in T.Parallel(QUERIES):
                    total[i] = total[i] * shrink[i] + added[i]
                for i, j in T.Parallel(QUERIES, D):
                    acc[i, j] *= shrink[i]
                T.copy(scores, weights)
                if key + KEYS > keys:
                    for i, j in T.Parallel(KEYS, D):
                        V_s[i, j] = T.if_then_else(key + i < keys, V_s[i, j], T.cast(0, dtype))
                T.gemm(weights, V_s, acc, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(QUERIES, D):
                if i < count:
                    o[at_q + first + i, hq, j] = T.cast(acc[i, j] / total[i], dtype)
            # lse is [B, HQ, T]: packed sequences are one row of the batch
            line = (hq if packed else batch * HQ + hq) * length + (at_q if packed else 0) + first
            for i in T.Parallel(QUERIES):
                if i < count:
                    lse[line + i] = top[i] + T.log2(total[i])

    return attn_forward
