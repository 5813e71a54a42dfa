"""Plain PyTorch: norms."""

from __future__ import annotations


class ReferenceNorms:
    """Methods of `Reference` for norms."""
