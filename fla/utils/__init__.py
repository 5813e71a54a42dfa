"""Facts about devices, strict environment parsing and testing helpers.

The constants (`device`, `IS_NVIDIA_HOPPER`, ...) describe the machine's default accelerator. They are computed when read:
asking a driver at import would initialise it in every process, and CUDA is unusable in forks of such a process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fla.utils.devices import (
    capability_of,
    check_shared_mem,
    default_device,
    is_amd,
    is_intel,
    is_intel_alchemist,
    is_npu,
    is_nvidia,
    is_nvidia_blackwell,
    is_nvidia_hopper,
    is_nvidia_sm100,
    is_nvidia_sm120,
    platform_of,
    platform_of_type,
)
from fla.utils.owners import missing
from fla.utils.testing import assert_close

_LAZY: dict[str, Callable[[], object]] = {
    'device': default_device,
    'device_platform': lambda: platform_of_type(default_device()),
    'IS_NVIDIA': is_nvidia,
    'IS_NVIDIA_HOPPER': is_nvidia_hopper,
    'IS_NVIDIA_BLACKWELL': is_nvidia_blackwell,
    'IS_NVIDIA_SM100': is_nvidia_sm100,
    'IS_NVIDIA_SM120': is_nvidia_sm120,
    'IS_AMD': is_amd,
    'IS_INTEL': is_intel,
    'IS_INTEL_ALCHEMIST': is_intel_alchemist,
    'IS_NPU': is_npu,
}

__all__ = [
    'assert_close',
    'capability_of',
    'check_shared_mem',
    'default_device',
    'is_amd',
    'is_intel',
    'is_intel_alchemist',
    'is_npu',
    'is_nvidia',
    'is_nvidia_blackwell',
    'is_nvidia_hopper',
    'is_nvidia_sm100',
    'is_nvidia_sm120',
    'platform_of',
    'platform_of_type',
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return _LAZY[name]()
    raise missing(__name__, name)
