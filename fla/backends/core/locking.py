"""The one lock. It guards short swaps of immutable objects and never foreign code, so that holding it cannot deadlock
with the import system; reads take no lock.

Before a fork it is taken and after it released on both sides: the child gets a registry that no other thread was half way
through changing.
"""

from __future__ import annotations

import os
import threading

lock = threading.RLock()

if hasattr(os, 'register_at_fork'):
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
