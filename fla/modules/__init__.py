"""Building blocks of layers: norms, gated activations, short convolutions, rotary embedding, cross entropies. Each is a
dispatched function of the operation `modules`; those with parameters have a class too.

The path of a call, here of `rms_norm` where its Triton default serves:

1. `norm/layernorm.py`: the public function, its docstring and the check of its arguments.
2. `fla/backends/runtime`: the entry point chooses the default or a backend of `backends/`.
3. `kernels/norms_autograd.py`: the kernels as one differentiable operator.
4. `kernels/norms.py`: the launch and its block sizes; `kernels/norms_device.py`: the kernels.

Convolutions have one kernel file for each of forward, backward and decode step. Losses have `cross_entropy_autograd.py` or
`linear_cross_entropy.py` in step 3. Activations and the rotary embedding have steps 3 and 4 in one file.

Here, `activations` and `l2norm` are submodules; the function is `fla.modules.l2norm.l2norm`. FLA 0.6 has the same modules.
The paths of older releases (`convolution`, `conv`, `layernorm`, `l2norm`, `fused_norm_gate`) are aliases.
"""

from __future__ import annotations

from fla.modules import activations, l2norm
from fla.modules.causal_conv1d import ShortConvolution
from fla.modules.fused_cross_entropy import FusedCrossEntropyLoss
from fla.modules.fused_linear_cross_entropy import FusedLinearCrossEntropyLoss
from fla.modules.norm import FusedRMSNormGated, GroupNorm, LayerNorm, RMSNorm
from fla.modules.rotary import RotaryEmbedding

__all__ = [
    'FusedCrossEntropyLoss',
    'FusedLinearCrossEntropyLoss',
    'FusedRMSNormGated',
    'GroupNorm',
    'LayerNorm',
    'RMSNorm',
    'RotaryEmbedding',
    'ShortConvolution',
    'activations',
    'l2norm',
]

TYPE_CHECKING = False
if not TYPE_CHECKING:  # a type checker would take any name for one that exists

    def __getattr__(name):
        from fla.utils.owners import missing

        raise missing(__name__, name)
