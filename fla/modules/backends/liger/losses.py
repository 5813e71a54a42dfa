"""Liger: cross entropies."""

from __future__ import annotations


class LigerLosses:
    """Methods of `LigerBackend` for cross entropies."""
