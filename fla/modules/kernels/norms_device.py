"""Device code of the norms; `fla.modules.kernels.norms` describes and launches it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    """The activation of the gate, and its derivative."""
    sigmoid = tl.sigmoid(gate)
    if ACTIVATION == 'sigmoid':
        return sigmoid, sigmoid * (1 - sigmoid)
    else:
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))


@triton.jit
def _load_sum(x, residual, row, x_stride, residual_stride, col, inside, POLICY: tl.constexpr):
    """Elements of x + residual in float32. POLICY: the eviction policy of the cache, '' for the default."""
    s = tl.load(x + row * x_stride + col, mask=inside, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if residual is not None:
        at = residual + row * residual_stride + col
        s += tl.load(at, mask=inside, other=0.0, eviction_policy=POLICY).to(tl.float32)
    return s


@triton.jit
def _load_parameter(p, at, inside, default: tl.constexpr):
    """Elements of weight or bias in float32."""
    if p is None:
        return tl.full(inside.shape, default, tl.float32)
    else:
        return tl.load(p + at, mask=inside, other=0.0, eviction_policy='evict_last').to(tl.float32)


@triton.jit(do_not_specialize=['count'])
def norm_forward(
    x,
    residual,
    g,
    weight,
    bias,
    y,
    total,
    count,
    x_stride,
    residual_stride,
    g_stride,
    eps,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    SIDE: tl.constexpr,
    BD: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """ROWS rows of SIDE adjacent groups of D elements each. AHEAD: weight and bias are loaded before the sums of x."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    first = tl.program_id(1) * D
    col = tl.arange(0, SIDE * BD)[None, :]
    in_group = col < D
    if SIDE > 1:
        first = (tl.program_id(1) * SIDE + col // BD) * D
        col = col % BD
        # Always true, but the compiler moves loads without a condition behind the sums, even with AHEAD.
        in_group = (col < D) & (first < D * GROUPS)
    inside = (row < count) & in_group
    out = row * (D * GROUPS) + first + col
    if AHEAD:
        w = _load_parameter(weight, first + col, in_group, 1.0)
        b = _load_parameter(bias, first + col, in_group, 0.0)
    s = _load_sum(x, residual, row, x_stride, residual_stride, first + col, inside, '')
    if total is not None:
        tl.store(total + out, s.to(total.dtype.element_ty), mask=inside)
    s = tl.reshape(s, (ROWS * SIDE, BD))
    if KIND == 'layer':
        s = tl.where(tl.arange(0, BD)[None, :] < D, s - (tl.sum(s, 1) / D)[:, None], 0.0)
    square = tl.sum(s * s, 1)
    s *= tl.rsqrt((square if KIND == 'l2' else square / D) + eps)[:, None]
    s = tl.reshape(s, (ROWS, SIDE * BD))
    if not AHEAD:
        w = _load_parameter(weight, first + col, in_group, 1.0)
        b = _load_parameter(bias, first + col, in_group, 0.0)
    if weight is not None:
        s *= w
    if bias is not None:
        s += b
    if g is not None:
        gate = tl.load(g + row * g_stride + first + col, mask=inside, other=0.0)
        s *= _activate(gate.to(tl.float32), ACTIVATION)[0]
    tl.store(y + out, s.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _statistics(
    x,
    residual,
    row,
    x_stride,
    residual_stride,
    first,
    eps,
    D: tl.constexpr,
    KIND: tl.constexpr,
    BD: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Mean and reciprocal standard deviation of a long row, which is read once for each of them."""
    col = tl.arange(0, BD)
    mean = 0.0
    if KIND == 'layer':
        sums = tl.zeros((BD,), tl.float32)
        for start in range(0, D, BD):
            at = start + col
            sums += _load_sum(x, residual, row, x_stride, residual_stride, first + at, at < D, POLICY)
        mean = tl.sum(sums, 0) / D
    squares = tl.zeros((BD,), tl.float32)
    for start in range(0, D, BD):
        at = start + col
        s = _load_sum(x, residual, row, x_stride, residual_stride, first + at, at < D, POLICY)
        if KIND == 'layer':
            s = tl.where(at < D, s - mean, 0.0)
        squares += s * s
    square = tl.sum(squares, 0)
    return mean, tl.rsqrt((square if KIND == 'l2' else square / D) + eps)


@triton.jit
def norm_forward_long(
    x,
    residual,
    g,
    weight,
    bias,
    y,
    total,
    x_stride,
    residual_stride,
    g_stride,
    eps,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BD: tl.constexpr,
):
    """One row of a group, tile by tile."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * D
    # the row is read once more
    mean, scale = _statistics(x, residual, row, x_stride, residual_stride, first, eps, D, KIND, BD, 'evict_last')
    for start in range(0, D, BD):
        col = start + tl.arange(0, BD)
        inside = col < D
        out = row * (D * GROUPS) + first + col
        s = _load_sum(x, residual, row, x_stride, residual_stride, first + col, inside, 'evict_first')
        if total is not None:
            tl.store(total + out, s.to(total.dtype.element_ty), mask=inside)
        s = (s - mean) * scale
        if weight is not None:
            s *= _load_parameter(weight, first + col, col < D, 1.0)
        if bias is not None:
            s += _load_parameter(bias, first + col, col < D, 0.0)
        if g is not None:
            gate = tl.load(g + row * g_stride + first + col, mask=inside, other=0.0)
            s *= _activate(gate.to(tl.float32), ACTIVATION)[0]
        tl.store(y + out, s.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(dy, s, g, dg, w, b, at_g, out, inside, ACTIVATION: tl.constexpr):
    """Stores the gradient of the gate, and returns that of the norm's result. s is normalized."""
    if g is None:
        return dy
    else:
        gate = tl.load(g + at_g, mask=inside, other=0.0).to(tl.float32)
        value, slope = _activate(gate, ACTIVATION)
        tl.store(dg + out, (dy * (s * w + b) * slope).to(dg.dtype.element_ty), mask=inside)
        return dy * value


@triton.jit(do_not_specialize=['count'])
def norm_backward(
    x,
    residual,
    g,
    weight,
    bias,
    dy,
    dtotal,
    dx,
    dresidual,
    dg,
    dweight,
    dbias,
    count,
    x_stride,
    residual_stride,
    g_stride,
    dy_stride,
    dtotal_stride,
    eps,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program takes every `programs`-th tile of ROWS rows of a group. With STAGES 0 it takes one tile; the compiler
    removes a loop of one constant step. dweight and dbias `[programs, GROUPS, D]`."""
    first = tl.program_id(1) * D
    col = tl.arange(0, BD)[None, :]
    w = _load_parameter(weight, first + col, col < D, 1.0)
    b = _load_parameter(bias, first + col, col < D, 0.0)
    dw = tl.zeros((ROWS, BD), tl.float32)
    db = tl.zeros((ROWS, BD), tl.float32)
    own = tl.program_id(0).to(tl.int64) * ROWS
    for start in tl.range(
        own if STAGES else 0, count if STAGES else 1, tl.num_programs(0) * ROWS if STAGES else 1, num_stages=STAGES
    ):
        row = ((start if STAGES else own) + tl.arange(0, ROWS))[:, None]
        inside = (row < count) & (col < D)
        out = row * (D * GROUPS) + first + col
        s = _load_sum(x, residual, row, x_stride, residual_stride, first + col, inside, '')
        d = tl.load(dy + row * dy_stride + first + col, mask=inside, other=0.0)
        d = d.to(tl.float32)
        if KIND == 'layer':
            s = tl.where(inside, s - (tl.sum(s, 1) / D)[:, None], 0.0)
        square = tl.sum(s * s, 1)
        scale = tl.rsqrt((square if KIND == 'l2' else square / D) + eps)[:, None]
        s *= scale
        d = _gate_backward(d, s, g, dg, w, b, row * g_stride + first + col, out, inside, ACTIVATION)
        if dweight is not None:
            dw += tl.where(inside, d * s, 0.0)  # past the last row s is 0 * inf if eps is 0
        if dbias is not None:
            db += d
        d *= w
        along = tl.sum(d * s, 1)[:, None]
        d -= s * (along if KIND == 'l2' else along / D)
        if KIND == 'layer':
            d -= (tl.sum(d, 1) / D)[:, None]
        d *= scale
        if dtotal is not None:
            d += tl.load(dtotal + row * dtotal_stride + first + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + out, d.to(dx.dtype.element_ty), mask=inside)
        if dresidual is not None:
            tl.store(dresidual + out, d.to(dresidual.dtype.element_ty), mask=inside)
    at = tl.program_id(0) * (D * GROUPS) + first + tl.arange(0, BD)
    if dweight is not None:
        tl.store(dweight + at, tl.sum(dw, 0), mask=tl.arange(0, BD) < D)
    if dbias is not None:
        tl.store(dbias + at, tl.sum(db, 0), mask=tl.arange(0, BD) < D)


@triton.jit(do_not_specialize=['count'])
def norm_backward_long(
    x,
    residual,
    g,
    weight,
    bias,
    dy,
    dtotal,
    dx,
    dresidual,
    dg,
    dweight,
    dbias,
    count,
    x_stride,
    residual_stride,
    g_stride,
    dy_stride,
    dtotal_stride,
    eps,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BD: tl.constexpr,
):
    """A program takes every `programs`-th row of a group, tile by tile. dweight and dbias `[programs, GROUPS, D]` start at 0
    and stay in the cache."""
    first = tl.program_id(1) * D
    sums = tl.program_id(0).to(tl.int64) * (D * GROUPS) + first
    for row in range(tl.program_id(0).to(tl.int64), count, tl.num_programs(0)):
        mean, scale = _statistics(x, residual, row, x_stride, residual_stride, first, eps, D, KIND, BD, '')
        along = tl.zeros((BD,), tl.float32)
        straight = tl.zeros((BD,), tl.float32)
        for start in range(0, D, BD):
            col = start + tl.arange(0, BD)
            inside = col < D
            s = _load_sum(x, residual, row, x_stride, residual_stride, first + col, inside, '')
            s = tl.where(inside, (s - mean) * scale, 0.0)
            d = tl.load(dy + row * dy_stride + first + col, mask=inside, other=0.0).to(tl.float32)
            if g is not None:
                gate = tl.load(g + row * g_stride + first + col, mask=inside, other=0.0)
                d *= _activate(gate.to(tl.float32), ACTIVATION)[0]
            d *= _load_parameter(weight, first + col, col < D, 1.0)
            along += d * s
            straight += d
        parallel = tl.sum(along, 0)
        constant = 0.0
        if KIND != 'l2':
            parallel /= D
        if KIND == 'layer':
            constant = tl.sum(straight, 0) / D
        tl.debug_barrier()  # until the sums of the previous row are written
        for start in range(0, D, BD):
            col = start + tl.arange(0, BD)
            inside = col < D
            out = row * (D * GROUPS) + first + col
            w = _load_parameter(weight, first + col, col < D, 1.0)
            b = _load_parameter(bias, first + col, col < D, 0.0)
            s = _load_sum(x, residual, row, x_stride, residual_stride, first + col, inside, '')
            s = (s - mean) * scale
            d = tl.load(dy + row * dy_stride + first + col, mask=inside, other=0.0).to(tl.float32)
            d = _gate_backward(d, s, g, dg, w, b, row * g_stride + first + col, out, inside, ACTIVATION)
            if dweight is not None:
                before = tl.load(dweight + sums + col, mask=inside, other=0.0)
                tl.store(dweight + sums + col, before + d * s, mask=inside)
            if dbias is not None:
                before = tl.load(dbias + sums + col, mask=inside, other=0.0)
                tl.store(dbias + sums + col, before + d, mask=inside)
            d = (d * w - s * parallel - constant) * scale
            if dtotal is not None:
                d += tl.load(dtotal + row * dtotal_stride + first + col, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx + out, d.to(dx.dtype.element_ty), mask=inside)
            if dresidual is not None:
                tl.store(dresidual + out, d.to(dresidual.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=['programs'])
def sum_programs(dweight, dbias, weight, bias, programs, W: tl.constexpr, ROWS: tl.constexpr, BW: tl.constexpr):
    """The gradients of weight and bias `[W]` from the programs' sums `[programs, W]`. If both are given, the second axis of
    the grid selects one."""
    if dbias is None:
        _sum_column_block(dweight, weight, programs, W, ROWS, BW)
    elif dweight is None:
        _sum_column_block(dbias, bias, programs, W, ROWS, BW)
    elif tl.program_id(1) == 0:
        _sum_column_block(dweight, weight, programs, W, ROWS, BW)
    else:
        _sum_column_block(dbias, bias, programs, W, ROWS, BW)


@triton.jit
def _sum_column_block(parts, out, programs, W: tl.constexpr, ROWS: tl.constexpr, BW: tl.constexpr):
    col = tl.program_id(0) * BW + tl.arange(0, BW)
    total = tl.zeros((ROWS, BW), tl.float32)
    for start in range(0, programs, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        total += tl.load(parts + row.to(tl.int64) * W + col[None, :], mask=(row < programs) & (col < W)[None, :], other=0.0)
    tl.store(out + col, tl.sum(total, 0).to(out.dtype.element_ty), mask=col < W)
