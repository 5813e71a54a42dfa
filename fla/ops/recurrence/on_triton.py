"""Requirements of the Triton defaults of both delta rules, and their notes in `explain`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fla.backends import Verdict, runs_on_triton
from fla.backends.core.tensors import any_requires_grad, in_func_transform
from fla.ops.launch.triton_call import triton_version
from fla.utils.devices import Device, capability_of


class DeltaRuleOnTriton(runs_on_triton):
    """The kernels compute in float32; float64 is left to the reference."""

    dtypes = {'q': (torch.float16, torch.bfloat16, torch.float32)}


class ChunksOnTriton(DeltaRuleOnTriton):
    """Triton 3.6 fails on kernels of both families for data-centre Blackwell: its compiler crashes on the gated delta rule
    in bfloat16, and float32 with K = 256 takes more tensor memory than there is. Triton 3.9 compiles them."""

    def probe(self, device: Device) -> Verdict:
        missing = _missing(device.capability if device.platform == 'cuda' else None)
        return missing is None, missing


class StepsOnTriton(DeltaRuleOnTriton):
    """The recurrent kernel compiles on every GPU, but has no gradient: calls with gradients run the chunked form."""

    def explain_notes(self, function: str, arguments: Mapping[str, Any]) -> Sequence[str]:
        if not needs_gradient(arguments):
            return ()
        return (f'with gradients it calls {function.replace("fused_recurrent", "chunk")}: the recurrent kernel has none',)


def needs_gradient(arguments: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments will be differentiated."""
    tensors = tuple(x for x in arguments.values() if isinstance(x, torch.Tensor))
    return torch.is_grad_enabled() and any_requires_grad(tensors)


def chunks_of_64(chunk_size: int | None) -> Verdict:
    """The verdict on `chunk_size`."""
    if chunk_size not in (None, 64):
        return False, 'the Triton kernels work in chunks of 64'
    return True, None


def steps_on_triton(q: torch.Tensor, *others: torch.Tensor | None) -> tuple[bool, str | None]:
    """The verdict on the tensors of `fused_recurrent_*`, whose gradients need the chunked kernels."""
    if in_func_transform():
        return False, 'torch.func cannot look into a Triton kernel'
    if torch.is_grad_enabled() and any_requires_grad((q, *others)):
        missing = _missing_on(q.device)
        return missing is None, missing
    return True, None


def _missing(capability: tuple[int, int] | None) -> str | None:
    version = triton_version()
    if (capability or (0, 0))[0] == 10 and version < (3, 9):
        return f'needs Triton 3.9 on compute capability 10.x, has {".".join(map(str, version))}'
    return None


def _missing_on(device: torch.device) -> str | None:
    return _missing(capability_of(device))


# the device does not change while Dynamo traces
_missing_on._dynamo_marked_constant = True  # type: ignore[attr-defined]
