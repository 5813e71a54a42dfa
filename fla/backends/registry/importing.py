"""Importing modules of backends, also while another thread or an earlier frame imports them, and after a fork."""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType


def import_whole(name: str) -> ModuleType | None:
    """Import a module; None while it is still being executed: further up in this thread, or by another thread that in turn
    waits for what this one is importing (Python detects that and lets one of the two go on)."""
    try:
        module = importlib.import_module(name)
    except RuntimeError as error:
        if type(error).__name__ == '_DeadlockError':
            return None
        raise
    return None if getattr(module.__spec__, '_initializing', False) else module


def forget_unfinished_imports() -> None:
    """Drop modules whose import a thread that does not exist any more had begun, and their locks.

    The import system has no public way to say this; without it, importing such a module in the child waits for ever.
    """
    locks = getattr(importlib._bootstrap, '_module_locks', {})
    for name, reference in dict(locks).items():
        holder = reference()
        if holder is None or getattr(holder, 'owner', None) in (None, threading.get_ident()):
            continue
        locks.pop(name, None)
        # one that is still being looked for has a lock and no module yet
        if getattr(getattr(sys.modules.get(name), '__spec__', None), '_initializing', False):
            del sys.modules[name]
