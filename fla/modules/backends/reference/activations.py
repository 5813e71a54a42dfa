"""Plain PyTorch: activations."""

from __future__ import annotations


class ReferenceActivations:
    """Methods of `Reference` for activations."""
