"""Liger: norms."""

from __future__ import annotations


class LigerNorms:
    """Methods of `LigerBackend` for norms."""
