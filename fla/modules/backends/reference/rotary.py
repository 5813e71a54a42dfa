"""Plain PyTorch: the rotary embedding."""

from __future__ import annotations


class ReferenceRotary:
    """Methods of `Reference` for the rotary embedding."""
