"""transformers' Qwen3-Next on a GPU with these operations, with flash-linear-attention's and with neither, in one run on one
card: prefill, decoding and a training step.

    python benchmarks/qwen3_next.py --json benchmarks/results/qwen3_next.json --fla folder/of/fla-core

Four layers (three of the gated delta rule, one of attention) at the widths of Qwen3-Next-80B-A3B, its ten active experts
being all there are, in bfloat16 with random weights, the same for all; attention is PyTorch's, without cuDNN's: that plans
each number of keys when it first sees it, and the first row would pay for all. transformers takes the two functions of
the gated delta rule from `fla` and nothing else; in the rows with modules, its short convolutions and gated norms are put
in their place too, by this benchmark.

`gpu_ms` is the median time on the GPU with what fits into its queue launched before it starts, `wall_ms` the least mean
time of calls in a row: the larger one counts where a model is run like this. Decoding goes on behind 1024 tokens, eager
with a cache that grows and as a CUDA graph with a static one. A training step is forward and backward, nothing recomputed,
no optimizer. Errors are relative RMS against transformers' own PyTorch path in float32 with the same weights: the logits of
the last 1024 tokens or of 16 steps, the loss, and all gradients as one vector.

FLA runs in a process of its own, because its import name is `fla` too: put the folder that its distribution was unpacked
into after --fla. The result is written after each row, so that a run may be stopped. --dry tries everything on a CPU, at
sizes that mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from _fla_process import FLA, fla_rows
from _gpu import gpu_ms, peak_mib, wall_ms
from _module_cases import relative
from _qwen3_next import (
    CACHE,
    SIZES,
    TINY,
    Model,
    build,
    check_found,
    fingerprint,
    in_float32,
    plain,
    serves,
    with_modules,
)
from _results import ResultFile, command, machine, said

OURS, TRANSFORMERS = 'this package', 'transformers'
# phase → batch and length of what is put in; for decoding of what it goes on from
CASES = {'prefill': [(1, 8192), (4, 2048)], 'decode': [(1, 1024), (32, 1024)], 'train': [(4, 2048)]}
DRY = {'prefill': [(1, 80), (2, 40)], 'decode': [(1, 8), (3, 8)], 'train': [(2, 40)]}
KEPT, STEPS = 1024, 16
# steps that a static cache has room for: more than are taken
ROOM = 512

Results = dict[str, list[torch.Tensor]]


class Prefill:
    """All tokens at once, into a cache; the logits of the last."""

    def __init__(self, model: Model, tokens: torch.Tensor) -> None:
        self.model, self.tokens = model, tokens

    def __call__(self) -> None:
        with torch.no_grad():
            self.model(self.tokens, use_cache=True, logits_to_keep=1)

    def results(self) -> Results:
        with torch.no_grad():
            return {'logits': [self.model(self.tokens, use_cache=True, logits_to_keep=KEPT).logits]}


class Decode:
    """One step, which adds to the cache; the cache grows."""

    def __init__(self, model: Model, tokens: torch.Tensor) -> None:
        self.model, self.tokens = model, tokens
        self.token = tokens[:, :1].clone()
        self.cache = self.new_cache()
        self.fill()

    def new_cache(self) -> Any:
        return transformers.DynamicCache(config=self.model.config)

    def fill(self) -> None:
        with torch.no_grad():
            self.model(self.tokens, use_cache=True, logits_to_keep=1, **{CACHE: self.cache})

    def __call__(self) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model(self.token, use_cache=True, **{CACHE: self.cache}).logits
        return logits

    def results(self) -> Results:
        """Of the first steps, whatever was decoded before."""
        self.cache = self.new_cache()
        self.fill()
        return {'logits': self.steps()}

    def steps(self) -> list[torch.Tensor]:
        found = []
        for i in range(STEPS):
            self.token.copy_(self.tokens[:, i % self.tokens.shape[1], None])
            found.append(self().clone())
        return found


class DecodeInGraph(Decode):
    """One step as a CUDA graph; on a CPU the same without one."""

    def __init__(self, model: Model, tokens: torch.Tensor) -> None:
        super().__init__(model, tokens)
        self.graph: torch.cuda.CUDAGraph | None = None
        if tokens.is_cuda:
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(3):
                    super().__call__()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.logits = super().__call__()
            self.graph = graph

    def new_cache(self) -> Any:
        return transformers.StaticCache(config=self.model.config, max_cache_len=self.tokens.shape[1] + ROOM)

    def __call__(self) -> torch.Tensor:
        if self.graph is None:
            return super().__call__()
        self.graph.replay()
        return self.logits

    def results(self) -> Results:
        self.cache.reset()
        self.fill()
        return {'logits in a graph': self.steps()}


class Train:
    """Forward and backward of the loss."""

    def __init__(self, model: Model, tokens: torch.Tensor) -> None:
        self.model, self.tokens = model, tokens

    def __call__(self) -> torch.Tensor:
        self.model.zero_grad()
        loss: torch.Tensor = self.model(self.tokens, labels=self.tokens, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def results(self) -> Results:
        loss = self()
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        self.model.zero_grad()
        return {'loss': [loss], 'gradients': gradients}


PHASES: dict[str, type[Prefill | Decode | Train]] = {'prefill': Prefill, 'decode': Decode, 'train': Train}


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Relative RMS over all of them as one."""
    if len(found) == 1:
        return relative(found[0], exact[0])
    off = sum(float((one.double() - other.double()).square().sum()) for one, other in zip(found, exact, strict=True))
    return float((off / sum(float(one.double().square().sum()) for one in exact)) ** 0.5)


