"""Backends: their base class, their declared facts, and whether they are available."""
