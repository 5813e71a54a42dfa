"""Choosing by measured time."""
