"""Where the current call runs: in a graph capture, in a backward pass, in a trace."""

from __future__ import annotations

import sys
from typing import Any

import torch


def in_capture() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_traced(first: Any) -> bool:
    """Whether a call is only traced: a failure says nothing about the backend, and the trace would keep the choice."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    fake = sys.modules.get('torch._subclasses.fake_tensor')
    if isinstance(first, torch.Tensor) and (first.is_meta or (fake is not None and isinstance(first, fake.FakeTensor))):
        return True
    keys, mode = torch._C._TorchDispatchModeKey, torch._C._get_dispatch_mode
    return mode(keys.FAKE) is not None or mode(keys.PROXY) is not None
