"""What a default written in Triton needs."""

from __future__ import annotations

import os
import sys

from fla.backends.backend.base import BaseBackend


class RunsOnTriton(BaseBackend):
    """Facts for `@dispatch(…, default_verifier=runs_on_triton)`: a GPU that Triton knows, or any tensor under Triton's
    interpreter (TRITON_INTERPRET=1, read when a plan is made)."""

    package_name = 'triton'

    @property
    def devices(self) -> tuple[str, ...]:  # type: ignore[override]
        """Platforms whose tensors a Triton kernel can be launched on."""
        gpus = ('cuda', 'rocm', 'xpu')
        return (*gpus, 'cpu') if os.environ.get('TRITON_INTERPRET') == '1' else gpus

    @property
    def retryable(self) -> tuple[type[BaseException], ...]:  # type: ignore[override]
        """A kernel that does not compile, or needs more shared memory than there is: known before anything is launched.
        Where Triton has not been imported, it has raised nothing."""
        kind = getattr(sys.modules.get('triton.errors'), 'TritonError', None)
        return () if kind is None else (kind,)


runs_on_triton = RunsOnTriton
