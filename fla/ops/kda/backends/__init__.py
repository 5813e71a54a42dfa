"""Backends of Kimi delta attention."""

from __future__ import annotations

from fla.backends import BackendRegistry
from fla.ops.kda.backends.reference import KDAReference

kda_registry = BackendRegistry('kda')
kda_registry.register('fla.ops.kda.backends.flash_kda:FlashKDABackend')
kda_registry.register('fla.ops.kda.backends.tilelang:KDATileLang')
kda_registry.register(KDAReference())
