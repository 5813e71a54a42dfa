"""FlashInfer: the rotary embedding."""

from __future__ import annotations


class FlashInferRotary:
    """Methods of `FlashInferBackend` for the rotary embedding."""
