"""The bounds of error that tests hold operations to, and how each was found. Nothing else sets one; no test loosens one.

Errors are against float64 on the same (rounded) inputs, by two measures: `relative_rms` over everything, and `worst_row`
so that one wrong block cannot hide in an average.

**float64: 1e-10. float32: 1e-5.** Both are demands, not measurements: products are full float32. Under the interpreter
kernels make at most 1.2e-6 on the grid, of gradients of gates and their parameters 5.7e-6. But a row of 1 % of the median
norm may be nothing but what rounding the others leaves: in five draws of the grid PyTorch's own float32, the reference, is
off by 1.3e-5 on the worst rows of o, dq, dk and dv. Rows of those are allowed 1.5 times that from a kernel.

**The reference** computes in float32 whatever it is given, so that a bfloat16 or float16 result is a float32 result
rounded once. Rounding to nearest with p significant bits is off by at most 2^-p of each number (p = 8 and 11), and so of
each row and of everything. 1.5 times the largest relative RMS on the grid is more than that.

**Kernels** multiply bfloat16 or float16 operands and accumulate in float32. `HalfOperands` does that to the reference,
forward and backward; the bound of a kernel is 1.5 times the largest error that makes on the grid. What is one number a head
(A_log, dt_bias), or few blocks (rows of dg and dbeta), is a matter of chance: of those it is the largest in five draws.
`python -m tests.measure_bounds` measures all that.

**Kernels off the grid**, at other sizes, lengths and gates: the worst row is the one whose terms cancel most, and the more
rows there are, the worse it is, for `HalfOperands` as well. There a row is a block of 16 steps of a head, or the state of a
head (of all heads, where it has fewer than 64 numbers); and where `AlgorithmOperands` makes larger errors on such a case
than on the grid, 1.5 times those hold: of all `DRAWS` of the gradients of o and of the state, as a worst row is a matter of
chance. `AlgorithmOperands` is `HalfOperands` with the products of the algorithm, where the reference has others. What it
rounds beside follows from what is multiplied, not from how far off a kernel is:
- Chunks multiply by the inverse X = (I + L)^-1, where the reference solves: X is an operand, below its diagonal of ones. In
  the backward, the gated delta rule makes L's gradient from the solution, dL = -(X^T dU) U^T. KDA makes it by way of the
  inverse's, dX = dU R^T of the right sides R and dL = -X^T dX X^T, so that dX and X^T dX are operands, too. The solution is
  the reference's, U - W S. The gated delta rule's kernels solve X beta (V - e^G K S), which rounds a little less.
- KDA has a gate per channel and multiplies e^(G - F) q by e^(F - G) k, with F the G of a step between theirs. The reference
  does, but for a single channel, which it takes for one gate a head: then q and k, already narrow, are multiplied and the
  decay comes after in float32. A second channel of zeros has it multiply as for many.

**Gradients of gates** are differences of terms that cancel at strong gates. Their error is divided by
max(RMS of the gradient, 1e-3 * RMS of those terms): q times its gradient, which is one of them, or at the end of a sequence
the products of the state and its gradient, where those are larger. That of a row is divided by
max(norm of the row, 1e-2 * norm of such terms): rounded to float32 they are 2^-24 of themselves off, which is 6e-6 of it.
A row of theirs, and of the gradient of beta, is a block of steps of a head, 16 or as many as make 64 numbers: a single
number may be the rounding of two large ones.
Gradients of A_log and dt_bias sum the gradient of g over steps; they are divided by at least the root of the sum of its
squares (per element of dt_bias).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from functools import partial
from typing import ClassVar
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fla.ops.recurrence import chunked

EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

# Measured on the grid with half operands: relative RMS, worst row
_HALF = {
    torch.bfloat16: {
        'o': (4.9e-3, 1.6e-1),
        'final': (4.7e-3, 8.5e-3),
        'dq': (4.3e-3, 8.3e-2),
        'dk': (5.6e-3, 7.9e-2),
        'dv': (4.4e-3, 1.6e-1),
        'dinitial_state': (6.3e-3, 1.0e-2),
        'dbeta': (4.9e-3, 6.9e-2),
        'dg': (8.8e-3, 1.5e-2),
        'dA_log': (2.6e-2, 2.6e-2),
        'ddt_bias': (8.7e-3, 8.7e-3),
    },
    torch.float16: {
        'o': (6.2e-4, 1.3e-2),
        'final': (5.8e-4, 9.6e-4),
        'dq': (5.5e-4, 1.4e-2),
        'dk': (6.7e-4, 1.3e-2),
        'dv': (5.2e-4, 1.3e-2),
        # but for strong gates, where it is smaller than any float16
        'dinitial_state': (9.0e-4, 6.0e-3),
        'dbeta': (6.7e-4, 5.3e-3),
        'dg': (8.7e-4, 2.2e-3),
        'dA_log': (2.0e-3, 2.0e-3),
        'ddt_bias': (6.7e-4, 6.7e-4),
    },
}

# the worst row of the reference in float32, in five draws of the grid
_CANCELLED = 1.3e-5

# The worst row of dq and dk that `tests.ops.attn.emulated` makes in float32 in five draws of the cases of attention's tests
# on a GPU. They are differences.
_ATTENTION_CANCELLED = 3.5e-5

GATE_FLOOR, GATE_ROW_FLOOR = 1e-3, 1e-2

# Seeds and scales of the gradients that a case off the grid is emulated with. The test's own draw, 5, comes with other
# roundings as well: where a sum nearly vanishes in some row, as the gradient of a gate may, what one emulation makes of it
# is chance.
DRAWS = ((5, 1.0), (5, 1.2), (5, 1.4), (6, 1.0), (7, 1.0))


def of_reference(dtype: torch.dtype) -> tuple[float, float]:
    """Bounds of the relative RMS and of the worst row of a result of `dtype` of a reference backend."""
    if dtype in EXACT:
        return EXACT[dtype], EXACT[dtype]
    # what is rounded is itself a float32 result
    return ROUNDING[dtype] + EXACT[torch.float32], ROUNDING[dtype] + EXACT[torch.float32]


def of_kernel(name: str, operands: torch.dtype) -> tuple[float, float]:
    """Bounds of the relative RMS and of the worst row of 'o', 'final' or 'd' + a parameter, of a kernel with such
    operands."""
    if operands in EXACT:
        row = 1.5 * _CANCELLED if operands == torch.float32 and name in ('o', 'dq', 'dk', 'dv') else EXACT[operands]
        return EXACT[operands], row
    rms, row = _HALF[operands][name]
    return 1.5 * rms, 1.5 * row


def off_grid(name: str, operands: torch.dtype, emulated: tuple[float, float]) -> tuple[float, float]:
    """As `of_kernel`, of a case not on the grid, where `AlgorithmOperands` makes such a relative RMS and worst row."""
    rms, row = of_kernel(name, operands)
    return (rms, row) if operands in EXACT else (max(rms, 1.5 * emulated[0]), max(row, 1.5 * emulated[1]))


def of_attention(name: str, operands: torch.dtype, emulated: tuple[float, float]) -> tuple[float, float]:
    """Bounds of the relative RMS and of the worst row of 'o' or 'd' + a parameter of attention. In half precision from what
    `tests.ops.attn.emulated` makes at most on the same call, in five draws of the gradient of o, but no less than those of
    float32: sums are taken in it."""
    if operands in EXACT:
        row = 1.5 * _ATTENTION_CANCELLED if operands == torch.float32 and name in ('dq', 'dk') else EXACT[operands]
        return EXACT[operands], row
    rms, row = of_attention(name, torch.float32, emulated)
    return max(rms, 1.5 * emulated[0]), max(row, 1.5 * emulated[1])


# Where scores decide nothing (a window of one, a single key), the gradients of q, k, g and sinks are dp - delta = 0 but for
# rounding: of two sums of V products of normal numbers. In float32 and one product after another each sum is off by
# 0.3 * 2^-24 * V in the RMS (a rounding by 0.43 * 2^-24 of a partial sum, whose RMS is the root of its length), both and
# times the scale, V^-1/2, by 4.1e-7 at V = 256. That is to be 1e-5 of what the error is divided by.
ATTENTION_FLOOR = 4e-2


# How far the angles of rotary positions, which are float32, take a layer of the tests from float64: those of 70 steps and
# heads of 4 are whole numbers or below 1, so off by two roundings of 2^-24 of 1 at most. Scores are, by as much of their
# size, and what the softmax makes of them, for which 1e-6 leaves a factor of 8.
TURNED = 1e-6


def of_layer(dtype: torch.dtype, turned: bool = False) -> float:
    """Bound of the relative RMS of what a layer of the tests returns, with rotary positions or not. Six tensors are made and
    rounded one after the other (projection, convolution, recurrence or attention, gate, norm, output), in half precision
    each by ROUNDING of it at most; in float32 and float64 the terms of their sums are, as those of a module's."""
    exact = max(of_module(dtype), TURNED if turned else 0.0)
    return 6 * ROUNDING[dtype] if dtype in ROUNDING else exact


