"""Which backend served each dispatched function, why those before it did not, and how far it is from the reference.

A trace records real calls of the model. The first one of each function and backend is kept, with copies of its arguments:
it is explained, run again, and compared with the reference in float64 on the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from examples.language_model.console import Claims
from examples.language_model.train import Settings
from fla.backends import Decision, Trace, default_dispatcher, explain, resolve_op, use_backend
from fla.utils.testing import relative_rms

PHASES = ('training', 'prefill', 'decode')
DECODED = 16  # steps

# Relative RMS against float64 of outputs and of gradients: wide enough for gradients that are small differences of large
# terms (of gates; of q, while all keys look alike), and far below what a wrong result has. Tests of the operations are
# stricter.
BOUNDS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (3e-2, 0.25)}


@dataclass(frozen=True)
class Call:
    """A dispatched call as it came: copies of its arguments, and the modes it ran under."""

    key: str
    arguments: dict[str, Any]
    with_grad: bool
    with_autocast: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of the first tensor, by which functions compute."""
        return next(value.dtype for value in self.arguments.values() if isinstance(value, Tensor))


class Calls(Trace):
    """A trace that keeps the first call of each function and backend."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[tuple[str, str], Call] = {}

    def add(self, entry: Any, backend: str, arguments: Mapping[str, Any] | None) -> None:
        super().add(entry, backend, arguments)
        if arguments is not None and (entry.key, backend) not in self.kept:
            device = next(value.device.type for value in arguments.values() if isinstance(value, Tensor))
            # copies: the function may change an argument in place
            copies = {name: copy_of(value) for name, value in arguments.items()}
            modes = torch.is_grad_enabled(), torch.is_autocast_enabled(device)
            self.kept[entry.key, backend] = Call(entry.key, copies, *modes)


def copy_of(value: Any, exact: bool = False) -> Any:
    """A tensor's own copy, which needs a gradient if it does; with `exact` on the CPU in float64."""
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    if exact:
        # on the CPU: not every device has float64
        copy = copy.cpu().double() if copy.is_floating_point() else copy.cpu()
    return copy.requires_grad_(value.requires_grad)


