"""Terminal output: sections, checked claims, progress."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from examples.language_model.train import Step

BAR = 20  # columns, so that a line of progress fits into 80


def section(title: str) -> None:
    print(f'\n{title}\n{"-" * len(title)}', flush=True)


class Claims:
    """Prints claims as they are checked, and collects the false ones."""

    def __init__(self) -> None:
        self.false: list[str] = []

    def check(self, text: str, holds: bool) -> None:
        print(f'{"ok   " if holds else "FALSE"} {text}', flush=True)
        if not holds:
            self.false.append(text)


def minutes(seconds: float) -> str:
    whole = round(seconds)
    return f'{whole // 60}:{whole % 60:02}'


class PlainProgress:
    """Progress as one line, rewritten in place in a terminal; elsewhere as a new line every few seconds.

    Args:
        tokens: bytes of one step.
    """

    every = 5.0  # seconds

    def __init__(self, tokens: int) -> None:
        self.tokens, self.in_place, self.printed = tokens, sys.stdout.isatty(), float('-inf')

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.in_place:
            print()

    def show(self, step: Step, loss: float) -> None:
        """Shows a step and a loss. Called after each step."""
        now = time.perf_counter()
        if now - self.printed < (0.2 if self.in_place else self.every) and step.done < 1:
            return
        self.printed = now
        full = round(BAR * step.done)
        speed = self.tokens * step.number / step.seconds
        left = step.seconds * (1 / step.done - 1)
        line = (
            f'[{"#" * full}{"." * (BAR - full)}] {step.done:4.0%}  step {step.number:<5} loss {loss:.2f}  '
            f'{speed:,.0f} bytes/s  {minutes(left)} left'
        )
        print(f'\r{line}  ' if self.in_place else line, end='' if self.in_place else '\n', flush=True)


class RichProgress(PlainProgress):
    """Progress as a bar of `rich`."""

    def __init__(self, tokens: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(tokens)
        self.bar = Progress(
            BarColumn(BAR),
            TextColumn('{task.percentage:3.0f}%  {task.description}'),
            TimeRemainingColumn(compact=True),
            TextColumn('left'),
        )
        self.task = self.bar.add_task('', total=1.0)

    def __enter__(self) -> RichProgress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def show(self, step: Step, loss: float) -> None:
        speed = self.tokens * step.number / step.seconds
        text = f'step {step.number:<5} loss {loss:.2f}  {speed:,.0f} bytes/s'
        self.bar.update(self.task, completed=step.done, description=text)


def progress(tokens: int) -> PlainProgress:
    """Returns a `rich` bar in a terminal where `rich` is installed, else plain lines."""
    if sys.stdout.isatty():
        try:
            return RichProgress(tokens)
        except ImportError:
            pass
    return PlainProgress(tokens)


def smooth(losses: list[float]) -> float:
    """Returns the mean of the last quarter of the losses, at most 20."""
    last = losses[-min(20, max(1, len(losses) // 4)) :]
    return sum(last) / len(last)


def printable(text: str) -> str:
    """Replaces control characters, which a model that has learnt little writes, by question marks."""
    return ''.join(c if c.isprintable() or c == '\n' else '?' for c in text)


def quoted(text: str, mark: str) -> str:
    """Returns the text with a mark before each line."""
    return '\n'.join(f'  {mark} {line}'.rstrip() for line in printable(text).splitlines())
