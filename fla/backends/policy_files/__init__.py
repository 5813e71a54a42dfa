"""The policy file: `text` reads YAML and knows the lines, `schema` says what may stand in a file, `load` makes a policy of
one, `names` compares it with what there is, `trial` says whom it would leave without a backend, `diff` what it would change.
pydantic and yaml are imported when a file is read, and never by `import fla`."""
