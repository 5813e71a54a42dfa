"""Offsets beyond 2^31: by strides, and in the last program of a grid. Only a little of the memory is touched."""

import numpy as np
import pytest
import torch

pytest.importorskip('triton')
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from fla.modules.activations import swiglu
from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
from fla.modules.fused_cross_entropy import cross_entropy_loss
from fla.modules.rotary import rotary_embedding
from tests import bounds

from .losses import oracle as entropy
from .oracle import error, served_by, tensor
from .test_convolution import oracle as convolved
from .test_rotary import oracle as rotated

pytestmark = pytest.mark.interpreted
FAR = 2**31


def far_apart(shape, dim, dtype):
    """A small tensor whose last element along a dimension is 2^31 elements after the first."""
    apart = FAR // (shape[dim] - 1) + 1
    rest = [size if d != dim else 1 for d, size in enumerate(shape)]
    strides = [*torch.empty(rest, device='meta').stride()]
    strides[dim] = apart
    return torch.empty(FAR + 2 * apart, dtype=dtype).as_strided(shape, strides)


class LastProgram:
    """A kernel that runs only the last program of its grid."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **options):
            def create_get_program_id(builder, axis):
                return TensorHandle(np.array([grid[axis] - 1], np.int32), tl.int32)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(InterpreterBuilder, 'create_get_program_id', create_get_program_id)
                self.kernel[(1,) * len(grid)](*args, **options)

        return launch


@served_by('default')
@pytest.mark.parametrize('interleaved', [False, True], ids=['halves', 'interleaved'])
@pytest.mark.parametrize('dim', [1, 2, 3])
def test_rotary_embedding(dim, interleaved):
    shape = (1, 3, 3, 7)
    x = far_apart(shape, dim, torch.bfloat16).copy_(tensor(*shape))
    cos, sin = tensor(3, 2, dtype=torch.float32), tensor(3, 2, dtype=torch.float32)
    expected = rotated(x.double(), cos.double(), sin.double(), interleaved)
    assert error(expected, rotary_embedding(x, cos, sin, interleaved)) <= bounds.of_module(torch.bfloat16)
    rotary_embedding(x, cos, sin, interleaved, inplace=True)
    assert error(expected, x) <= bounds.of_module(torch.bfloat16)


@served_by('default')
def test_rows_of_the_rotary_embedding(monkeypatch):
    from fla.modules.kernels import rotary

    monkeypatch.setattr(rotary, '_rotate', LastProgram(rotary._rotate))
    x, tables = torch.full((1, 1, 1, 1), 3.0).bfloat16().expand(1, FAR - 1, 1, 1), torch.empty(FAR - 1, 0)
    assert rotary_embedding(x, tables, tables)[0, -1].item() == 3


@served_by('default')
def test_numbers_of_swiglu(monkeypatch):
    from fla.modules.kernels import activations

    monkeypatch.setattr(activations, '_forward', LastProgram(activations._forward))
    for size in (FAR - 1, FAR + 1):
        x = torch.empty(size, dtype=torch.bfloat16)
        x[-1] = 1
        assert swiglu(x, x)[-1].item() == pytest.approx(0.731, rel=bounds.of_module(torch.bfloat16))


@served_by('default')
@pytest.mark.parametrize('dim', [0, 1, 2])
def test_states_of_a_convolution(dim):
    shape = (2, 3, 4)
    state = far_apart(shape, dim, torch.bfloat16).copy_(tensor(*shape))
    x, weight = tensor(2, 2, 3, dtype=torch.float32, grad=True), tensor(3, 4, dtype=torch.float32)
    expected, last = convolved(x.double(), weight.double(), initial_state=state.double())
    for cu in (None, torch.tensor([0, 2, 4])):
        inputs = x if cu is None else x.reshape(1, 4, 3)
        leaf = state.detach().requires_grad_()
        y, final = causal_conv1d(inputs, weight, None, None, leaf, True, None, cu)
        assert error(expected.reshape(y.shape), y) <= bounds.of_module(torch.float32)
        assert torch.equal(last.float(), final.float())
        exact = state.double().requires_grad_()
        dfinal = far_apart(shape, dim, torch.bfloat16).copy_(tensor(*shape))
        found = torch.autograd.grad((y, final), (x, leaf), (torch.ones_like(y), dfinal))
        y, final = convolved(x.double(), weight.double(), initial_state=exact)
        wanted = torch.autograd.grad((y, final), (x, exact), (torch.ones_like(y), dfinal.double()))
        for a, b in zip(wanted, found, strict=True):
            assert error(a, b) <= bounds.of_module(torch.bfloat16)

    step = tensor(2, 3, dtype=torch.float32)
    expected, last = convolved(step.double()[:, None], weight.double(), initial_state=state.double())
    with torch.no_grad():
        y, after = causal_conv1d_update(step, state, None, weight)
    assert error(expected[:, 0], y) <= bounds.of_module(torch.float32)
    assert torch.equal(after.float(), last.float())


@served_by('default')
def test_rows_of_the_cross_entropy():
    logits, target = far_apart((3, 40), 0, torch.bfloat16).copy_(tensor(3, 40)), torch.tensor([3, 39, 0])
    given, exact = logits.detach().requires_grad_(), logits.double().requires_grad_()
    losses, _ = cross_entropy_loss(given, target)
    expected, _ = entropy(exact, target)
    assert error(expected, losses) <= bounds.EXACT[torch.float32]
    (wanted,), (got,) = torch.autograd.grad(expected.sum(), exact), torch.autograd.grad(losses.sum(), given)
    assert error(wanted, got) <= bounds.of_reference(torch.bfloat16)[0]
