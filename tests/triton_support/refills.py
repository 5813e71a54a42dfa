"""Whether a pipelined loop refills shared memory that an asynchronous product may still read: of wgmma, which is Hopper's.

For an operand of such a product Triton keeps one buffer more than there are copies under way, since a product may go on
while the next step begins. Not so if the same load is also used outside of products: then (Triton 3.6 and 3.9) the copy for
a later step goes into the very buffer that the product just started reads. Results are wrong where the product comes late,
which is rare: some hundred numbers of 100 million on an H200. Past the end of a loop such a copy fills in zeros.

What cannot be followed is an error: a later Triton may write its loops in another way.
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
# more than the buffers of a loop
_STEPS = 12


class NotFollowed(Exception):
    """A form that the check does not know."""


@dataclass
class _Region:
    """A loop's body, or what is around all loops.

    ahead, behind: how often each buffer was copied to, and read by a product, before the loop.
    events: 'copy', 'product' and 'wait' in their order, those of loops within it left out: with buffers, and for a wait how
    many products it leaves under way.
    """

    end: str
    ahead: dict[str, int] = field(default_factory=dict)
    behind: dict[str, int] = field(default_factory=dict)
    events: list[tuple[str, list[str], int]] = field(default_factory=list)

    def count(self, kind: str) -> dict[str, int]:
        of_kind = [buffer for event, buffers, _ in self.events if event == kind for buffer in dict.fromkeys(buffers)]
        return {buffer: of_kind.count(buffer) for buffer in of_kind}


def refilled_too_early(ttgir: str) -> list[str]:
    """The buffers, by their names in a kernel's TTGIR, that a copy may write while a product reads them.

    Raises:
        NotFollowed: for asynchronous products whose operands, and copies whose targets, are no known buffers.
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
            found += _played(regions.pop(), sizes)
        elif match := _BUFFERS.search(line):
            # what is made of registers is no ring of buffers
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


def _played(loop: _Region, sizes: dict[str, int]) -> list[str]:
    """Some steps of a loop, in which products read what was copied first."""
    found: list[str] = []
    under_way: list[set[tuple[str, int]]] = []
    for step in range(_STEPS):
        for kind, buffers, pending in loop.events:
            if kind == 'wait':
                under_way = under_way[max(0, len(under_way) - pending) :]
                continue
            before = loop.ahead if kind == 'copy' else loop.behind
            slots = {(buffer, (step + before.get(buffer, 0)) % sizes[buffer]) for buffer in buffers if sizes[buffer]}
            if kind == 'product':
                under_way.append(slots)
            else:
                found += [buffer for buffer, _ in slots.intersection(set().union(*under_way))]
    return found
