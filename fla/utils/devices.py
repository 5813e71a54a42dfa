"""Facts about devices, read when needed and never at import.

A *platform* is the hardware family a kernel is written for. `cuda` never includes ROCm, although a ROCm tensor says
`is_cuda` and an MI300 reports capability (9, 4), which would pass for a Hopper successor.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

PLATFORMS = ('cpu', 'cuda', 'rocm', 'xpu', 'npu', 'mps', 'meta')


@dataclass(frozen=True)
class Device:
    """The facts about a device that the selection of a backend reads. `capability` is set on `cuda` and `rocm` only."""

    platform: str
    index: int = 0
    name: str = ''
    capability: tuple[int, int] | None = None

    @property
    def kind(self) -> tuple[str, str, tuple[int, int] | None]:
        """Platform, name and capability: equal for interchangeable devices."""
        return self.platform, self.name, self.capability


# Devices that explain(platform=...) can describe on a machine that lacks them.
KNOWN_DEVICES = {
    'cpu': Device('cpu', name='CPU'),
    'meta': Device('meta', name='meta'),
    'a100': Device('cuda', name='NVIDIA A100', capability=(8, 0)),
    'a10': Device('cuda', name='NVIDIA A10', capability=(8, 6)),
    'l4': Device('cuda', name='NVIDIA L4', capability=(8, 9)),
    'rtx4090': Device('cuda', name='NVIDIA GeForce RTX 4090', capability=(8, 9)),
    'h100': Device('cuda', name='NVIDIA H100', capability=(9, 0)),
    'h200': Device('cuda', name='NVIDIA H200', capability=(9, 0)),
    'b200': Device('cuda', name='NVIDIA B200', capability=(10, 0)),
    'rtx5090': Device('cuda', name='NVIDIA GeForce RTX 5090', capability=(12, 0)),
    'mi250': Device('rocm', name='AMD Instinct MI250', capability=(9, 0)),
    'mi300x': Device('rocm', name='AMD Instinct MI300X', capability=(9, 4)),
    'xpu': Device('xpu', name='Intel GPU'),
    'npu': Device('npu', name='Ascend NPU'),
    'mps': Device('mps', name='Apple GPU'),
}


def is_rocm_build() -> bool:
    """Whether this torch was built for ROCm. Reads the build, not the driver."""
    return torch.version.hip is not None


def platform_of_type(device_type: str) -> str:
    """The platform behind a `torch.device.type`: `cuda` is `rocm` on a ROCm build; unknown types name themselves."""
    if device_type == 'cuda' and is_rocm_build():
        return 'rocm'
    return 'npu' if device_type in ('npu', 'privateuseone') else device_type


def platform_of(tensor: torch.Tensor) -> str:
    """The platform of a tensor; a FakeTensor counts as the device it pretends to be on."""
    return platform_of_type(tensor.device.type)


def devices_of(platform: str) -> tuple[Device, ...]:
    """Every visible device of a platform. Asks a driver for `cuda` and `rocm` only."""
    if platform not in ('cuda', 'rocm'):
        return (Device(platform, name=platform),)
    if (platform == 'rocm') != is_rocm_build() or not torch.cuda.is_available():
        return ()
    return tuple(_cuda_device(platform, index) for index in range(torch.cuda.device_count()))


@functools.cache
def _cuda_device(platform: str, index: int) -> Device:
    return Device(
        platform,
        index,
        torch.cuda.get_device_name(index),
        tuple(torch.cuda.get_device_capability(index)),  # type: ignore[arg-type]
    )


def default_device() -> str:
    """The `torch.device` type of the machine's accelerator, else `'cpu'`. Asks the driver."""
    for name in ('cuda', 'xpu', 'npu', 'mps'):
        backend = getattr(torch, name, None)
        if backend is not None and hasattr(backend, 'is_available') and backend.is_available():
            return name
    return 'cpu'


