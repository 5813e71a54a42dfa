"""Measures transformers' Qwen3-Next on a GPU with this package, with flash-linear-attention and with neither, in one run on
one card: prefill, decoding and a training step.

    python benchmarks/qwen3_next.py --json benchmarks/results/qwen3_next.json --fla folder/of/fla-core

The model has four layers (three of the gated delta rule, one of attention) at the widths of Qwen3-Next-80B-A3B, with ten
experts, all active, in bfloat16. Its random weights are the same in all rows. Attention is PyTorch's without cuDNN: cuDNN
plans each new number of keys, which the first row would pay for. transformers takes only the two functions of the gated
delta rule from `fla`. In rows with `modules`, this benchmark also replaces its short convolutions and gated norms.

The JSON holds a row for each phase, shape, backend and choice of modules. `gpu_ms` is the median GPU time of a call whose
kernels were launched beforehand, as far as they fit into the GPU's queue. `wall_ms` is the mean time of consecutive calls,
the minimum over rounds. The larger of the two is what a user of the model sees. Decoding continues after 1024 tokens,
eagerly with a growing cache and as a CUDA graph (`graph_*`) with a static one. A training step is forward and backward,
without recomputation or optimizer. `errors` are relative RMS errors against transformers' own PyTorch code in float32 with
the same weights, of the logits of the last 1024 tokens or of 16 steps, of the loss, and of all gradients as one vector.

FLA runs in a separate process, because both packages are imported as `fla`: --fla takes the folder in which its
distribution was unpacked. The file is written after each row, so that a run may be interrupted. --quick runs everything on a
CPU, with a tiny model.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from _fla_process import FLA, fla_rows
from _gpu import gpu_ms, peak_mib, wall_ms
from _qwen3_next import (
    CACHE,
    SIZES,
    TINY,
    Model,
    build,
    check_found,
    fingerprint,
    in_float32,
    serves,
    transformers_alone,
    with_modules,
)
from _results import ResultFile, command, error_line, has_gpu, machine, parser, print_lines, relative_rms

OURS, TRANSFORMERS = 'this package', 'transformers'
# phase → batch and length of the tokens; of the prompt for decoding
CASES = {'prefill': [(1, 8192), (4, 2048)], 'decode': [(1, 1024), (32, 1024)], 'train': [(4, 2048)]}
QUICK = {'prefill': [(1, 80), (2, 40)], 'decode': [(1, 8), (3, 8)], 'train': [(2, 40)]}
LOGITS, STEPS = 1024, 16
# room for steps in a static cache: more than are taken
ROOM = 512

Results = dict[str, list[torch.Tensor]]


class Prefill:
    """Runs all tokens at once, with a cache; computes the logits of the last token."""

    def __init__(self, model: Model, tokens: torch.Tensor) -> None:
        self.model, self.tokens = model, tokens

    def __call__(self) -> None:
        with torch.no_grad():
            self.model(self.tokens, use_cache=True, logits_to_keep=1)

    def results(self) -> Results:
        with torch.no_grad():
            return {'logits': [self.model(self.tokens, use_cache=True, logits_to_keep=LOGITS).logits]}


class Decode:
    """Runs one step, with a cache that grows."""

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
        """Returns the results of the first steps, with a new cache."""
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
    """Runs one step as a CUDA graph; on a CPU eagerly, with the same static cache."""

    def __init__(self, model: Model, tokens: torch.Tensor) -> None:
        super().__init__(model, tokens)
        self.graph: torch.cuda.CUDAGraph | None = None
        if tokens.is_cuda:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    super().__call__()
            torch.cuda.current_stream().wait_stream(stream)
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
    """Runs forward and backward of the loss."""

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


def relative_error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Returns the relative RMS error of all tensors as one vector."""
    if len(found) == 1:
        return relative_rms(found[0], exact[0])
    difference = sum(float((one.double() - other.double()).square().sum()) for one, other in zip(found, exact, strict=True))
    return float((difference / sum(float(one.double().square().sum()) for one in exact)) ** 0.5)


