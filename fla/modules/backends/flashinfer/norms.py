"""FlashInfer: norms."""

from __future__ import annotations


class FlashInferNorms:
    """Methods of `FlashInferBackend` for norms."""
