"""Backends of the modules. There are none yet: each function's plain PyTorch body serves every call."""

from __future__ import annotations

from fla.ops.backends import BackendRegistry

modules_registry = BackendRegistry('modules')
