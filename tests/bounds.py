"""The error bounds of tests, and how each was found. All bounds are set here, and no test loosens one.

Errors are against float64 on the same (rounded) inputs. There are two measures: `relative_rms` over everything, and
`worst_row`, so that one wrong block cannot hide in an average.

**float64: 1e-10. float32: 1e-5.** Both are demands, not measurements: products are full float32. In the interpreter, kernels
have errors of at most 1.2e-6 on the grid, and of 5.7e-6 in the gradients of gates and their parameters. But a row of 1 % of
the median norm may be nothing but the rounding error of the others. In five draws of the grid PyTorch's own float32, the
reference, is off by 1.3e-5 on the worst rows of o, dq, dk and dv. A kernel may have 1.5 times that on those rows.

**The reference** computes in float32 for every dtype, so that a bfloat16 or float16 result is a float32 result rounded once.
Rounding to nearest with p significant bits is off by at most 2^-p of each number (p = 8 and 11), and so of each row and of
everything. 1.5 times the largest relative RMS on the grid is more than that.

**Kernels** multiply bfloat16 or float16 operands and accumulate in float32. `HalfOperands` makes the reference do the same,
forward and backward. The bound of a kernel is 1.5 times the largest error that the reference then has on the grid. Gradients
with one number a head (A_log, dt_bias) or few blocks (rows of dg and dbeta) vary by chance, so their error is the largest in
five draws. `python -m tests.measure_bounds` measures all that.

**Kernels off the grid** run at other sizes, lengths and gates. The worst row is the one whose terms cancel most. The more
rows there are, the worse it is, for `HalfOperands` as well. There a row is a block of 16 steps of a head, or the state of a
head (of all heads, where it has fewer than 64 numbers). Where `AlgorithmOperands` has larger errors on such a case than on
the grid, the bound is 1.5 times those: the largest of all `DRAWS` of the gradients of o and of the state, because a worst
row varies by chance. `AlgorithmOperands` is `HalfOperands` with the products of the algorithm where the reference has
others. What else it rounds follows from the operands of these products, not from the errors of a kernel: - Chunks multiply
by the inverse X = (I + L)^-1 where the reference solves, so that X is an operand below its diagonal of ones.
  In the backward, the gated delta rule computes the gradient of L from the solution, dL = -(X^T dU) U^T. KDA computes it
  from that of the inverse, dX = dU R^T for the right-hand sides R, and dL = -X^T dX X^T, so that dX and X^T dX are operands
  too. The solution is the reference's, U - W S. The gated delta rule's kernels solve X beta (V - e^G K S), which rounds a
  little less.
- KDA has a gate per channel and multiplies e^(G - F) q by e^(F - G) k, where F is G of a step between theirs. So does the
  reference, except for a single channel, which it treats as one gate a head. It then multiplies the 16-bit q and k, and
  applies the decay in float32 afterwards. A second channel of zeros makes it multiply as for many channels.

**Gradients of gates** are differences of terms that cancel under strong gates. Their error is divided by max(RMS of the
gradient, 1e-3 * RMS of those terms). The terms are q times its gradient or, at the end of a sequence, the products of the
state and its gradient where those are larger. The error of a row is divided by max(norm of the row, 1e-2 * norm of such
terms): rounded to float32 the terms are off by 2^-24 of themselves, which is 6e-6 of it. A row of the gradients of gates
and of beta is a block of steps of a head, 16 or as many as make 64 numbers, because a single number may be the rounding
error of two large ones. Gradients of A_log and dt_bias sum the gradient of g over steps. Their error is divided by at least
the root of the sum of its squares (per element of dt_bias).
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

# Measured on the grid with half operands: relative RMS, worst row.
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
        # Without strong gates, under which it is smaller than any float16.
        'dinitial_state': (9.0e-4, 6.0e-3),
        'dbeta': (6.7e-4, 5.3e-3),
        'dg': (8.7e-4, 2.2e-3),
        'dA_log': (2.0e-3, 2.0e-3),
        'ddt_bias': (6.7e-4, 6.7e-4),
    },
}

# The worst row of the reference in float32, in five draws of the grid.
_CANCELLED = 1.3e-5

# The worst row of dq and dk of `tests.ops.attn.emulated` in float32, in five draws of the cases of attention's GPU tests.
# These gradients are differences.
_ATTENTION_CANCELLED = 3.5e-5

GATE_FLOOR, GATE_ROW_FLOOR = 1e-3, 1e-2

# Seeds and scales of the gradients for the emulation of a case off the grid. The test's own seed, 5, has several scales for
# other roundings: where a sum nearly vanishes in a row, as in the gradient of a gate, the error of one emulation is chance.
DRAWS = ((5, 1.0), (5, 1.2), (5, 1.4), (6, 1.0), (7, 1.0))


def of_reference(dtype: torch.dtype) -> tuple[float, float]:
    """Returns the bounds of the relative RMS and of the worst row of a reference backend's result in `dtype`."""
    if dtype in EXACT:
        return EXACT[dtype], EXACT[dtype]
    # The rounded result is itself a float32 result.
    return ROUNDING[dtype] + EXACT[torch.float32], ROUNDING[dtype] + EXACT[torch.float32]


