"""Liger: the rotary embedding."""

from __future__ import annotations


class LigerRotary:
    """Methods of `LigerBackend` for the rotary embedding."""
