"""`python -m examples.language_model`: train, write, compare, report."""

from __future__ import annotations

import argparse
import math
import sys
import time

import torch

from examples.language_model import console, data
from examples.language_model.generate import BOUND, compare, generate, prefill, text_of
from examples.language_model.model import Config, LanguageModel
from examples.language_model.report import DECODED, Calls, report
from examples.language_model.train import (
    Settings,
    bits_per_byte,
    default_dtype,
    loss_of,
    train,
    warm_up,
)
from fla.backends import DispatchError, default_dispatcher
from fla.utils import default_device

WRITTEN = 256  # bytes per sample
ENOUGH = 100  # steps after which the model must beat the frequencies of bytes


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m examples.language_model', description=sys.modules[__package__].__doc__)
    parser.add_argument('--seconds', type=float, default=60.0, help='training time; default: 60')
    parser.add_argument('--steps', type=int, help='train for this many steps instead, for a reproducible run')
    parser.add_argument('--device', help="such as cpu or cuda; default: the machine's accelerator, else cpu")
    parser.add_argument(
        '--dtype', choices=('float32', 'bfloat16'), help='dtype of matrix products; default: bfloat16 on a GPU'
    )
    parser.add_argument('--seed', type=int, default=0)
    chosen = parser.parse_args()
    if not 0 < chosen.seconds < math.inf:
        parser.error('--seconds must be above 0')
    if chosen.steps is not None and chosen.steps < 2:
        parser.error('--steps must be at least 2')
    try:
        chosen.device = torch.device(chosen.device or default_device())
        torch.empty(1, device=chosen.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f'--device: {str(error).splitlines()[0]}')
    return chosen


def settings_of(chosen: argparse.Namespace) -> Settings:
    device = chosen.device
    dtype = getattr(torch, chosen.dtype) if chosen.dtype else default_dtype(device)
    sizes = (4, 128, 8e-3) if device.type == 'cpu' else (32, 512, 2e-3)
    return Settings(device, dtype, chosen.seconds, chosen.steps, *sizes)


def training(model: LanguageModel, settings: Settings, seed: int, claims: console.Claims) -> torch.Tensor:
    """Trains with a progress bar and checks the losses. Returns the held-out text."""
    text, held_out = data.source_text()
    print(f'trained on: {len(text.files)} files, {len(text.ids):,} bytes; held out: {len(held_out.files)} files, ', end='')
    print(f'{len(held_out.ids):,} bytes')
    batches = data.batches(text.ids, settings.batch, settings.length, torch.Generator().manual_seed(seed))
    print(warm_up(model, next(batches), settings), flush=True)
    windows = data.windows(held_out.ids, settings.length, 16384 // settings.length)
    before = bits_per_byte(model, windows, settings)
    losses: list[float] = []
    with console.progress(settings.batch * settings.length) as bar:
        for step in train(model, batches, settings):
            losses.append(step.loss)
            bar.show(step, console.smooth(losses))
    start, end = losses[0], console.smooth(losses)
    tokens = len(losses) * settings.batch * settings.length
    print(f'{len(losses)} steps, {tokens / len(text.ids):.2f} times the text, {tokens / step.seconds:,.0f} bytes/s')
    claims.check(f'the loss falls: {start:.2f} -> {end:.2f} nats per byte', end < start)
    after = bits_per_byte(model, windows, settings)
    bound, meaning = data.entropy(held_out.ids), 'the best without any context'
    if len(losses) < ENOUGH:
        bound, meaning = before, f'before training (the bound below {ENOUGH} steps)'
    claims.check(f'held-out text: {before:.2f} -> {after:.2f} bits per byte; {bound:.2f} is {meaning}', after < bound)
    return held_out.ids


def writing(model: LanguageModel, prompt: torch.Tensor, settings: Settings, claims: console.Claims) -> None:
    """Writes text by decoding, prints it, and checks decoding against whole sequences."""
    bound = BOUND[settings.dtype]
    for temperature in (0.8, 0.0):
        made = generate(model, prompt, WRITTEN, settings, temperature)
        if temperature:
            print(console.quoted(text_of(prompt[0]), ':'))
            print(console.quoted(made.text, '|'))
            print(f'prompt (:) {prompt.shape[1]} bytes, written (|) {WRITTEN} bytes, {made.decode_ms:.2f} ms each (median)')
        found = compare(model, made, settings)
        what = f'sampled at {temperature}' if temperature else 'greedy'
        claims.check(
            f'{what}: logits of prefill and of {WRITTEN - 1} decode steps differ by {found.difference:.1e} '
            f'relative RMS, below {bound:g}',
            found.difference < bound,
        )
    text = f'greedy: prefill chooses the same byte {found.same} times of {WRITTEN}'
    if found.same < WRITTEN:
        text += f'; elsewhere the two logits differ by {found.margin:.1e} of the RMS of logits, below {2 * bound:g}'
    claims.check(text, found.margin < 2 * bound)


def tracing(model: LanguageModel, text: torch.Tensor, prompt: torch.Tensor, settings: Settings) -> dict[str, Calls]:
    """Traces one training step of a few sequences, one prefill, and decoding."""
    batch = next(data.batches(text, 4, settings.length, torch.Generator().manual_seed(0)))
    model.train()
    with Calls() as training_calls:
        loss_of(model, batch, settings).backward()
    model.zero_grad()
    model.eval()
    with Calls() as prefill_calls:
        _, cache = prefill(model, prompt, settings)
    with Calls() as decode_calls, torch.no_grad(), settings.autocast():
        for place in range(DECODED):
            model(prompt[:, place : place + 1], cache)
    return {'training': training_calls, 'prefill': prefill_calls, 'decode': decode_calls}


def main() -> int:
    started = time.perf_counter()
    # The model may write characters that the terminal cannot show.
    sys.stdout.reconfigure(errors='replace')
    chosen = options()
    if default_dispatcher().baseline:
        print('FLA_DISABLE_BACKEND_DISPATCH is set: nothing is dispatched. Unset it to run this example.')
        return 1
    settings, claims = settings_of(chosen), console.Claims()
    torch.manual_seed(chosen.seed)
    model = LanguageModel(Config.on(settings.device)).to(settings.device)
    print('fla-dispatch: a small hybrid language model learns the source text of this package, byte by byte.')
    name = torch.cuda.get_device_name(settings.device) if settings.device.type == 'cuda' else str(settings.device)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f'device: {name}, {str(settings.dtype).removeprefix("torch.")}, torch {torch.__version__}, seed {chosen.seed}')
    print(f'model: {len(model.blocks)} blocks ({", ".join(model.config.mixers)}), {size:.2f} M parameters')
    console.section('1. Training')
    held_out = training(model, settings, chosen.seed, claims)
    console.section('2. Writing by recurrent decoding')
    model.eval()
    prompt = data.whole_lines(held_out, 400)[None].to(settings.device)
    writing(model, prompt, settings, claims)
    console.section('3. Which backend served each dispatched function')
    report(tracing(model, held_out, prompt, settings), settings, claims)
    print()
    for text in claims.false:
        print(f'FALSE: {text}')
    print(f'{"Every claim holds" if not claims.false else "Not every claim holds"}. {time.perf_counter() - started:.0f} s.')
    return 1 if claims.false else 0


if __name__ == '__main__':
    try:
        sys.exit(main())
    except DispatchError as error:
        sys.exit(f'no backend served a call:\n{error}')
    except KeyboardInterrupt:
        sys.exit('stopped')
