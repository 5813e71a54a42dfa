"""The text: the package's own source as bytes. Whole files are held out for validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import fla

HELD_OUT = 10  # every tenth file


@dataclass(frozen=True)
class Text:
    """Files and their bytes, joined by newlines, as an int64 tensor of 0 to 255."""

    files: tuple[Path, ...]
    ids: Tensor

    @classmethod
    def of(cls, files: Sequence[Path]) -> Text:
        joined = b'\n'.join(path.read_bytes() for path in files)
        return cls(tuple(files), torch.frombuffer(bytearray(joined), dtype=torch.uint8).long())


def source_text(root: Path | None = None) -> tuple[Text, Text]:
    """Returns the Python files under `root` (default: the installed package) for training and for validation."""
    files = sorted((root or Path(fla.__file__).parent).rglob('*.py'))
    held_out = files[HELD_OUT // 2 :: HELD_OUT]
    return Text.of([path for path in files if path not in held_out]), Text.of(held_out)


def batches(ids: Tensor, batch: int, length: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields `[batch, length + 1]` bytes from random places, without end."""
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(ids) - length, (batch, 1), generator=generator)
        yield ids[starts + offsets]


def windows(ids: Tensor, length: int, most: int) -> Tensor:
    """Returns at most `most` windows `[count, length + 1]` that do not overlap, spread evenly over the text."""
    count = min(most, len(ids) // (length + 1))
    starts = torch.arange(count) * (len(ids) // count)
    return ids[starts[:, None] + torch.arange(length + 1)]


def whole_lines(ids: Tensor, most: int) -> Tensor:
    """Returns the first whole lines that have at most `most` bytes together."""
    ends = (ids[:most] == ord('\n')).nonzero()[:, 0]
    return ids[: int(ends[-1]) + 1 if len(ends) else most]


def entropy(ids: Tensor) -> float:
    """Returns the bits per byte of the best model that sees no context: the entropy of the frequencies of bytes."""
    p = torch.bincount(ids, minlength=256).double() / len(ids)
    return float(-(p * p.clamp(min=1e-300).log2()).sum())
