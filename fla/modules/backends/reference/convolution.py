"""Plain PyTorch: short convolutions."""

from __future__ import annotations


class ReferenceConvolution:
    """Methods of `Reference` for short convolutions."""
