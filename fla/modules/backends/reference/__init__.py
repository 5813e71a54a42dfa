"""Plain PyTorch: it serves CPUs, and every other backend is compared with it."""

from __future__ import annotations

from fla.backends import BaseBackend
from fla.modules.backends.reference.activations import ReferenceActivations
from fla.modules.backends.reference.convolution import ReferenceConvolution
from fla.modules.backends.reference.losses import ReferenceLosses
from fla.modules.backends.reference.norms import ReferenceNorms
from fla.modules.backends.reference.rotary import ReferenceRotary


class ModulesReference(
    ReferenceNorms, ReferenceActivations, ReferenceRotary, ReferenceConvolution, ReferenceLosses, BaseBackend
):
    """Takes every device, dtype and argument, and is differentiable twice."""

    backend_type = 'reference'
    kind = 'reference'