def of_autocast(dtype: torch.dtype) -> float:
    """Of a layer in float32 that autocast computes in `dtype`: as `of_layer`, and the input, the weights and what a float32
    recurrence is given are rounded as well."""
    return of_layer(dtype) + 3 * ROUNDING[dtype]


def of_norm(dtype: torch.dtype) -> float:
    """Bound of the relative RMS of what a norm's kernel returns, for the narrowest dtype of a call: sums in float32, where
    rounding a row's terms and sum makes about 1e-7, and results rounded once. A gradient that reads a rounded sum with the
    residual, or adds two rounded gradients, is off by two roundings, each by 0.58 * 2^-p at most in the RMS of numbers that
    are spread over a binade: together less than the 2^-p allowed."""
    return 1e-6 if dtype == torch.float32 else of_reference(dtype)[0]


def of_linear_loss(dtype: torch.dtype, logits: float) -> float:
    """Bound of the relative RMS of the loss and the gradients of a linear map with a cross entropy, whose logits have that
    RMS and are kept in `dtype`: their rounding is off by ROUNDING of them, and so the relative error of a probability, where
    other gradients, sums over chunks and results are off by ROUNDING of themselves. A rounding's RMS is 0.43 of that, so
    that 1 and 1/2 of these cover it."""
    return EXACT[dtype] if dtype in EXACT else ROUNDING[dtype] * (1 + logits / 2)


