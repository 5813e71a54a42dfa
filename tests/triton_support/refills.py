"""Whether a pipelined loop refills shared memory that an asynchronous product (wgmma) may still read.

Triton gives an operand of such a product one buffer more than there are copies under way, since a product may go on while
the next step begins. Not so if the same load is also used outside of products: then (Triton 3.6 and 3.9) the copy for a
later step goes into the very buffer that the product just started reads. Results are wrong where the product comes late,
which is rare: some hundred numbers of 100 million on an H200. Past the end of a loop such a copy fills in zeros.
"""

import re
from dataclasses import dataclass, field

_BUFFER = re.compile(r'(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x')
_VIEW = re.compile(r'(%\S+) = ttg\.memdesc_\w+ (%[\w$.-]+)')
_COPY = re.compile(r'ttg\.async_copy_global_to_local %\S+, (%\S+)')
_PRODUCT = re.compile(r'ttng\.warp_group_dot (%[\w#$.-]+), (%[\w#$.-]+),.* isAsync = true')
_WAIT = re.compile(r'ttng\.warp_group_dot_wait .*pendings = (\d+)')
_LOOP = re.compile(r'( *).*\bscf\.(?:for|while)\b')
# more than the buffers of a loop
_STEPS = 12


@dataclass
class _Region:
    """A loop's body, or what is around all loops: its events in their order, those of loops within it left out."""

    end: str
    ahead: dict[str, int]
    events: list[tuple[str, list[str], int]] = field(default_factory=list)


def refilled_too_early(ttgir: str) -> list[str]:
    """The buffers, by their names in a kernel's TTGIR, that a copy may write while a product reads them."""
    sizes: dict[str, int] = {}
    views: dict[str, str] = {}
    regions = [_Region(end='', ahead={})]
    found: list[str] = []
    for line in ttgir.splitlines():
        inner = regions[-1]
        if match := _LOOP.match(line):
            copies = [buffer for kind, (buffer, *_), _ in inner.events if kind == 'copy']
            regions.append(_Region(match[1] + '}', {buffer: copies.count(buffer) for buffer in copies}))
        elif inner.end and line.startswith(inner.end):
            found += _played(regions.pop(), sizes)
        elif match := _BUFFER.search(line):
            sizes[match[1]] = int(match[2])
        elif match := _VIEW.search(line):
            views[match[1]] = views.get(match[2], match[2])
        elif match := _COPY.search(line):
            inner.events.append(('copy', [views.get(match[1], match[1])], 0))
        elif match := _PRODUCT.search(line):
            inner.events.append(('product', [views.get(x, x) for x in match.groups()], 0))
        elif match := _WAIT.search(line):
            inner.events.append(('wait', [''], int(match[1])))
    return sorted(set(found))


def _played(loop: _Region, sizes: dict[str, int]) -> list[str]:
    """Some steps of a loop, of which the products read what was copied first."""
    found: list[str] = []
    under_way: list[set[tuple[str, int]]] = []
    for step in range(_STEPS):
        for kind, buffers, pending in loop.events:
            if kind == 'wait':
                under_way = under_way[len(under_way) - pending :] if pending < len(under_way) else under_way
                continue
            ahead = loop.ahead if kind == 'copy' else {}
            slots = {(buffer, (step + ahead.get(buffer, 0)) % sizes[buffer]) for buffer in buffers if buffer in sizes}
            if kind == 'product':
                under_way.append(slots)
            else:
                found += [buffer for buffer, _ in slots.intersection(*[set().union(*under_way)])]
    return found