def run(call: Call, backend: str, settings: Settings, exact: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients of a kept call, on the CPU in float64, for one random gradient of the outputs."""
    arguments = {name: copy_of(value, exact) for name, value in call.arguments.items()}
    autocast = torch.autocast(settings.device.type, settings.dtype, enabled=call.with_autocast and not exact)
    with use_backend(backend, op=call.key), torch.set_grad_enabled(call.with_grad), autocast:
        result = resolve_op(call.key)(**arguments)
    outputs = [out for out in (result if isinstance(result, tuple) else (result,)) if out is not None]
    wanted = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.requires_grad}
    gradients: tuple[Tensor, ...] = ()
    if call.with_grad:
        generator = torch.Generator().manual_seed(0)
        # numbers that no dtype rounds
        back = [torch.randn(out.shape, generator=generator).bfloat16().to(out) for out in outputs]
        gradients = torch.autograd.grad(outputs, list(wanted.values()), back)
    named = {name: g.cpu().double() for name, g in zip(wanted, gradients, strict=False)}
    return [out.detach().cpu().double() for out in outputs], named


@dataclass(frozen=True)
class Difference:
    """Relative RMS from float64: the largest of the outputs; the largest of the gradients, and of which argument. `bounds`
    are of both."""

    outputs: float
    gradients: float = 0.0
    argument: str = ''
    bounds: tuple[float, float] = BOUNDS[torch.float32]

    @property
    def is_small(self) -> bool:
        """A NaN is not."""
        return self.outputs <= self.bounds[0] and self.gradients <= self.bounds[1]


def badness(error: float) -> float:
    """The order of errors, in which NaN is the largest: `max` alone would pass it over."""
    return math.inf if math.isnan(error) else error


def difference(call: Call, backend: str, settings: Settings) -> Difference:
    """Of the backend that served a call from the reference in float64; where there is none, from the default, which then is
    plain PyTorch."""
    reference = 'reference' if 'reference' in resolve_op(call.key).backends else 'default'
    outputs, gradients = run(call, backend, settings, exact=False)
    exact_outputs, exact_gradients = run(call, reference, settings, exact=True)
    worst = max((relative_rms(*pair) for pair in zip(exact_outputs, outputs, strict=True)), key=badness)
    errors = {name: relative_rms(exact, gradients[name]) for name, exact in exact_gradients.items()}
    argument = max(errors, key=lambda name: badness(errors[name]), default='')
    return Difference(worst, errors.get(argument, 0.0), argument, BOUNDS[call.dtype])


@dataclass
class Row:
    """A function, a backend that served it, and what stood before that backend with the reason it did not."""

    key: str
    backend: str
    before: tuple[tuple[str, str], ...]
    calls: dict[str, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    @property
    def worst(self) -> Difference:
        """Of all phases, each figure by itself."""
        by_gradient = max(self.differences, key=lambda d: badness(d.gradients))
        outputs = max((d.outputs for d in self.differences), key=badness)
        return Difference(outputs, by_gradient.gradients, by_gradient.argument)

    @property
    def operation(self) -> str:
        return self.key.rpartition('.')[0]

    def __str__(self) -> str:
        counts = ''.join(f'{self.calls.get(phase, "-"):>10}' for phase in PHASES)
        gradients = f'{self.worst.gradients:.1e} {self.worst.argument}' if self.worst.argument else '-'
        function = self.key.rpartition('.')[2]
        lines = [f'  {function:<34}{self.backend:<11}{counts}   {self.worst.outputs:.1e}  {gradients}']
        lines += [f'      not {name}: {reason}' for name, reason in self.before]
        return '\n'.join(lines)


def explained(call: Call, settings: Settings) -> Decision:
    """What `explain` says of a kept call, under the modes it ran under."""
    autocast = torch.autocast(settings.device.type, settings.dtype, enabled=call.with_autocast)
    with torch.set_grad_enabled(call.with_grad), autocast:
        return explain(resolve_op(call.key), **call.arguments)


LEGEND = f"""
Served: how many calls of one training step, one prefill and {DECODED} steps of decoding.
Difference: relative RMS from the reference in float64 (where an operation has none, from its plain PyTorch default in
float64), on the arguments of the first such call: the largest of the outputs, and of the gradients, with its argument.
`not NAME`: a backend that is asked earlier, and why it did not serve the calls. Where there is none, the first one served.
"""


def show(rows: list[Row]) -> None:
    """The table, by operation."""
    phases = ''.join(f'{phase:>10}' for phase in PHASES)
    print(f'{"function":<36}{"served by":<11}{phases}   outputs  gradients')
    operation = ''
    for row in rows:
        if row.operation != operation:
            operation = row.operation
            print(operation)
        print(row)
    print(LEGEND)


def report(traces: Mapping[str, Calls], settings: Settings, claims: Claims) -> None:
    """Print the table of everything that ran in `traces`, by phase, and check it."""
    rows: dict[tuple[Any, ...], Row] = {}
    surprises = []
    for phase, calls in traces.items():
        for (key, backend), call in calls.kept.items():
            decision = explained(call, settings)
            if decision.winner != backend:
                surprises.append(f'{key} ({decision.winner}, not {backend})')
            names = [candidate.name for candidate in decision.candidates]
            passed_over = decision.candidates[: names.index(backend)]
            before = tuple((c.name, str(c.reason)) for c in passed_over)
            row = rows.setdefault((key, backend, before), Row(key, backend, before))
            row.calls[phase] = calls.counters[key, backend]
            row.differences.append(difference(call, backend, settings))
    show(sorted(rows.values(), key=lambda row: row.key))
    ran = {row.key for row in rows.values()}
    others = sorted(set(default_dispatcher().catalogue.functions()) - ran)
    print(f'Dispatched, but not called by this model: {", ".join(others) or "none"}.')
    large = sorted({row.key for row in rows.values() if not all(d.is_small for d in row.differences)})
    bounds = '; '.join(f'{str(d).removeprefix("torch.")} {o:g} and {g:g}' for d, (o, g) in BOUNDS.items())
    but = f', but for {", ".join(large)}' if large else ''
    claims.check(f'{len(ran)} functions differ by less than {bounds} (outputs and gradients){but}', not large)
    but = f', but for {", ".join(surprises)}' if surprises else ''
    claims.check(f'explain() names the backend that ran, for every function{but}', not surprises)