def of_kernel(name: str, operands: torch.dtype) -> tuple[float, float]:
    """Returns the bounds of the relative RMS and of the worst row of a kernel's result, for its operands' dtype.

    name: 'o', 'final', or 'd' + a parameter."""
    if operands in EXACT:
        row = 1.5 * _CANCELLED if operands == torch.float32 and name in ('o', 'dq', 'dk', 'dv') else EXACT[operands]
        return EXACT[operands], row
    rms, row = _HALF[operands][name]
    return 1.5 * rms, 1.5 * row


def off_grid(name: str, operands: torch.dtype, emulated: tuple[float, float]) -> tuple[float, float]:
    """Returns the bounds of `of_kernel` for a case off the grid, on which `AlgorithmOperands` has the errors `emulated`."""
    rms, row = of_kernel(name, operands)
    return (rms, row) if operands in EXACT else (max(rms, 1.5 * emulated[0]), max(row, 1.5 * emulated[1]))


def of_attention(name: str, operands: torch.dtype, emulated: tuple[float, float]) -> tuple[float, float]:
    """Returns the bounds of the relative RMS and of the worst row of attention's 'o' or 'd' + a parameter.

    In half precision they follow from `emulated`, the largest errors of `tests.ops.attn.emulated` on the same call in five
    draws of the gradient of o, but are at least those of float32, in which sums are taken."""
    if operands in EXACT:
        row = 1.5 * _ATTENTION_CANCELLED if operands == torch.float32 and name in ('dq', 'dk') else EXACT[operands]
        return EXACT[operands], row
    rms, row = of_attention(name, torch.float32, emulated)
    return max(rms, 1.5 * emulated[0]), max(row, 1.5 * emulated[1])


# Where scores have no effect (a window of one, a single key), the gradients of q, k, g and sinks are dp - delta, which is 0
# except for the rounding of two sums of V products of normal numbers. In float32, added one after the other, each sum is off
# by 0.3 * 2^-24 * V in the RMS (a rounding by 0.43 * 2^-24 of a partial sum, whose RMS is the root of its length). Both
# together, times the scale V^-1/2, are off by 4.1e-7 at V = 256. Divided by this floor, that is 1e-5.
ATTENTION_FLOOR = 4e-2


# The error that float32 angles of rotary positions cause in a layer of the tests. The angles of 70 steps and heads of 4 are
# whole numbers or below 1, so off by at most two roundings of 2^-24 of 1. Scores are off by as much relative to their size,
# and so are their softmax and the output, for which 1e-6 leaves a factor of 8.
TURNED = 1e-6


def of_layer(dtype: torch.dtype, turned: bool = False) -> float:
    """Returns the bound of the relative RMS of a layer's output in the tests; `turned`: with rotary positions.

    Six tensors are computed and rounded one after the other (projection, convolution, recurrence or attention, gate, norm,
    output). In half precision each is off by at most ROUNDING of it. In float32 and float64 the terms of their sums are
    rounded, as in a module."""
    exact = max(of_module(dtype), TURNED if turned else 0.0)
    return 6 * ROUNDING[dtype] if dtype in ROUNDING else exact


