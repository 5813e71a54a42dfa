"""The one lock. It guards short swaps of immutable objects and is never held while foreign code runs, so that it cannot
deadlock with the import system. Reads take no lock.

A fork takes it before and releases it after on both sides: the child never sees a half-finished change of another thread.
"""

from __future__ import annotations

import os
import threading

lock = threading.RLock()

if hasattr(os, 'register_at_fork'):
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
