"""Small kernels for the tests of the test support."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

exp = tl.exp


@triton.jit
def dot(a, b, c, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(x, y, input_precision=PRECISION))


@triton.jit
def dot_half(a, b, c, S: tl.constexpr):
    at = tl.arange(0, S)[:, None] * S + tl.arange(0, S)[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at), out_dtype=tl.float16))


@triton.jit
def arithmetic(a, b, c, S: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, S)
    x, y = tl.load(a + i), tl.load(b + i)
    if OP == 'add':
        z = x + y
    elif OP == 'sub':
        z = x - y
    elif OP == 'mul':
        z = x * y
    elif OP == 'div':
        z = x / y
    elif OP == 'neg':
        z = -x
    elif OP == 'abs':
        z = tl.abs(x)
    elif OP == 'max':
        z = tl.maximum(x, y)
    elif OP == 'min':
        z = tl.minimum(x, y)
    elif OP == 'where':
        z = tl.where(x > y, x, y)
    elif OP == 'clamp':
        z = tl.clamp(x, -y, y)
    elif OP == 'fma':
        z = tl.fma(x, y, x)
    elif OP == 'scalar':
        z = x * 0.1 + 1
    elif OP == 'full':
        z = x + tl.full((S,), 0.3, tl.bfloat16)
    tl.store(c + i, z)


@triton.jit
def compare(a, b, c, S: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, S)
    x, y = tl.load(a + i), tl.load(b + i)
    if OP == 'lt':
        z = x < y
    elif OP == 'le':
        z = x <= y
    elif OP == 'gt':
        z = x > y
    elif OP == 'ge':
        z = x >= y
    elif OP == 'eq':
        z = x == y
    elif OP == 'ne':
        z = x != y
    tl.store(c + i, z.to(tl.int32))


@triton.jit
def join(a, b, c, S: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, S)
    x, y = tl.load(a + i) > 0, tl.load(b + i) > 0
    if OP == 'and' and S > 1:
        z = x and y
    elif OP == 'or' or S > 1000:
        z = x or y
    elif OP == 'not':
        z = not x
    tl.store(c + i, z.to(tl.int32))


@triton.jit
def convert(a, b, S: tl.constexpr):
    i = tl.arange(0, S)
    tl.store(b + i, tl.load(a + i).to(b.dtype.element_ty))


@triton.jit
def convert_towards_zero(a, b, S: tl.constexpr):
    i = tl.arange(0, S)
    tl.store(b + i, tl.load(a + i).to(b.dtype.element_ty, fp_downcast_rounding='rtz'))


@triton.jit
def function(a, b, S: tl.constexpr, NAME: tl.constexpr):
    i = tl.arange(0, S)
    x = tl.load(a + i)
    if NAME == 'exp':
        y = tl.exp(x)
    elif NAME == 'own exp':
        y = exp(x)
    elif NAME == 'math.exp':
        y = tl.math.exp(x)
    elif NAME == 'exp2':
        y = tl.exp2(x)
    elif NAME == 'log':
        y = tl.log(tl.abs(x))
    elif NAME == 'log2':
        y = tl.log2(tl.abs(x))
    elif NAME == 'sqrt':
        y = tl.sqrt(tl.abs(x))
    elif NAME == 'rsqrt':
        y = tl.rsqrt(tl.abs(x))
    elif NAME == 'sigmoid':
        y = tl.sigmoid(x)
    tl.store(b + i, y)


@triton.jit
def reduce(a, b, M: tl.constexpr, N: tl.constexpr, OP: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(a + m[:, None] * N + n[None, :])
    if OP == 'sum':
        y = tl.sum(x, 1)
    elif OP == 'max':
        y = tl.max(x, 1)
    elif OP == 'min':
        y = tl.min(x, 1)
    elif OP == 'argmax':
        y = tl.argmax(x, 1)
    elif OP == 'keep_dims':
        y = tl.reshape(tl.max(x, 1, keep_dims=True), (M,))
    elif OP == 'all':
        y = tl.max(x) + tl.zeros((M,), b.dtype.element_ty)
    elif OP == 'own':
        y = tl.reduce(x, 1, _larger_magnitude)
    tl.store(b + m, y)


@triton.jit
def _larger_magnitude(x, y):
    return tl.where(tl.abs(x) > tl.abs(y), x, y)


@triton.jit
def scan(a, b, M: tl.constexpr, N: tl.constexpr, OP: tl.constexpr, REVERSE: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(a + at)
    if OP == 'cumsum':
        y = tl.cumsum(x, 0, reverse=REVERSE)
    elif OP == 'own':
        y = tl.associative_scan(x, 0, _larger_magnitude, reverse=REVERSE)
    tl.store(b + at, y)


@triton.jit
def _recurrence(decay_a, state_a, decay_b, state_b):
    return decay_a * decay_b, state_a * decay_b + state_b


@triton.jit
def linear_recurrence(a, x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    _, state = tl.associative_scan((tl.load(a + i), tl.load(x + i)), 0, _recurrence)
    tl.store(y + i, state)


@triton.jit
def loops(out, start, end, step, TIMES: tl.constexpr):
    total = tl.zeros((), tl.int64)
    for i in range(start, end, step):
        total += i.to(tl.int64) * 3
    for i in tl.range(0, end, num_stages=2):
        total += i.to(tl.int64)
    for i in tl.static_range(TIMES):
        total += i
    for i in range(TIMES):
        total += tl.cast(i, tl.int64)
    n = start
    while n < end:
        n += 1
    tl.store(out, total + n)


@triton.jit
def transpose(a, b, M: tl.constexpr, N: tl.constexpr, HOW: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(a + m[:, None] * N + n[None, :])
    if HOW == 'T':
        y = x.T
    elif HOW == 'trans':
        y = tl.trans(x)
    elif HOW == 'permute':
        y = tl.permute(x, (1, 0))
    elif HOW == 'reshape':
        y = tl.reshape(tl.trans(tl.reshape(x, (M, N, 1)), (1, 0, 2)), (N, M))
    tl.debug_barrier()
    tl.store(b + n[:, None] * M + m[None, :], y)


@triton.jit
def masked_copy(a, b, n, OTHER: tl.constexpr, S: tl.constexpr):
    i = tl.arange(0, S)
    if OTHER is None:
        x = tl.load(a + i, mask=i < n)
    else:
        x = tl.load(a + i, mask=i < n, other=OTHER)
    tl.store(b + i, x)


@triton.jit
def masked_scalar(a, b, n):
    tl.store(b, tl.load(a + n, mask=n < 0, other=0.0))


@triton.jit
def unmasked_copy(a, b, S: tl.constexpr):
    i = tl.arange(0, S)
    tl.store(b + i, tl.load(a + i))


@triton.jit
def scatter_add(a, b, S: tl.constexpr):
    i = tl.arange(0, S)
    tl.atomic_add(b + i % 4, tl.load(a + i), mask=i < S - 2)


@triton.jit
def copy_by_descriptors(a, b, M, N, S: tl.constexpr):
    source = tl.make_tensor_descriptor(a, [M, N], [N, 1], [S, S])
    target = tl.make_tensor_descriptor(b, [M, N], [N, 1], [S, S])
    row = tl.program_id(0) * S
    target.store([row, 0], source.load([row, 0]) * 2)


@triton.jit
def refused(a, b, S: tl.constexpr, WHAT: tl.constexpr):
    i = tl.arange(0, S)
    x = tl.load(a + i)
    if WHAT == 'inline assembly':
        x = tl.inline_asm_elementwise('mov.b32 $0, $1;', '=r,r', [x], tl.float32, True, 1)
    elif WHAT == 'libdevice':
        x = libdevice.exp(x)
    elif WHAT == 'block as a truth value':
        if x > 0:
            x += 1
    elif WHAT == 'float8':
        x = x.to(tl.float8e5).to(tl.float32)
    elif WHAT == 'fp16 rounded towards zero':
        x = x.to(tl.float16, fp_downcast_rounding='rtz').to(tl.float32)
    tl.store(b + i, x)


@triton.autotune([triton.Config({'S': 16}), triton.Config({'S': 32})], key=['n'])
@triton.jit
def tuned(a, b, n, S: tl.constexpr):
    i = tl.program_id(0) * S + tl.arange(0, S)
    tl.store(b + i, tl.load(a + i, mask=i < n, other=0.0) + S, mask=i < n)


@triton.jit
def matmul(a, b, c, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BK):
        x = tl.load(a + m[:, None] * K + (start + k)[None, :])
        y = tl.load(b + (start + k)[:, None] * N + n[None, :])
        total = tl.dot(x, y, total)
    tl.store(c + m[:, None] * N + n[None, :], total.to(c.dtype.element_ty))


@triton.jit
def matmul_and_rows(a, b, c, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    """`matmul`, plus the sum of each row of a added to that row."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    total = tl.zeros((M, N), tl.float32)
    rows = tl.zeros((M, BK), tl.float32)
    for start in range(0, K, BK):
        x = tl.load(a + m[:, None] * K + (start + k)[None, :])
        y = tl.load(b + (start + k)[:, None] * N + n[None, :])
        rows += x.to(tl.float32)
        total = tl.dot(x, y, total)
    total += tl.sum(rows, 1)[:, None]
    tl.store(c + m[:, None] * N + n[None, :], total.to(c.dtype.element_ty))
