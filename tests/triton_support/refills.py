"""Checks whether a pipelined loop refills shared memory that an asynchronous product (wgmma, on Hopper) may still read.

For an operand of such a product Triton has one buffer more than copies in flight, because a product may run on while the
next step begins. Triton 3.6 and 3.9 omit that buffer if the same load is also used outside of products. The copy for a
later step then goes into the buffer that the product just started is reading. Results are wrong where the product is late,
which is rare: some hundred numbers of 100 million on an H200. Past the end of a loop such a copy writes zeros.

A form that the check does not support is an error, because a later Triton may write its loops in another way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NAME = r'%[\w$.-]+(?:#\d+)?'
_BUFFERS = re.compile(rf'({_NAME}) = ttg\.local_alloc (?:: \(\)|({_NAME})).*-> !ttg\.memdesc<(\d+)x')
_VIEW = re.compile(rf'({_NAME}) = ttg\.memdesc_\w+ ({_NAME})')
_COPY = re.compile(rf'ttg\.async_copy_global_to_local {_NAME}, ({_NAME})')
_PRODUCT = re.compile(rf'ttng\.warp_group_dot ({_NAME}), ({_NAME}),.* : (\S+)<.*> \* (\S+)<.*> -> ')
_WAIT = re.compile(rf'({_NAME})(:\d+)? = ttng\.warp_group_dot_wait (.*) {{pendings = (\d+)')
_LOOP = re.compile(r'( *).*\bscf\.(?:for|while)\b')
_SECOND_HALF = re.compile(r' *} do {')
_UNKNOWN = ('async_tma_copy_global_to_local', 'async_tma_gather', 'async_bulk_copy')
# More steps than a loop has buffers.
_STEPS = 12


class NotFollowed(Exception):
    """The TTGIR has a form that the check does not support."""


@dataclass
class _Region:
    """The body of a loop, or the code around all loops.

    copied, read: how often each buffer was copied to, and read by a product, before the loop.
    events: 'copy', 'product' and 'wait' in their order, without those of inner loops, each with its buffers and, for a wait,
    the number of products that it leaves running.
    """

    end: str
    copied: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    events: list[tuple[str, list[str], int]] = field(default_factory=list)

    def count(self, kind: str) -> dict[str, int]:
        of_kind = [buffer for event, buffers, _ in self.events if event == kind for buffer in dict.fromkeys(buffers)]
        return {buffer: of_kind.count(buffer) for buffer in of_kind}


def refilled_too_early(ttgir: str) -> list[str]:
    """Returns the names, in a kernel's TTGIR, of the buffers that a copy may write while a product reads them.

    Raises:
        NotFollowed: an operand of an asynchronous product, or the target of a copy, is not a buffer.
    """
    if 'isAsync = true' not in ttgir:
        return []
    sizes: dict[str, int] = {}
    views: dict[str, str] = {}
    regions = [_Region(end='')]
    found: list[str] = []
    for line in ttgir.splitlines():
        inner = regions[-1]
        if match := _LOOP.match(line):
            regions.append(_Region(match[1] + '}', inner.count('copy'), inner.count('product')))
        elif inner.end and line.startswith(inner.end) and not _SECOND_HALF.match(line):
            found += _simulate(regions.pop(), sizes)
        elif match := _BUFFERS.search(line):
            # A buffer filled from registers is not a ring.
            sizes[match[1]] = 0 if match[2] else int(match[3])
            views[match[1]] = match[1]
        elif match := _VIEW.search(line):
            views[match[1]] = _buffer(views, match[2], line)
        elif match := _COPY.search(line):
            inner.events.append(('copy', [_buffer(views, match[1], line)], 0))
        elif match := _PRODUCT.search(line):
            operands = zip(match.groups()[:2], match.groups()[2:], strict=True)
            read = [_buffer(views, name, line) for name, type_ in operands if type_ == '!ttg.memdesc']
            if 'isAsync = true' in line:
                inner.events.append(('product', read, 0))
            else:
                inner.events.append(('wait', [], 0))
        elif match := _WAIT.search(line):
            inner.events.append(('wait', [], int(match[4])))
            for i, name in enumerate(match[3].split(', ')):
                if name in views:
                    views[f'{match[1]}#{i}' if match[2] else match[1]] = views[name]
        elif 'warp_group_dot' in line or any(word in line for word in _UNKNOWN):
            raise NotFollowed(line.strip())
    return sorted(set(found))


def _buffer(views: dict[str, str], name: str, line: str) -> str:
    if name not in views:
        raise NotFollowed(f'{name}: {line.strip()}')
    return views[name]


def _simulate(loop: _Region, sizes: dict[str, int]) -> list[str]:
    """Simulates some steps of a loop whose products read the buffers in the order of the copies."""
    found: list[str] = []
    running: list[set[tuple[str, int]]] = []
    for step in range(_STEPS):
        for kind, buffers, pending in loop.events:
            if kind == 'wait':
                running = running[max(0, len(running) - pending) :]
                continue
            before = loop.copied if kind == 'copy' else loop.read
            slots = {(buffer, (step + before.get(buffer, 0)) % sizes[buffer]) for buffer in buffers if sizes[buffer]}
            if kind == 'product':
                running.append(slots)
            else:
                found += [buffer for buffer, _ in slots.intersection(set().union(*running))]
    return found
