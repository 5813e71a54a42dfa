"""Writes text byte by byte with the layers' cache, and compares that with one call on the whole text."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.language_model.model import LanguageModel
from examples.language_model.train import Settings
from fla.layers import Cache
from fla.utils.testing import relative_rms

# Allowed relative RMS between the logits of prefill and decoding. float32 sums differ in their order; 16-bit numbers are
# rounded at other places throughout the model.
BOUND = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Generation:
    """A prompt and the bytes written after it.

    Attributes:
        ids: `[1, prompt + written]`.
        logits: `[written, 256]`, from which each byte was chosen; the first from prefill, the others from decoding.
        written: number of written bytes.
        decode_ms: median time of a byte in ms.
    """

    ids: Tensor
    logits: Tensor
    written: int
    decode_ms: float

    @property
    def text(self) -> str:
        """The written text."""
        return text_of(self.ids[0, -self.written :])


def text_of(ids: Tensor) -> str:
    """Decodes bytes as UTF-8. Invalid or cut-off characters are replaced."""
    return bytes(ids.tolist()).decode('utf-8', 'replace')


@torch.no_grad()
def prefill(model: LanguageModel, prompt: Tensor, settings: Settings) -> tuple[Tensor, Cache]:
    """Returns the logits `[1, T, 256]` of the prompt `[1, T]`, from one call, and the cache for decoding."""
    cache = Cache()
    with settings.autocast():
        return model(prompt, cache), cache


@torch.no_grad()
def generate(
    model: LanguageModel, prompt: Tensor, length: int, settings: Settings, temperature: float = 0.0, seed: int = 0
) -> Generation:
    """Writes `length` bytes after the prompt `[1, T]`, at temperature 0 the likeliest byte each time."""
    generator = torch.Generator().manual_seed(seed)
    logits, cache = prefill(model, prompt, settings)
    rows, written, times = [logits[0, -1].cpu()], [], []
    while True:
        if temperature:
            chosen = int(torch.multinomial((rows[-1] / temperature).softmax(-1), 1, generator=generator))
        else:
            chosen = int(rows[-1].argmax())
        written.append(chosen)
        if len(written) == length:
            break
        start = time.perf_counter()
        with settings.autocast():
            logits = model(torch.tensor([[chosen]], device=prompt.device), cache)
        rows.append(logits[0, -1].cpu())  # waits for the device
        times.append(time.perf_counter() - start)
    ids = torch.cat([prompt, torch.tensor([written], device=prompt.device)], 1)
    return Generation(ids, torch.stack(rows), length, 1e3 * sorted(times)[len(times) // 2])


@dataclass(frozen=True)
class Agreement:
    """How far decoding agrees with one call on the whole text.

    Attributes:
        difference: relative RMS between the logits.
        worst: largest difference of one logit, relative to the RMS of all logits.
        same: number of written bytes that are also the likeliest in the call on the whole text.
        margin: how much less likely the others are in that call: the largest such difference of two logits, relative to the
            RMS of all logits.
    """

    difference: float
    worst: float
    same: int
    margin: float


def compare(model: LanguageModel, generation: Generation, settings: Settings) -> Agreement:
    """Compares decoding with one call of the model on the prompt and all written bytes."""
    whole, _ = prefill(model, generation.ids[:, :-1], settings)
    expected = whole[0, -generation.written :].cpu()
    chosen = generation.ids[0, -generation.written :, None].cpu()
    scale = float(expected.square().mean().sqrt())
    behind = expected.max(-1).values - expected.gather(-1, chosen)[:, 0]
    return Agreement(
        relative_rms(expected, generation.logits),
        float((expected - generation.logits).abs().max()) / scale,
        int((behind == 0).sum()),
        float(behind.max()) / scale,
    )
