"""What a result says of the machine and the command, and what not."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence


def cores() -> int:
    """How many this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def repeatable(arguments: Sequence[str]) -> Iterator[str]:
    """Those of a command line without `--json` and the place of the file, which is this machine's business."""
    skipped = False
    for word in arguments:
        if not skipped and not word.startswith('--json'):
            yield word
        skipped = word == '--json'
