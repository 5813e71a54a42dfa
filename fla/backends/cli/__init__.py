"""The command line, `python -m fla.backends COMMAND`, for operators and authors. Nothing imports it."""
