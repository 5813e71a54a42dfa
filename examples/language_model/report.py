"""Reports which backend served each dispatched function, why those before it did not, and its distance from the reference.

A trace records real calls of the model. The first call of each function and backend is recorded with copies of its
arguments. It is then explained, run again, and compared with the reference in float64 on the same numbers.
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
from fla.backends import Decision, default_dispatcher, explain, resolve_op, use_backend
from fla.backends.core.spec import FunctionSpec
from fla.backends.observe import Trace
from fla.utils.testing import relative_rms

PHASES = ('training', 'prefill', 'decode')
DECODED = 16  # decoding steps under the trace

# Allowed relative RMS from float64 of outputs and gradients. Gradients that are small differences of large terms (of gates;
# of q, while all keys are alike) stay below it, and wrong results far above it. The operations' own tests are stricter.
BOUNDS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (3e-2, 0.25)}


@dataclass(frozen=True)
class Call:
    """A recorded call: copies of its arguments, and the modes it ran under."""

    key: str
    arguments: dict[str, Any]
    with_grad: bool
    with_autocast: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first tensor, which functions compute in."""
        return next(value.dtype for value in self.arguments.values() if isinstance(value, Tensor))


class Calls(Trace):
    """A trace that records the first call of each function and backend."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[tuple[str, str], Call] = {}

    def call(self, spec: FunctionSpec, backend: str, arguments: Mapping[str, Any] | None) -> None:
        super().call(spec, backend, arguments)
        if arguments is not None and (spec.key, backend) not in self.first:
            device = next(value.device.type for value in arguments.values() if isinstance(value, Tensor))
            # Copies, because the function may change an argument in place.
            copies = {name: copy_of(value) for name, value in arguments.items()}
            modes = torch.is_grad_enabled(), torch.is_autocast_enabled(device)
            self.first[spec.key, backend] = Call(spec.key, copies, *modes)


def copy_of(value: Any, exact: bool = False) -> Any:
    """Returns a copy of a tensor that requires a gradient if the tensor does; with `exact` on the CPU in float64."""
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    if exact:
        # On the CPU, because not every device has float64.
        copy = copy.cpu().double() if copy.is_floating_point() else copy.cpu()
    return copy.requires_grad_(value.requires_grad)


def run(call: Call, backend: str, settings: Settings, exact: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Runs a recorded call. Returns outputs and gradients, on the CPU in float64, for one random gradient of the outputs."""
    arguments = {name: copy_of(value, exact) for name, value in call.arguments.items()}
    autocast = torch.autocast(settings.device.type, settings.dtype, enabled=call.with_autocast and not exact)
    with use_backend(backend, op=call.key), torch.set_grad_enabled(call.with_grad), autocast:
        result = resolve_op(call.key)(**arguments)
    outputs = [out for out in (result if isinstance(result, tuple) else (result,)) if out is not None]
    wanted = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.requires_grad}
    gradients: tuple[Tensor, ...] = ()
    if call.with_grad:
        generator = torch.Generator().manual_seed(0)
        # Numbers that every dtype holds exactly.
        back = [torch.randn(out.shape, generator=generator).bfloat16().to(out) for out in outputs]
        gradients = torch.autograd.grad(outputs, list(wanted.values()), back)
    named = {name: g.cpu().double() for name, g in zip(wanted, gradients, strict=False)}
    return [out.detach().cpu().double() for out in outputs], named


@dataclass(frozen=True)
class Difference:
    """The largest relative RMS error of an output and of a gradient, that gradient's argument, and both bounds."""

    outputs: float
    gradients: float = 0.0
    argument: str = ''
    bounds: tuple[float, float] = BOUNDS[torch.float32]

    @property
    def is_small(self) -> bool:
        """Whether both are within their bounds, which NaN is not."""
        return self.outputs <= self.bounds[0] and self.gradients <= self.bounds[1]


def badness(error: float) -> float:
    """Returns a sort key of errors with NaN as the largest, which `max` alone would ignore."""
    return math.inf if math.isnan(error) else error


def difference(call: Call, backend: str, settings: Settings) -> Difference:
    """Returns how far a backend is from the reference in float64, or from the default where an operation has no reference.
    The default is then plain PyTorch."""
    reference = 'reference' if 'reference' in resolve_op(call.key).backends else 'default'
    outputs, gradients = run(call, backend, settings, exact=False)
    exact_outputs, exact_gradients = run(call, reference, settings, exact=True)
    worst = max((relative_rms(*pair) for pair in zip(exact_outputs, outputs, strict=True)), key=badness)
    errors = {name: relative_rms(exact, gradients[name]) for name, exact in exact_gradients.items()}
    argument = max(errors, key=lambda name: badness(errors[name]), default='')
    return Difference(worst, errors.get(argument, 0.0), argument, BOUNDS[call.dtype])


@dataclass
class Row:
    """A function, a backend that served it, and each candidate before that backend with the reason why it did not."""

    key: str
    backend: str
    before: tuple[tuple[str, str], ...]
    calls: dict[str, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    @property
    def worst(self) -> Difference:
        """The largest outputs and gradients of all phases, each on its own."""
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
    """Explains a recorded call, under the modes it ran under."""
    autocast = torch.autocast(settings.device.type, settings.dtype, enabled=call.with_autocast)
    with torch.set_grad_enabled(call.with_grad), autocast:
        return explain(resolve_op(call.key), **call.arguments)


LEGEND = f"""
Served: number of calls in one training step, one prefill and {DECODED} decoding steps.
Difference: relative RMS from the reference in float64 (for an operation without one, from its plain PyTorch default in
float64) on the arguments of the first such call: the largest of the outputs, and of the gradients with its argument.
`not NAME`: a backend that is asked earlier, and why it did not serve the calls. Without such lines, the first one served.
"""


def show(rows: list[Row]) -> None:
    """Prints the table, grouped by operation."""
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
    """Prints and checks the table of every function that ran in `traces`, which are by phase."""
    rows: dict[tuple[Any, ...], Row] = {}
    surprises = []
    for phase, calls in traces.items():
        for (key, backend), call in calls.first.items():
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
    but = f', except for {", ".join(large)}' if large else ''
    claims.check(f'{len(ran)} functions differ by less than {bounds} (outputs and gradients){but}', not large)
    but = f', except for {", ".join(surprises)}' if surprises else ''
    claims.check(f'explain() names the backend that ran, for every function{but}', not surprises)
