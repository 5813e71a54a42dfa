"""Backends of attention."""

from __future__ import annotations

from fla.backends import BackendRegistry
from fla.ops.attn.backends.reference import AttentionReference
from fla.ops.attn.backends.sdpa import SDPABackend

attn_registry = BackendRegistry('attn')
attn_registry.register('fla.ops.attn.backends.flash_attn:FlashAttention3Backend')
attn_registry.register('fla.ops.attn.backends.flash_attn:FlashAttention2Backend')
attn_registry.register('fla.ops.attn.backends.flashinfer:FlashInferBackend')
attn_registry.register('fla.ops.attn.backends.xformers:XFormersBackend')
attn_registry.register('fla.ops.attn.backends.tilelang:AttentionTileLang')
attn_registry.register('fla.ops.attn.backends.varlen:TorchVarlenBackend')
attn_registry.register(SDPABackend())
attn_registry.register(AttentionReference())