def times(call: Callable[[], object], on_cpu: bool) -> dict[str, float]:
    """Returns times in ms of a call that has run before; a slow one is repeated less often."""
    began = time.perf_counter()
    call()
    if on_cpu:
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
    """Returns times, memory and errors of one phase, as the model runs in the current contexts."""
    on_cpu = not tokens.is_cuda
    began = time.perf_counter()
    call = PHASES[phase](model, tokens)
    call()
    if not on_cpu:
        torch.cuda.synchronize()
    row: dict[str, Any] = {'first_s': time.perf_counter() - began, **ran(call), **times(call, on_cpu)}
    if not on_cpu:
        row['peak_mib'] = peak_mib(call)
    row['errors'] = {name: relative_error(found, exact[name]) for name, found in call.results().items()}
    if phase == 'decode':
        try:
            graphed = DecodeInGraph(model, tokens)
            row['errors'] |= {name: relative_error(found, exact['logits']) for name, found in graphed.results().items()}
            row |= {f'graph_{name}': value for name, value in times(graphed, on_cpu).items()}
        except Exception as error:
            row['graph_refused'] = error_line(error)
    return row


def ran(call: Callable[[], object]) -> dict[str, dict[str, int]]:
    """Returns how often each backend ran in one call; an empty dict for FLA, which has no trace."""
    try:
        from fla.backends import trace
    except ImportError:
        return {}
    with trace() as seen:
        call()
    return {'ran': {f'{function}: {backend}': count for (function, backend), count in sorted(seen.counters.items())}}


def reference(wide: Model, phase: str, tokens: torch.Tensor) -> Results:
    """Returns the results of transformers' own PyTorch code in float32."""
    with transformers_alone(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return PHASES[phase](wide, tokens).results()


def rows(package: str, phases: list[str], quick: bool) -> Iterator[dict[str, Any]]:
    """Yields this process's rows: of its `fla`, without and with modules and, beside ours, of transformers alone."""
    device = 'cpu' if quick else 'cuda'
    if not quick:
        torch.backends.cuda.enable_cudnn_sdp(False)
    model = build(TINY if quick else SIZES, device)
    weights = fingerprint(model)
    wide = in_float32(model)
    variants = [(package, False), (package, True), *([(TRANSFORMERS, False)] if package == OURS else [])]
    for phase in phases:
        for shape in (QUICK if quick else CASES)[phase]:
            generator = torch.Generator(device).manual_seed(1)
            tokens = torch.randint(model.config.vocab_size, shape, generator=generator, device=device)
            exact = reference(wide, phase, tokens)
            for backend, modules in variants:
                row = {'phase': phase, 'shape': shape, 'backend': backend, 'modules': modules, 'weights': weights}
                try:
                    if backend != TRANSFORMERS:
                        check_found(model)
                    with transformers_alone() if backend == TRANSFORMERS else contextlib.nullcontext():
                        with with_modules(model) if modules else contextlib.nullcontext():
                            row['serves'] = serves(model)
                            row |= measured(model, phase, tokens, exact)
                except Exception as error:
                    row['refused'] = error_line(error)
                yield row
                model.zero_grad()
                gc.collect()
                if not quick:
                    torch.cuda.empty_cache()
            del exact


def rows_of_fla(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows of the process for FLA, and a row with the error if it ends early."""
    repeated = [*(['--quick'] if options.quick else []), *(f'--only={phase}' for phase in options.only or ())]
    try:
        yield from fla_rows(__file__, repeated, options.fla)
    except SystemExit as ended:
        yield {'backend': FLA, 'refused': str(ended)}


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, peer=True)
    options.add_argument('--only', choices=CASES, action='append', help='measure only this phase')
    chosen = options.parse_args(arguments)
    if not chosen.quick and not has_gpu():
        return
    phases = chosen.only or list(CASES)
    if chosen.lines:
        print_lines(rows(FLA, phases, chosen.quick))
        return
    about = machine(chosen.quick, fla=chosen.fla)
    about['versions']['transformers'] = transformers.__version__
    results = ResultFile(chosen.json, 'qwen3_next', **about, command=command('qwen3_next', chosen, 'only'))
    for row in rows(OURS, phases, chosen.quick):
        results.add(row)
    gc.collect()
    if not chosen.quick:
        torch.cuda.empty_cache()
    if chosen.fla:
        for row in rows_of_fla(chosen):
            results.add(row)
    results.complete()


if __name__ == '__main__':
    main()