def capability_of(device: torch.device | int | str | None = None) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU, None elsewhere. An index is a CUDA device's; None is the current one."""
    if is_rocm_build():
        return None
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != 'cuda':
            return None
        device = device.index
    if not torch.cuda.is_available():
        return None
    return _cuda_device('cuda', torch.cuda.current_device() if device is None else device).capability


@functools.cache
def multiprocessors_of(device: torch.device) -> int:
    """The number of multiprocessors of a device, which must have an index; 1 if it is unknown."""
    if device.type == 'cuda':
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == 'xpu':
        return torch.xpu.get_device_properties(device).gpu_subslice_count
    return 1


def is_nvidia(device: torch.device | int | str | None = None) -> bool:
    """Whether `device` (default: the current one) is an NVIDIA GPU."""
    return capability_of(device) is not None


def is_nvidia_hopper(device: torch.device | int | str | None = None) -> bool:
    """Capability 9.x: H100, H200, GH200."""
    return (capability_of(device) or (0, 0))[0] == 9


def is_nvidia_blackwell(device: torch.device | int | str | None = None) -> bool:
    """Capability 10.x to 12.x, data centre and consumer."""
    return (capability_of(device) or (0, 0))[0] in (10, 11, 12)


def is_nvidia_sm100(device: torch.device | int | str | None = None) -> bool:
    """Capability 10.x: B100, B200, GB200."""
    return (capability_of(device) or (0, 0))[0] == 10


def is_nvidia_sm120(device: torch.device | int | str | None = None) -> bool:
    """Capability 12.x: RTX 50."""
    return (capability_of(device) or (0, 0))[0] == 12


def is_amd(device: torch.device | int | str | None = None) -> bool:
    """Whether this machine's CUDA-like device is an AMD GPU."""
    return is_rocm_build() and torch.cuda.is_available()


def is_intel(device: torch.device | int | str | None = None) -> bool:
    """Whether this machine has an Intel GPU."""
    return torch.xpu.is_available()


def is_intel_alchemist(device: torch.device | int | str | None = None) -> bool:
    """Whether the Intel GPU is an Arc A-series, which has no 64-bit floats."""
    return is_intel() and '[0x56' in str(torch.xpu.get_device_properties(0))


def is_npu(device: torch.device | int | str | None = None) -> bool:
    """Whether this machine has an Ascend NPU."""
    return hasattr(torch, 'npu') and bool(torch.npu.is_available())


# KiB of shared memory that a thread block may use, by the name of an architecture. Capabilities 8.6, 8.9 and 12.x have as
# much as `ada`, 8.0 and 8.7 as `ampere`, 9.x and 10.x as `hopper`.
_SHARED_MEMORY = {'ada': 99, 'ampere': 163, 'hopper': 227, 'blackwell': 227}


def shared_memory_of(capability: tuple[int, int] | None) -> int:
    """Bytes of shared memory that a thread block may use at a compute capability; the least of all for None."""
    large = capability is not None and capability[0] in (9, 10)
    name = 'hopper' if large else 'ampere' if capability in ((8, 0), (8, 7)) else 'ada'
    return _SHARED_MEMORY[name] * 1024


def check_shared_mem(arch: str = 'ampere', device: int | None = None) -> bool:
    """Whether a thread block of a CUDA device may use as much shared memory as one of `arch`. False without a CUDA device.

    Args:
        arch: `'ada'`, `'ampere'`, `'hopper'` or `'blackwell'`.
        device: index of the CUDA device. Default: the current one.

    Raises:
        ValueError: for another `arch`.
    """
    if arch not in _SHARED_MEMORY:
        raise ValueError(f'arch must be one of {sorted(_SHARED_MEMORY)}, got {arch!r}')
    if is_rocm_build() or not torch.cuda.is_available():
        return False
    index = torch.cuda.current_device() if device is None else device
    limit = getattr(torch.cuda.get_device_properties(index), 'shared_memory_per_block_optin', 0)
    return bool(limit >= _SHARED_MEMORY[arch] * 1024)