def elementwise(dtype: torch.dtype) -> float:
    """Bound of the relative RMS of a kernel that computes each number from a few others: a handful of float32 roundings of
    2^-24 each, and exponentials that GPUs approximate to two units in the last place, then rounded once."""
    return 1e-6 if dtype == torch.float32 else of_reference(dtype)[0]


_MODULE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6, torch.float64: 1e-13}


def of_module(dtype: torch.dtype) -> float:
    """Bound of the relative RMS of what a function of the modules returns for small tensors: half a unit in the last place
    of a result of about 1, and for float32 and float64 a few roundings of the terms of a sum."""
    return _MODULE[dtype]


def of_gradient(bound: float) -> float:
    """Of a gradient, for the bound of the result: it is rounded to its tensor's dtype, and its terms saw the result's
    gradient rounded to the result's."""
    return 3 * bound


def of_difference(dtype: torch.dtype) -> float:
    """Of what is left when a mean is subtracted that was rounded too, in a dtype that is not rounded more at the end."""
    return of_module(dtype) * (1 if dtype.itemsize == 2 else 3)


def of_rounded_input(dtype: torch.dtype) -> float:
    """Of a linear map of what was rounded before it."""
    return 2 * of_module(dtype)


def of_rounded_operands(dtype: torch.dtype, logits: float) -> float:
    """Of a linear map with a cross entropy whose operands autocast rounds, too."""
    return 2 * of_linear_loss(dtype, logits)


def of_compiled(bound: float) -> float:
    """Of the difference of two results that are each within that bound."""
    return 2 * bound


# Of a loss's gradient over one class, which is nothing but rounding: the part of 1 that errors are measured by.
ONE_CLASS = 1e-2

# What a float32 exponential may leave where the result is 0.
TINY = 1e-30

# Of a product of a query and a key with 64 channels, at positions of about 1e5 and at 0: angles are float32, so that of
# channel pair i is off by 1e5 1e4^(-i / 32) 2^-24, which adds up to 0.025 over the pairs, times two tables and |q| |k| of a
# pair, about 2.
FAR_SCORES = 0.1

# Relative RMS of two float64 computations of one definition: a few dozen roundings of 2^-53, in another order.
TWO_ORACLES = 1e-14


def of_sums(dtype: torch.dtype) -> float:
    """Bound of the relative RMS of a linear map of what a kernel has rounded once, and of its gradients: the rounding of the
    operands and of the result."""
    return 2 * elementwise(dtype)


def of_convolution(dtype: torch.dtype) -> float:
    """Bound of the relative RMS of a short convolution's results and gradients: sums of a few products in float32, over time
    for the weight's, rounded once. Gradients start from one of the output that is exact."""
    return EXACT[dtype] if dtype in EXACT else of_reference(dtype)[0]


def _rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def relative_rms(expected: torch.Tensor, found: torch.Tensor, floor: float = 0.0) -> float:
    """RMS(expected - found) / max(RMS(expected), floor); 0 where both are."""
    error = _rms(expected.double() - found.double())
    return error / max(_rms(expected), floor, 1e-300) if error else 0.0


