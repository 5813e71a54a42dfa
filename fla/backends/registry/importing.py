"""Imports modules of backends, also while another thread or an outer frame imports them, and after a fork."""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType


def import_whole(name: str) -> ModuleType | None:
    """Imports a module. Returns None while it is still being executed: further up in this thread, or by another thread that
    waits for an import of this one (Python detects the deadlock and lets one of the two continue)."""
    try:
        module = importlib.import_module(name)
    except RuntimeError as error:
        if type(error).__name__ == '_DeadlockError':
            return None
        raise
    return None if getattr(module.__spec__, '_initializing', False) else module


def forget_unfinished_imports() -> None:
    """Drops the modules that the parent's other threads were importing at a fork, and their locks.

    Without this, importing such a module in the child waits for ever. The import system has no public way to do it.
    """
    locks = getattr(importlib._bootstrap, '_module_locks', {})
    for name, reference in dict(locks).items():
        holder = reference()
        if holder is None or getattr(holder, 'owner', None) in (None, threading.get_ident()):
            continue
        locks.pop(name, None)
        # a module that is still being searched for has a lock and no module yet
        if getattr(getattr(sys.modules.get(name), '__spec__', None), '_initializing', False):
            del sys.modules[name]
