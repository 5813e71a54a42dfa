"""Backends of attention."""

from __future__ import annotations

from fla.ops.attn.backends.sdpa import SDPABackend
from fla.ops.backends import BackendRegistry

attn_registry = BackendRegistry('attn')
attn_registry.register(SDPABackend())