def worst_row(expected: torch.Tensor, found: torch.Tensor, floor: float = 0.0) -> float:
    """The largest relative error of a row (the last dimension), of rows whose norm is at least 1 % of the median."""
    expected, found = expected.detach(), found.detach()
    if not expected.numel():
        return 0.0
    norm = expected.double().norm(dim=-1).flatten()
    error = (expected.double() - found.double()).norm(dim=-1).flatten()
    large = norm >= 0.01 * norm.median()
    least = max(floor * expected.shape[-1] ** 0.5, 1e-300)
    return float((error[large] / norm[large].clamp(min=least)).max())


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    """`[B, T, H, ...]` with blocks of steps of one head as rows: 16 steps, or as many as make 64 numbers. The last block is
    as long as the others and shares steps with the one before."""
    width = x.shape[3] if x.dim() > 3 else 1
    steps = min(max(16, 64 // width), x.shape[1])
    starts = torch.tensor([*range(0, x.shape[1] - steps, steps), x.shape[1] - steps], device=x.device)
    places = starts[:, None] + torch.arange(steps, device=x.device)
    return x[:, places].movedim(3, 1).flatten(3)


def of_states(x: torch.Tensor) -> torch.Tensor:
    """`[N, H, K, V]` with the state of a head as a row, or all of them where that is few numbers."""
    return x.flatten(2) if x.shape[2] * x.shape[3] >= 64 else x.flatten()


class HalfOperands(TorchDispatchMode):
    """Matrix products of float32 tensors whose operands are rounded to `dtype` first, accumulated in float32. Triangular
    systems are solved in float32, as the kernels invert them, and not by the products that the reference makes of them. The
    gradient of a chunk's whole decay sums products of a state and its gradient, which kernels keep in `dtype`, too."""

    _PRODUCTS: ClassVar = {torch.ops.aten.bmm: 0, torch.ops.aten.mm: 0, torch.ops.aten.baddbmm: 1}

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._patches = contextlib.ExitStack()

    def replaced(self) -> dict[str, Callable]:
        """What stands for functions of `chunked` meanwhile."""
        solve = partial(torch.linalg.solve_triangular, **_UNIT_LOWER)
        return {'_solve': solve, '_decayed': partial(_Decayed.apply, self.dtype)}

    def __enter__(self):
        for name, function in self.replaced().items():
            self._patches.enter_context(mock.patch.object(chunked, name, function))
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        self._patches.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        first = self._PRODUCTS.get(func.overloadpacket)
        if first is not None:
            rounded = (x.to(self.dtype).to(x.dtype) if x.dtype == torch.float32 else x for x in args[first:])
            args = (*args[:first], *rounded)
        return func(*args, **(kwargs or {}))


class AlgorithmOperands(HalfOperands):
    """`HalfOperands` that multiplies what the algorithm does: by the inverse of the triangular system and, where there is a
    gate per channel, by decayed q and k. Of one channel, shapes cannot tell it from one gate a head: `per_channel` does."""

    def __init__(self, dtype: torch.dtype, per_channel: bool) -> None:
        super().__init__(dtype)
        self.per_channel = per_channel

    def replaced(self) -> dict[str, Callable]:
        if not self.per_channel:
            return {**super().replaced(), '_solve': _Solved.apply}
        two = partial(_of_two_channels, chunked._decayed_products)
        return {**super().replaced(), '_solve': _by_inverse, '_decayed_products': two}


def _of_two_channels(
    products: Callable, x: torch.Tensor, y: torch.Tensor, k: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if k.shape[-1] == 1:
        x, y, k, g = (torch.nn.functional.pad(tensor, (0, 1)) for tensor in (x, y, k, g))
    return products(x, y, k, g)


def _inverse(lower: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    return torch.linalg.solve_triangular(lower, eye, **_UNIT_LOWER)


def _by_inverse(lower: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(I + L)^-1 right, differentiated by way of the inverse."""
    return right + _Inverse.apply(lower).tril(-1) @ right


class _Inverse(torch.autograd.Function):
    """(I + L)^-1; its gradient is asked below the diagonal."""

    @staticmethod
    def forward(ctx, lower):
        inverse = _inverse(lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, gradient):
        turned = ctx.saved_tensors[0].mT
        return -(turned @ gradient.tril(-1) @ turned).tril(-1)


class _Solved(torch.autograd.Function):
    """(I + L)^-1 right, differentiated by way of itself."""

    @staticmethod
    def forward(ctx, lower, right):
        below = _inverse(lower).tril(-1)
        solved = right + below @ right
        ctx.save_for_backward(below, solved)
        return solved

    @staticmethod
    def backward(ctx, gradient):
        below, solved = ctx.saved_tensors
        d_right = gradient + below.mT @ gradient
        return -(d_right @ solved.mT).tril(-1), d_right


class _Decayed(torch.autograd.Function):
    """decay * state, of which the gradient of decay sees both the state and its gradient rounded to `dtype`."""

    @staticmethod
    def forward(ctx, dtype, state, decay):
        ctx.dtype = dtype
        ctx.save_for_backward(state, decay)
        return decay * state

    @staticmethod
    def backward(ctx, gradient):
        state, decay = ctx.saved_tensors
        # a definition by chunks stays exact: it is float64
        narrow = (x.to(ctx.dtype).to(x.dtype) if x.dtype == torch.float32 else x for x in (gradient, state))
        return None, decay * gradient, operator.mul(*narrow).sum_to_size(decay.shape)


_UNIT_LOWER = {'upper': False, 'unitriangular': True}
