"""Plain PyTorch: cross entropies."""

from __future__ import annotations


class ReferenceLosses:
    """Methods of `Reference` for cross entropies."""