def of_autocast(dtype: torch.dtype) -> float:
    """Returns the bound of a float32 layer that autocast computes in `dtype`: `of_layer`, plus the rounding of the input, of
    the weights, and of the inputs of a float32 recurrence."""
    return of_layer(dtype) + 3 * ROUNDING[dtype]


def of_norm(dtype: torch.dtype) -> float:
    """Returns the bound of the relative RMS of a norm kernel's results, for the narrowest dtype of a call.

    Sums are float32, where the rounding of a row's terms and sum is about 1e-7, and results are rounded once. A gradient
    that reads a rounded sum with the residual, or adds two rounded gradients, is off by two roundings. Each is at most 0.58
    * 2^-p in the RMS of numbers spread over a binade, so that both together are less than the 2^-p allowed."""
    return 1e-6 if dtype == torch.float32 else of_reference(dtype)[0]


def of_linear_loss(dtype: torch.dtype, logits: float) -> float:
    """Returns the bound of the relative RMS of the loss and the gradients of a linear map with a cross entropy.

    logits: RMS of the logits, which are stored in `dtype`. Their rounding error is ROUNDING times their size, and so is the
    relative error of a probability. Other gradients, sums over chunks and results are off by ROUNDING of themselves. The RMS
    of a rounding is 0.43 of that, so that the factors 1 and 1/2 cover it."""
    return EXACT[dtype] if dtype in EXACT else ROUNDING[dtype] * (1 + logits / 2)


def elementwise(dtype: torch.dtype) -> float:
    """Returns the bound of the relative RMS of an elementwise kernel: a handful of float32 roundings of 2^-24 each,
    exponentials that GPUs approximate to two units in the last place, and one rounding of the result."""
    return 1e-6 if dtype == torch.float32 else of_reference(dtype)[0]


_MODULE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6, torch.float64: 1e-13}


def of_module(dtype: torch.dtype) -> float:
    """Returns the bound of the relative RMS of a function of the modules on small tensors: half a unit in the last place of
    a result of about 1, and in float32 and float64 a few roundings of the terms of a sum."""
    return _MODULE[dtype]


def of_gradient(bound: float) -> float:
    """Returns the bound of a gradient, from the bound of the result. The gradient is rounded to its tensor's dtype, and
    computed from the result's gradient, which is rounded to the result's dtype."""
    return 3 * bound


def of_difference(dtype: torch.dtype) -> float:
    """Returns the bound of a difference with a rounded mean, which is not rounded further at the end."""
    return of_module(dtype) * (1 if dtype.itemsize == 2 else 3)


def of_rounded_input(dtype: torch.dtype) -> float:
    """Returns the bound of a linear map of a rounded input."""
    return 2 * of_module(dtype)


def of_rounded_operands(dtype: torch.dtype, logits: float) -> float:
    """Returns the bound of a linear map with a cross entropy whose operands autocast rounds too."""
    return 2 * of_linear_loss(dtype, logits)


def of_compiled(bound: float) -> float:
    """Returns the bound of the difference of two results that are each within `bound`."""
    return 2 * bound


# Scale of the error of a loss's gradient over one class, which is rounding error only, relative to 1.
ONE_CLASS = 1e-2

# Allowed value of a float32 exponential whose exact result is 0.
TINY = 1e-30

# Allowed error of the product of a query and a key with 64 channels, at positions of about 1e5 and at 0. Angles are float32.
# That of channel pair i is off by 1e5 1e4^(-i / 32) 2^-24, which adds up to 0.025 over the pairs, times two tables, times
# |q| |k| of a pair, about 2.
FAR_SCORES = 0.1

# Relative RMS of two float64 computations of one definition: a few dozen roundings of 2^-53, in another order.
TWO_ORACLES = 1e-14


def of_sums(dtype: torch.dtype) -> float:
    """Returns the bound of the relative RMS of a linear map of a kernel's rounded result, and of its gradients: the rounding
    of the operands and of the result."""
    return 2 * elementwise(dtype)


