"""Facts of a default implementation written in Triton."""

from __future__ import annotations

import os
import sys

from fla.backends.backend.base import BaseBackend


class RunsOnTriton(BaseBackend):
    """For `@dispatch(…, default_verifier=runs_on_triton)`: needs a GPU that Triton supports, or Triton's interpreter
    (TRITON_INTERPRET=1, read when a plan is built)."""

    package_name = 'triton'

    @property
    def devices(self) -> tuple[str, ...]:  # type: ignore[override]
        """Platforms whose tensors a Triton kernel accepts."""
        gpus = ('cuda', 'rocm', 'xpu')
        return (*gpus, 'cpu') if os.environ.get('TRITON_INTERPRET') == '1' else gpus

    @property
    def retryable(self) -> tuple[type[BaseException], ...]:  # type: ignore[override]
        """Triton's own errors, all raised before a launch: a kernel does not compile, or needs more shared memory than there
        is. Empty until Triton is imported."""
        kind = getattr(sys.modules.get('triton.errors'), 'TritonError', None)
        return () if kind is None else (kind,)


runs_on_triton = RunsOnTriton
