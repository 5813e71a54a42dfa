"""What a default written in Triton needs."""

from __future__ import annotations

import os

from fla.ops.backends.backend import BaseBackend


class RunsOnTriton(BaseBackend):
    """Facts for `@dispatch(…, default_verifier=runs_on_triton)`: a GPU that Triton knows, or any tensor under Triton's
    interpreter (TRITON_INTERPRET=1, read when a plan is made)."""

    package_name = 'triton'

    @property
    def devices(self) -> tuple[str, ...]:  # type: ignore[override]
        """Platforms whose tensors a Triton kernel can be launched on."""
        gpus = ('cuda', 'rocm', 'xpu')
        return (*gpus, 'cpu') if os.environ.get('TRITON_INTERPRET') == '1' else gpus


runs_on_triton = RunsOnTriton
