"""What the Triton defaults of both delta rules need."""

from __future__ import annotations

import torch

from fla.ops.backends import Verdict, runs_on_triton
from fla.ops.common.triton_call import triton_version
from fla.utils.devices import Device


class DeltaRuleOnTriton(runs_on_triton):
    """float64 is for the reference: kernels compute in float32."""

    dtypes = {'q': (torch.float16, torch.bfloat16, torch.float32)}


class ChunksOnTriton(DeltaRuleOnTriton):
    """Triton 3.6 fails on kernels of both families for data-centre Blackwell: its compiler crashes on the gated delta rule
    in bfloat16, and float32 with K = 256 takes more tensor memory than there is. Triton 3.9 compiles them."""

    def probe(self, device: Device) -> Verdict:
        version = triton_version()
        if device.platform == 'cuda' and (device.capability or (0, 0))[0] == 10 and version < (3, 9):
            return False, f'needs Triton 3.9 on compute capability 10.x, has {".".join(map(str, version))}'
        return True, None
