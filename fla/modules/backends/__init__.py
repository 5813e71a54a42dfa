"""Backends of the modules."""

from __future__ import annotations

from fla.backends import BackendRegistry
from fla.modules.backends.reference import ModulesReference

modules_registry = BackendRegistry('modules')
modules_registry.register('fla.modules.backends.liger:LigerBackend')
modules_registry.register('fla.modules.backends.flashinfer:FlashInferBackend')
modules_registry.register('fla.modules.backends.flag_gems:FlagGemsBackend')
modules_registry.register('fla.modules.backends.causal_conv1d:CausalConv1dBackend')
modules_registry.register(ModulesReference())
