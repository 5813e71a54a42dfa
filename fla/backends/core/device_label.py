"""Names the processor and its driver: a measurement holds for these alone."""

from __future__ import annotations

import importlib.metadata
import platform as host
import re
import subprocess
import sys
from pathlib import Path

import torch

from fla.utils.devices import devices_of

_DRIVER_FILES = {'cuda': '/proc/driver/nvidia/version', 'rocm': '/sys/module/amdgpu/version'}


def device_label(platform: str, index: int | None = None) -> str:
    """Returns platform and name: 'cuda: NVIDIA H100 80GB HBM3', 'cpu: AMD EPYC 7B13'.

    Args:
        index: which of several devices. Default: the current one.
    """
    if platform == 'cpu':
        return f'cpu: {_processor()}'
    found = devices_of(platform)
    if not found:
        return f'no {platform} device'
    if index is None and len(found) > 1:
        index = torch.cuda.current_device()  # only CUDA-like platforms list several
    return f'{platform}: {found[index if index is not None and index < len(found) else 0].name}'


def version_of(distribution: str) -> str | None:
    """Returns the version of a distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def drivers(platform: str) -> dict[str, str | None]:
    """Returns the versions of the runtime that torch was built with and of the driver; empty for a CPU, None if unknown."""
    if platform not in _DRIVER_FILES:
        return {}
    # lint: allow direct-device-check because this reports the version and decides nothing
    name, version = ('CUDA', torch.version.cuda) if platform == 'cuda' else ('HIP', torch.version.hip)
    found = re.search(r'\d+\.\d+(\.\d+)*', _text(_DRIVER_FILES[platform]))
    return {name: version, 'driver': found.group() if found else None}


def _processor() -> str:
    """Returns the model of the CPU: two models of one architecture differ by more than two kernels do."""
    if sys.platform == 'darwin':
        ask = subprocess.run(['sysctl', '-n', 'machdep.cpu.brand_string'], capture_output=True, text=True, check=False)
        return ask.stdout.strip() or host.machine()
    # x86 has 'model name'; some ARM processors have numbers only
    words = dict(re.findall(r'^([\w ]+?)\s*:\s*(.+?)\s*$', _text('/proc/cpuinfo'), re.MULTILINE))
    parts = [words[name] for name in ('CPU implementer', 'CPU part') if name in words]
    return words.get('model name') or ' '.join([host.processor() or host.machine(), *parts])


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding='utf-8', errors='replace')
    except OSError:
        return ''
