"""Helpers of the module tests."""

import contextlib
import itertools

import torch

from fla.backends import trace
from tests import bounds

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]

EAGER = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def error(expected, got):
    """Relative RMS difference, in float64."""
    expected, got = expected.detach().double(), got.detach().double()
    assert expected.shape == got.shape, (expected.shape, got.shape)
    return float((expected - got).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-30))


# for the tensors of a test; seeded anew for each, so that its numbers do not depend on earlier tests
seeds = itertools.count()

# for incoming gradients; if they equalled an argument, a gradient could be only rounding error
WEIGHTS = 1_000_000


def tensor(*shape, dtype=torch.float64, grad=False, seed=None):
    """A random tensor with values that every dtype holds exactly, so that the oracle sees the same."""
    seed = next(seeds) if seed is None else seed
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.bfloat16().to(torch.float16).to(dtype).requires_grad_(grad)


def opcheck(kernel, *arguments):
    """PyTorch's rules for the operators of an opaque kernel for GPUs, of which here the CPU runs the kernels: they call a
    stand-in for the package."""
    gpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with torch.library._scoped_library('fla', 'IMPL') as library:
        for op in (kernel.op, kernel.forward_op, kernel.backward_op):
            if op is not None:
                library.impl(op._schema.name, lambda *args, op=op: op.redispatch(gpu, *args), 'CPU')
        torch.library.opcheck(kernel.op, arguments)


@contextlib.contextmanager
def differentiating():
    """Enables autograd, which is off inside an operator, for a stand-in that needs it."""
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(*EAGER):
        yield


def check(function, oracle, arguments, bound, **options):
    """Outputs and gradients of `function` against those of `oracle` for the same values in float64.

    `arguments`: name → tensor. Both give a tensor or a tuple of tensors and None.
    """
    given = {n: x.detach().clone().requires_grad_(True) for n, x in arguments.items()}
    exact = {n: x.detach().double().requires_grad_(True) for n, x in arguments.items()}
    results = []
    for call, inputs in ((function, given), (oracle, exact)):
        out = call(**inputs, **options)
        out = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
        weights = [tensor(*x.shape, seed=WEIGHTS + i) for i, x in enumerate(out)]
        loss = sum((x.double() * w).sum() for x, w in zip(out, weights, strict=True))
        results.append((out, torch.autograd.grad(loss, list(inputs.values()))))
    (got, got_grads), (expected, expected_grads) = results
    for a, b in zip(expected, got, strict=True):
        assert error(a, b) <= bound
    for name, a, b in zip(arguments, expected_grads, got_grads, strict=True):
        assert b.dtype == arguments[name].dtype
        assert error(a, b) <= bounds.of_gradient(bound), f'gradient of {name}'
    return got


@contextlib.contextmanager
def served_by(backend):
    """Asserts that this backend serves all dispatched calls, and at least one. Also a decorator."""
    with trace() as recorded:
        yield
    assert {record.backend for record in recorded} == {backend}
