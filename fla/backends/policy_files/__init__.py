"""The policy file: reading (`load`), checking (`names`, `trial`), following changes (`watch`), comparing (`diff`).
pydantic, ruamel.yaml and watchfiles are imported when a file is read or watched, never by `import fla`."""
