"""The policy file: reading (`load`), checking (`names`, `trial`), following changes (`watch`), comparing (`diff`).
pydantic, ruamel.yaml and watchfiles are imported when a file is read or watched, never by `import fla`."""

from fla.backends.policy.version import PolicyVersion
from fla.backends.policy_files.diff import PolicyChange, diff_policy
from fla.backends.policy_files.load import PolicyFileError, read_policy, unload_policy
from fla.backends.policy_files.watch import PolicyEvent, PolicyWatcher, WatchError, watch_policy

__all__ = [
    'PolicyChange',
    'PolicyEvent',
    'PolicyFileError',
    'PolicyVersion',
    'PolicyWatcher',
    'WatchError',
    'diff_policy',
    'read_policy',
    'unload_policy',
    'watch_policy',
]
