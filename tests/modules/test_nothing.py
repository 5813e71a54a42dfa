"""Every function with each size set to 0: kernels give the reference's results and gradients."""

import pytest
import torch

from fla.backends import Policy, policy_context
from fla.modules.activations import silu_and_mul, swiglu, swiglu_linear
from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
from fla.modules.fused_cross_entropy import cross_entropy_loss
from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.modules.norm.l2norm import l2norm
from fla.modules.norm.layernorm import group_norm, layer_norm, rms_norm
from fla.modules.rotary import RotaryEmbedding, rotary_embedding
from tests import bounds

# name → a call for given sizes, with tensors from `new`, and the sizes that may be 0
CALLS = {
    'swiglu': (lambda new, b, t, d: swiglu(new(b, t, d), new(b, t, d)), (2, 3, 4)),
    'silu_and_mul': (lambda new, b, t, d: silu_and_mul(new(b, t, 2 * d)), (2, 3, 4)),
    'swiglu_linear': (lambda new, b, t, d, o: swiglu_linear(new(b, t, d), new(b, t, d), new(o, d), new(o)), (2, 3, 4, 5)),
    'l2norm': (lambda new, b, t, d: l2norm(new(b, t, d)), (2, 3, 4)),
    'rms_norm': (lambda new, b, t, d: rms_norm(new(b, t, d), new(d), new(d), new(b, t, d), prenorm=True), (2, 3, 4)),
    'layer_norm': (lambda new, b, t, d: layer_norm(new(b, t, d), new(d), new(d), new(b, t, d), prenorm=True), (2, 3, 4)),
    'group_norm': (lambda new, b, t, d: group_norm(new(b, t, d), new(d), new(d), num_groups=2), (2, 3, 4)),
    'rms_norm_gated': (lambda new, b, t, d: rms_norm_gated(new(b, t, d), new(b, t, d), new(d), new(d)), (2, 3, 4)),
    'rotary_embedding': (
        lambda new, b, t, h, d, r: rotary_embedding(new(b, t, h, d + 2 * r), torch.ones(3, r), torch.ones(3, r)),
        (2, 3, 2, 4, 1),
    ),
    'RotaryEmbedding': (
        lambda new, b, t, h, d: RotaryEmbedding(4)(new(b, t, h, d + 4), new(b, t, 1, d + 4), torch.arange(b))[0],
        (2, 3, 2, 1),
    ),
    'causal_conv1d': (
        lambda new, b, t, d: causal_conv1d(new(b, t, d), new(d, 3), new(d), new(b, t, d), new(b, d, 3), True, 'silu'),
        (2, 4, 3),
    ),
    'causal_conv1d, packed': (
        lambda new, t, d, n: causal_conv1d(
            new(1, t * n, d), new(d, 3), None, None, new(n, d, 3), True, None, torch.arange(n + 1) * t
        ),
        (2, 3, 2),
    ),
    'causal_conv1d_update': (
        lambda new, n, d: causal_conv1d_update(
            *(one.detach() for one in (new(n, 1, d), new(n, d, 3), new(n, 1, d), new(d, 3), new(d)))
        ),
        (2, 4),
    ),
    'cross_entropy_loss': (lambda new, n: cross_entropy_loss(new(n, 5), torch.arange(n)), (2,)),
    'fused_linear_cross_entropy_loss': (
        lambda new, b, t, d: fused_linear_cross_entropy_loss(
            new(b, t, d), torch.zeros(b, t).long(), new(5, d), new(5), reduction='sum'
        ),
        (2, 3, 4),
    ),
}
CASES = [
    pytest.param(call, (*sizes[:i], 0, *sizes[i + 1 :]), id=f'{name}-{i}')
    for name, (call, sizes) in CALLS.items()
    for i in range(len(sizes))
]


def run(call, sizes, backend):
    """Results, and gradients of the arguments."""
    inputs = []

    def new(*shape):
        inputs.append(torch.ones(shape, requires_grad=True))
        return inputs[-1]

    with policy_context(Policy(use=(backend,))):
        results = call(new, *sizes)
    results = results if isinstance(results, tuple) else (results,)
    wanted = [one.sum() for one in results if one is not None and one.requires_grad]
    return [*results, *(torch.autograd.grad(wanted, inputs, allow_unused=True) if wanted else ())]


@pytest.mark.interpreted
@pytest.mark.parametrize(('call', 'sizes'), CASES)
def test_one_size_of_nothing(call, sizes):
    for ours, theirs in zip(run(call, sizes, 'default'), run(call, sizes, 'reference'), strict=True):
        if ours is None or theirs is None:
            # for an unused argument a kernel gives zeros and PyTorch None
            assert all(one is None or not one.any() for one in (ours, theirs))
        else:
            torch.testing.assert_close(ours, theirs, atol=bounds.EXACT[torch.float32], rtol=bounds.EXACT[torch.float32])
