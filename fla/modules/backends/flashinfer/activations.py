"""FlashInfer: activations."""

from __future__ import annotations


class FlashInferActivations:
    """Methods of `FlashInferBackend` for activations."""
