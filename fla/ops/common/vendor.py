"""What backends of vendors' packages share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fla.ops.backends.backend import Verdict
from fla.utils.devices import Device


def for_tma(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy, contiguous and at an address that Hopper's bulk copies can read from."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def smallest_call(device: Device, call: Callable[[torch.device], torch.Tensor], expected: float) -> Verdict:
    """Whether a package's smallest real call works on a CUDA device: every number of the result is within 2 % of `expected`.

    A package that imports may still be unusable (built for another PyTorch, no kernel for this GPU, no compiler), and may
    then compute nonsense without an error. An exception of `call` is left to whoever asks `probe()`, and becomes a reason.
    """
    if torch.cuda.is_current_stream_capturing():
        return False, 'asked for inside a CUDA graph capture, where it cannot be tried: call it once before, then refresh()'
    # a plan may be made inside a trace or under FakeTensorMode
    with _disable_current_modes(), torch.inference_mode():
        result = call(torch.device(device.platform, device.index))
        worst = float((result.double() - expected).abs().max())
    if worst <= 0.02 * abs(expected):
        return True, None
    return False, ('its smallest call is off by %s where %s is right', worst, expected)
