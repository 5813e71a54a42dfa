"""Backends of the gated delta rule."""

from __future__ import annotations

from fla.backends import BackendRegistry
from fla.ops.gated_delta_rule.backends.reference import GatedDeltaRuleReference

gated_delta_rule_registry = BackendRegistry('gated_delta_rule')
gated_delta_rule_registry.register('fla.ops.gated_delta_rule.backends.flash_qla:FlashQLABackend')
gated_delta_rule_registry.register('fla.ops.gated_delta_rule.backends.tilelang:GatedDeltaRuleTileLang')
gated_delta_rule_registry.register(GatedDeltaRuleReference())
