"""Measured choice: `measure` times backends (`measuring`), rules follow from the times (`choices`), a file holds both
(`measurements`). Calls never time anything."""
