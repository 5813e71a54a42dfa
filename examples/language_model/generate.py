"""Writing text byte by byte with the layers' cache, and comparing that with whole sequences at once."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.language_model.model import LanguageModel
from examples.language_model.train import Settings
from fla.layers import Cache
from fla.utils.testing import relative_rms

# Relative RMS of all logits that prefill and decode may differ by: float32 sums in another order; 16-bit numbers rounded at
# other places, all through the model.
BOUND = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Generation:
    """A prompt and what was written after it.

    Attributes:
        ids: `[1, prompt + written]`.
        logits: `[written, 256]`, what each written byte was chosen from; the first is prefill's last, the rest of decoding.
        written: bytes.
        decode_ms: median per byte.
    """

    ids: Tensor
    logits: Tensor
    written: int
    decode_ms: float

    @property
    def text(self) -> str:
        """What was written."""
        return text_of(self.ids[0, -self.written :])


def text_of(ids: Tensor) -> str:
    """Of bytes, of which the last character may be cut off and others wrong."""
    return bytes(ids.tolist()).decode('utf-8', 'replace')


@torch.no_grad()
def prefill(model: LanguageModel, prompt: Tensor, settings: Settings) -> tuple[Tensor, Cache]:
    """Logits `[1, T, 256]` of the prompt `[1, T]` in one call, and the cache to go on from."""
    cache = Cache()
    with settings.autocast():
        return model(prompt, cache), cache


@torch.no_grad()
def generate(
    model: LanguageModel, prompt: Tensor, length: int, settings: Settings, temperature: float = 0.0, seed: int = 0
) -> Generation:
    """Write `length` bytes after the prompt `[1, T]`; at temperature 0 the likeliest each time."""
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
    """Of decoding with one call on the whole text.

    Attributes:
        difference: relative RMS of the logits.
        worst: largest difference of a logit, by the RMS of all.
        same: how many written bytes are the likeliest of the whole call too.
        margin: where one is not, by how much less likely it is there: the largest such difference of two logits, by the RMS
            of all.
    """

    difference: float
    worst: float
    same: int
    margin: float


def compare(model: LanguageModel, generation: Generation, settings: Settings) -> Agreement:
    """Run the model on the prompt with all that was written, at once."""
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