def times(call: Callable[[], object], dry: bool) -> dict[str, float]:
    """In ms, of a call that has run before; a slow one is repeated less."""
    began = time.perf_counter()
    call()
    if dry:
        return {'wall_ms': (time.perf_counter() - began) * 1e3}
    torch.cuda.synchronize()
    once = (time.perf_counter() - began) * 1e3
    calls = 8 if once < 100 else 1
    wall = wall_ms(call, calls=calls, rounds=min(max(int(500 / once / calls), 2), 5))
    return {
        'gpu_ms': gpu_ms(call, repeats=min(max(int(500 / once), 3), 20), head_start_ms=min(2 * wall, 200.0)),
        'wall_ms': wall,
    }


def measured(model: Model, phase: str, tokens: torch.Tensor, exact: Results) -> dict[str, Any]:
    """Times, memory and errors of one phase as the model runs now."""
    dry = not tokens.is_cuda
    began = time.perf_counter()
    call = PHASES[phase](model, tokens)
    call()
    if not dry:
        torch.cuda.synchronize()
    row: dict[str, Any] = {'first_s': time.perf_counter() - began, **ran(call), **times(call, dry)}
    if not dry:
        row['peak_mib'] = peak_mib(call)
    row['errors'] = {name: error(found, exact[name]) for name, found in call.results().items()}
    if phase == 'decode':
        try:
            graphed = DecodeInGraph(model, tokens)
            row['errors'] |= {name: error(found, exact['logits']) for name, found in graphed.results().items()}
            row |= {f'graph_{name}': value for name, value in times(graphed, dry).items()}
        except Exception as refused:
            row['graph_refused'] = said(refused)
    return row


def ran(call: Callable[[], object]) -> dict[str, dict[str, int]]:
    """Which of our backends ran how often in one call; FLA has no such list."""
    try:
        from fla.backends import trace
    except ImportError:
        return {}
    with trace() as seen:
        call()
    return {'ran': {f'{function}: {backend}': count for (function, backend), count in sorted(seen.counters.items())}}


def reference(wide: Model, phase: str, tokens: torch.Tensor) -> Results:
    """What transformers' own PyTorch path computes in float32."""
    with plain(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return PHASES[phase](wide, tokens).results()


def rows(package: str, phases: list[str], dry: bool) -> Iterator[dict[str, Any]]:
    """Of this process: a package named `fla`, without and with modules, and transformers alone beside ours."""
    device = 'cpu' if dry else 'cuda'
    if not dry:
        torch.backends.cuda.enable_cudnn_sdp(False)
    model = build(TINY if dry else SIZES, device)
    weights = fingerprint(model)
    wide = in_float32(model)
    variants = [(package, False), (package, True), *([(TRANSFORMERS, False)] if package == OURS else [])]
    for phase in phases:
        for shape in (DRY if dry else CASES)[phase]:
            generator = torch.Generator(device).manual_seed(1)
            tokens = torch.randint(model.config.vocab_size, shape, generator=generator, device=device)
            exact = reference(wide, phase, tokens)
            for backend, modules in variants:
                row = {'phase': phase, 'shape': shape, 'backend': backend, 'modules': modules, 'weights': weights}
                try:
                    if backend != TRANSFORMERS:
                        check_found(model)
                    with plain() if backend == TRANSFORMERS else contextlib.nullcontext():
                        with with_modules(model) if modules else contextlib.nullcontext():
                            row['serves'] = serves(model)
                            row |= measured(model, phase, tokens, exact)
                except Exception as refused:
                    row['refused'] = said(refused)
                yield row
                model.zero_grad()
                gc.collect()
                if not dry:
                    torch.cuda.empty_cache()
            del exact


def of_fla(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of the process for FLA; where it ends early, one that says so."""
    again = [*(['--dry'] if options.dry else []), *(f'--only={phase}' for phase in options.only or ())]
    try:
        yield from fla_rows(__file__, again, options.fla)
    except SystemExit as ended:
        yield {'backend': FLA, 'refused': str(ended)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, help='write the results there, after each row')
    parser.add_argument('--fla', type=Path, help='folder of an unpacked fla-core: measure it as well')
    parser.add_argument('--only', choices=CASES, action='append', help='only this phase')
    parser.add_argument('--dry', action='store_true', help='try it on a CPU, at tiny sizes; its times mean nothing')
    parser.add_argument('--lines', action='store_true', help='a JSON object a line: how the process for FLA answers')
    options = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        print('This model needs a GPU: nothing is measured here.')
        return
    phases = options.only or list(CASES)
    if options.lines:
        for row in rows(FLA, phases, options.dry):
            print(json.dumps(row), flush=True)
        return
    about = machine(options.dry, fla=options.fla)
    about['versions']['transformers'] = transformers.__version__
    results = ResultFile(options.json, 'qwen3_next', **about, command=command('qwen3_next', options, 'only'))
    for row in rows(OURS, phases, options.dry):
        results.add(row)
    gc.collect()
    if not options.dry:
        torch.cuda.empty_cache()
    if options.fla:
        for row in of_fla(options):
            results.add(row)
    results.complete()


if __name__ == '__main__':
    main()
