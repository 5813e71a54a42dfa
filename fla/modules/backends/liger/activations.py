"""Liger: activations."""

from __future__ import annotations


class LigerActivations:
    """Methods of `LigerBackend` for activations."""
