"""The policy file: `schema` says what may stand in it, `load` reads one, `names` compares it with what there is, `diff` says
what another one would change. pydantic and yaml are imported when a file is read, and never by `import fla`."""