def of_convolution(dtype: torch.dtype) -> float:
    """Returns the bound of the relative RMS of a short convolution's results and gradients: sums of a few products in
    float32, over time for the weight's gradient, rounded once. The output's gradient is exact."""
    return EXACT[dtype] if dtype in EXACT else of_reference(dtype)[0]


def _rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def relative_rms(expected: torch.Tensor, found: torch.Tensor, floor: float = 0.0) -> float:
    """Returns RMS(expected - found) / max(RMS(expected), floor), or 0 if the error is 0."""
    error = _rms(expected.double() - found.double())
    return error / max(_rms(expected), floor, 1e-300) if error else 0.0


def worst_row(expected: torch.Tensor, found: torch.Tensor, floor: float = 0.0) -> float:
    """Returns the largest relative error of a row (the last dimension) among rows with at least 1 % of the median norm."""
    expected, found = expected.detach(), found.detach()
    if not expected.numel():
        return 0.0
    norm = expected.double().norm(dim=-1).flatten()
    error = (expected.double() - found.double()).norm(dim=-1).flatten()
    large = norm >= 0.01 * norm.median()
    least = max(floor * expected.shape[-1] ** 0.5, 1e-300)
    return float((error[large] / norm[large].clamp(min=least)).max())


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    """Returns x `[B, T, H, ...]` with blocks of steps of one head as rows: 16 steps, or as many as make 64 numbers. The last
    block is as long as the others and overlaps the one before."""
    width = x.shape[3] if x.dim() > 3 else 1
    steps = min(max(16, 64 // width), x.shape[1])
    starts = torch.tensor([*range(0, x.shape[1] - steps, steps), x.shape[1] - steps], device=x.device)
    places = starts[:, None] + torch.arange(steps, device=x.device)
    return x[:, places].movedim(3, 1).flatten(3)


def of_states(x: torch.Tensor) -> torch.Tensor:
    """Returns x `[N, H, K, V]` with the state of a head as a row, or all of x as one row if a state has under 64 numbers."""
    return x.flatten(2) if x.shape[2] * x.shape[3] >= 64 else x.flatten()


class HalfOperands(TorchDispatchMode):
    """Rounds the operands of float32 matrix products to `dtype`; sums stay float32.

    Triangular systems are solved in float32, in which kernels invert them, and not by the reference's products. The gradient
    of a chunk's whole decay sums products of a state and its gradient, which are rounded too, as kernels store them."""

    _PRODUCTS: ClassVar = {torch.ops.aten.bmm: 0, torch.ops.aten.mm: 0, torch.ops.aten.baddbmm: 1}

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._patches = contextlib.ExitStack()

    def replaced(self) -> dict[str, Callable]:
        """Returns the replacements of functions of `chunked`, by name."""
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
    """`HalfOperands` with the products of the algorithm: by the inverse of the triangular system and, with a gate per
    channel, of decayed q and k. `per_channel` is needed because with one channel the shapes are those of one gate a head."""

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
    """Returns (I + L)^-1 right, differentiated through the inverse."""
    return right + _Inverse.apply(lower).tril(-1) @ right


class _Inverse(torch.autograd.Function):
    """(I + L)^-1, with its gradient below the diagonal."""

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
    """(I + L)^-1 right, differentiated through the solution."""

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
    """decay * state, where the gradient of decay is computed from the state and its gradient, both rounded to `dtype`."""

    @staticmethod
    def forward(ctx, dtype, state, decay):
        ctx.dtype = dtype
        ctx.save_for_backward(state, decay)
        return decay * state

    @staticmethod
    def backward(ctx, gradient):
        state, decay = ctx.saved_tensors
        # A float64 definition by chunks stays exact.
        narrow = (x.to(ctx.dtype).to(x.dtype) if x.dtype == torch.float32 else x for x in (gradient, state))
        return None, decay * gradient, operator.mul(*narrow).sum_to_size(decay.shape)


_UNIT_LOWER = {'upper': False, 'unitriangular': True}
