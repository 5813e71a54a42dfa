"""Training for a given time, or for a given number of steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.language_model.model import LanguageModel
from fla.utils import capability_of

WARMUP = 20  # steps


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        device: where to train.
        dtype: of matrix products; the parameters stay float32.
        seconds: wall time of the training, if steps is None.
        steps: number of steps, for a reproducible run.
        batch, length: sequences in a step, and bytes in a sequence.
        learning_rate: the highest learning rate.
    """

    device: torch.device
    dtype: torch.dtype
    seconds: float
    steps: int | None
    batch: int
    length: int
    learning_rate: float

    def autocast(self) -> torch.autocast:
        """Returns the autocast context for calls of the model."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


def default_dtype(device: torch.device) -> torch.dtype:
    """Returns bfloat16 on a GPU with bfloat16 products, else float32."""
    is_old = device.type == 'cuda' and (capability_of(device) or (9, 0)) < (8, 0)
    return torch.bfloat16 if device.type in ('cuda', 'xpu') and not is_old else torch.float32


def loss_of(model: LanguageModel, batch: Tensor, settings: Settings) -> Tensor:
    """Returns the loss of `batch` `[B, T + 1]` in nats per byte."""
    batch = batch.to(settings.device)
    with settings.autocast():
        logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(model: LanguageModel, windows: Tensor, settings: Settings) -> float:
    """Returns the bits per byte of windows `[count, T + 1]`, each predicted without the text before it."""
    model.eval()
    parts = [float(loss_of(model, part, settings)) * len(part) for part in windows.split(settings.batch)]
    model.train()
    return sum(parts) / len(windows) / math.log(2)


def optimizer_of(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Returns AdamW with weight decay for matrices, and without for norms and gates."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{'params': matrices, 'weight_decay': 0.1}, {'params': rest, 'weight_decay': 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def rate(step: int, done: float) -> float:
    """Returns the learning rate relative to the highest: a rise over `WARMUP` steps, then a cosine down to a tenth."""
    return min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * done))


def warm_up(model: LanguageModel, batch: Tensor, settings: Settings) -> str:
    """Compiles kernels and, on a CPU, sets the fastest number of threads, before the clock starts. Returns a report.

    The tensors are small, so that on many or busy cores threads wait for each other longer than they save."""

    def seconds() -> float:
        start = time.perf_counter()
        loss = loss_of(model, batch, settings)
        loss.backward()
        float(loss.detach())  # waits for the device
        return time.perf_counter() - start

    most, best, chosen = torch.get_num_threads(), float('inf'), 1
    if settings.device.type == 'cpu':
        torch.set_num_threads(1)
    text = f'before the clock starts: the first step took {seconds():.1f} s'
    if settings.device.type == 'cpu':
        for threads in sorted({min(most, n) for n in (1, 2, 4, 8)}):
            torch.set_num_threads(threads)
            taken = min(seconds() for _ in range(3))
            if taken > best:
                break
            best, chosen = taken, threads
        torch.set_num_threads(chosen)
        text += f'; the fastest of up to {most} threads is {chosen}: {1e3 * best:.0f} ms'
    model.zero_grad()
    return text


@dataclass(frozen=True)
class Step:
    """The state after a step: its number from 1, its loss in nats per byte, the fraction of training done, and the seconds
    since the start."""

    number: int
    loss: float
    done: float
    seconds: float


def train(model: LanguageModel, batches: Iterator[Tensor], settings: Settings) -> Iterator[Step]:
    """Trains until the time is up, but at least two steps. Yields each step."""
    optimizer = optimizer_of(model, settings.learning_rate)
    start, number, done = time.perf_counter(), 0, 0.0
    while done < 1 or number < 2:
        for group in optimizer.param_groups:
            group['lr'] = settings.learning_rate * rate(number, min(done, 1))
        optimizer.zero_grad()
        loss = loss_of(model, next(batches), settings)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = float(loss.detach())
        number += 1
        seconds = time.perf_counter() - start
        done = seconds / settings.seconds if settings.steps is None else number / settings.steps
        yield Step(number, value, min(done, 1.0), seconds)
