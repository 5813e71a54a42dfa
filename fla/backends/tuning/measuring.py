"""Finds the quickest backend on this device: an explicit step at start-up, whose result is a layer of rules. A call never
times anything and never talks to another process; it compares sizes."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fla.backends.core import logs
from fla.backends.core.device_label import device_label, drivers, version_of
from fla.backends.core.errors import UnknownNameError
from fla.backends.policy.policy import Policy, Rule
from fla.backends.policy.precedence import Layer
from fla.backends.runtime.dispatcher import Dispatcher, entry_of, owner_of
from fla.backends.runtime.explain import describe_argument
from fla.backends.tuning.choices import choose, order_by_time
from fla.backends.tuning.measurements import Choice, Measured, MeasurementError, Measurements, Timing, read
from fla.backends.tuning.ranks import Ranks
from fla.utils.devices import platform_of_type


def measure(
    calls: Iterable[functools.partial[Any]],
    *,
    group: Any = None,
    path: str | os.PathLike[str] | None = None,
    warmup: int = 3,
    repeats: int = 20,
    margin: float = 0.02,
    progress: bool = True,
    dispatcher: Dispatcher | None = None,
) -> Measurements:
    """Times the backends that can serve these calls, and asks the quickest first from now on.

    Args:
        calls: `functools.partial(chunk_kda, q, k, v, g, beta)`, one for each size that matters. The backward pass is timed
            too if arguments require a gradient. Parameters that an operation changes are copied for each run.
        group: process group all of whose ranks call this: its first rank measures, the others get the result.
        path: file to write the result to; the first rank writes it.
        warmup: runs before the timed ones.
        repeats: timed runs, whose median counts.
        margin: the part of its time by which a backend must beat the one that would be asked first without measurements. A
            smaller difference counts as noise.
        progress: show a bar.
        dispatcher: the namespace; default: that of the calls.

    Returns:
        The result. It is in force below every other layer of policy, and replaces what was measured before for the same
            functions.

    Raises:
        ValueError: without a call, or for an invalid number of runs or margin.
        FrozenError: while dispatch is frozen.
        MeasurementError: if no backend can serve a call, or every backend raises; on every rank if another rank failed in
            any way. Nothing has changed then, on any rank.
        DispatchError: while dispatch is off (FLA_DISABLE_BACKEND_DISPATCH=1).
    """
    ranks = Ranks(group, MeasurementError)

    def checked() -> tuple[Dispatcher, list[functools.partial[Any]]]:
        for name, value, least in (('warmup', warmup, 0), ('repeats', repeats, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f'{name} must be an integer of at least {least}, got {value!r}')
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin < 1:
            raise ValueError(f'margin must be at least 0 and below 1, got {margin!r}')
        listed = _listed(calls)
        owner = _owner(listed, dispatcher)
        owner.policies.refuse_in_baseline('measure()')
        owner.policies.refuse_if_frozen('measure')
        return owner, listed

    def measured() -> Measurements:
        target = None if path is None else Path(path).expanduser()
        if target is not None and target.is_dir():
            raise IsADirectoryError(errno.EISDIR, 'path must be a file to write to, this is a directory', str(path))
        if target is not None and not target.absolute().parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, 'the directory to write to does not exist', str(target.parent))
        return _measure(listed, warmup, repeats, margin, progress, owner)

    owner, listed = ranks.run('measure', checked)
    made = ranks.run('measure', measured, first_only=True)
    source = str(path) if path is not None else 'measure()'
    policy = ranks.run('use what was measured', lambda: _policy(owner, made, source))
    if path is not None:
        ranks.run('write what was measured', lambda: made.save(path), first_only=True)
    owner.policies.set_measured(policy, source)
    return made


def _owner(calls: Sequence[functools.partial[Any]], dispatcher: Dispatcher | None) -> Dispatcher:
    """Returns the namespace of the calls.

    Raises:
        ValueError: if there are several, or another one was given.
    """
    entries = [entry_of(call.func) for call in calls]
    bound = [entry.spec.key for entry in entries if entry.own is not None]
    if bound:
        raise ValueError(f'calls has a binding of {bound[0]}, whose policy is its own: measure the public function instead')
    owners = list(dict.fromkeys(entry.dispatcher for entry in entries))
    if len(owners) > 1:
        raise ValueError(f'calls are of one namespace, got those of {", ".join(owner.namespace for owner in owners)}')
    if dispatcher is not None and owner_of(dispatcher) is not owners[0]:
        raise ValueError(f'dispatcher is {dispatcher!r}, and the calls are of {owners[0]!r}')
    return owners[0]


def load_measurements(path: str | os.PathLike[str], dispatcher: Dispatcher | None = None) -> Measurements:
    """Puts in force what `measure(path=…)` wrote, below every other layer of policy. It replaces what was measured before
    for the same functions.

    Raises:
        MeasurementError: for a malformed file, or one of another device; other versions are a warning.
        UnknownNameError: for an unknown function or backend, with the nearest name.
        FrozenError: while dispatch is frozen.
        OSError: if the file cannot be read.
        ImportError: without pydantic.
    """
    owner = owner_of(dispatcher)
    owner.policies.refuse_if_frozen('load measurements')
    found = read(path)
    platform = found.device.partition(':')[0]
    here = device_label(platform)
    if here != found.device:
        raise MeasurementError(f'{path} was measured on {found.device!r}, this is {here!r}: measure() again on this device')
    others = found.other_versions(_versions(list(found.versions), platform))
    if others:
        logs.logger.warning('%s was measured with other versions: %s; measure() again', path, ', '.join(others))
    owner.policies.set_measured(_policy(owner, found, str(path)), str(path))
    return found


def unload_measurements(dispatcher: Dispatcher | None = None) -> None:
    """Removes what was measured, for every function.

    Raises:
        FrozenError: while dispatch is frozen.
    """
    owner_of(dispatcher).policies.set_measured(None)


def _policy(owner: Dispatcher, made: Measurements, source: str) -> Policy:
    """Returns the measured rules, with the earlier ones of other functions.

    Raises:
        MeasurementError, UnknownNameError: for names and conditions that do not fit the functions.
        FrozenError: while dispatch is frozen.
    """
    owner.policies.refuse_if_frozen('change what was measured')
    keys = {(key,) for key in made.functions}
    rules = [rule for rule in owner.policies.measured_rules() if rule.ops not in keys]
    for key, measured in made.functions.items():
        with _naming(source):
            entry = owner.catalogue.entry(key)
        for choice in measured.rules:
            rule = Rule((key,), choice.use, choice.when, place=f'{source} ({_summary(measured, choice)})')
            with _naming(source):
                owner.catalogue.check_tokens(rule.use, key)
            problems = rule.condition.problems(entry.spec.signature) if rule.condition else []
            if problems:
                raise MeasurementError(f'{source}: {key} when {choice.when!r}: {"; ".join(problems)}')
            rules.append(rule)
    return Policy(rules=tuple(rules))


@contextlib.contextmanager
def _naming(source: str) -> Iterator[None]:
    """Puts the source in front of an error about a name."""
    try:
        yield
    except UnknownNameError as error:
        raise UnknownNameError(f'{source}: {error}') from None


def _summary(measured: Measured, choice: Choice) -> str:
    """Returns the timings behind a choice as text for `explain`; all timings if the file was edited."""
    own = [timing for timing in measured.timings if timing.order[:1] == choice.use[:1]] or measured.timings
    lines = []
    for timing in own[:4]:
        first = next(iter(timing.call.values()), '')
        times = ', '.join(f'{name} {_milliseconds(value)}' for name, value in timing.milliseconds.items())
        lines.append(f'{first}: {times}')
    return '; '.join(lines) + ('; …' if len(own) > 4 else '') if lines else 'edited'


def _milliseconds(value: float | None) -> str:
    return 'failed' if value is None else f'{value:.3g} ms'


def _listed(calls: Iterable[functools.partial[Any]]) -> list[functools.partial[Any]]:
    wants = 'calls is a list of functools.partial(function, *args, **kwargs)'
    if isinstance(calls, functools.partial):
        raise TypeError(f'{wants}, got a single one: write [...] around it')
    if not isinstance(calls, Iterable):
        raise TypeError(f'{wants}, got {calls!r}')
    listed = list(calls)
    if not listed:
        raise ValueError('calls is empty: there is nothing to measure')
    for call in listed:
        if not isinstance(call, functools.partial):
            raise TypeError(f'{wants}, got one that holds {call!r:.80}')
    return listed


@dataclass(frozen=True)
class _Sample:
    """A measured call: what conditions can compare, its times, the order without measurements, and where it ran."""

    entry: Any
    features: dict[str, Any]
    timing: Timing
    standing: tuple[str, ...]
    platform: str
    device: str
    packages: set[str]


def _measure(
    calls: Sequence[functools.partial[Any]], warmup: int, repeats: int, margin: float, progress: bool, owner: Dispatcher
) -> Measurements:
    samples = [_sample(call, warmup, repeats, owner) for call in (_with_progress(calls) if progress else calls)]
    devices = sorted({sample.device for sample in samples})
    if len(devices) > 1:
        raise MeasurementError(f'one file is for one device, the calls are on {", ".join(devices)}')
    functions = {}
    for entry in dict.fromkeys(sample.entry for sample in samples):
        own = [sample for sample in samples if sample.entry is entry]
        points, signature = _points(own, margin), entry.spec.signature
        optional = [name for name in signature.tensors if signature.annotated and signature.is_optional_tensor(name)]
        functions[entry.spec.key] = Measured(
            choose(points, optional) if points else (), tuple(sample.timing for sample in own)
        )
    platform = samples[0].platform
    packages = sorted(set().union(*(sample.packages for sample in samples)))
    return Measurements(
        devices[0], _versions(['torch', 'triton', 'fla-dispatch', *drivers(platform), *packages], platform), functions
    )


def _sample(call: functools.partial[Any], warmup: int, repeats: int, owner: Dispatcher) -> _Sample:
    entry = entry_of(call.func)
    try:
        bound = entry.spec.signature.signature.bind(*call.args, **call.keywords)
    except TypeError as error:
        raise TypeError(f'a call of {entry.spec.key}: {error}') from None
    # on_error='raise': a backend whose circuit is open now may be the quickest when it is closed again
    state = owner.policies.state_without_measured().above(Layer(Policy(on_error='raise'), 'measure()'))
    decision = entry.decide(call.args, call.keywords, None, state)
    able = [c.name for c in decision.candidates if c.can_run]
    backends = {member.name: member.backend for member in entry.members()}
    names = [name for name in able if backends[name].kind != 'reference'] or able
    if not names:
        raise MeasurementError(f'{entry.spec.key}: no backend can serve this call, so nothing can be measured\n{decision}')
    bound.apply_defaults()
    tensors = {name: value for name, value in bound.arguments.items() if isinstance(value, torch.Tensor)}
    device = next((tensor.device for tensor in tensors.values()), torch.device('cpu'))
    if device.type == 'meta':
        raise MeasurementError(f'{entry.spec.key}: meta tensors have no values, so nothing can be measured')
    times = {name: _time(entry, name, bound, device, warmup, repeats) for name in names}
    shown = {name: describe_argument(tensor) for name, tensor in tensors.items()}
    timing = Timing(shown, dict(sorted(times.items(), key=lambda item: (item[1] is None, item[1]))))
    if not timing.order:
        raise MeasurementError(f'{entry.spec.key}: each backend that can serve this call raised (see the log): {shown}')
    features = _features(entry.spec.signature, bound.arguments)
    platform = platform_of_type(device.type)
    packages = {package for name in names if (package := backends[name].package_name)}
    return _Sample(entry, features, timing, tuple(names), platform, device_label(platform, device.index), packages)


def _points(samples: Sequence[_Sample], margin: float) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Returns each kind of call with its backends, the chosen one first. Calls with the same features count together."""
    # sizes of a tensor that only some of the calls have cannot be compared
    names = [name for name in samples[0].features if all(name in sample.features for sample in samples)]
    kinds: dict[tuple[Any, ...], list[_Sample]] = {}
    for sample in samples:
        kinds.setdefault(tuple(sample.features[name] for name in names), []).append(sample)
    found = []
    for kind, alike in kinds.items():
        order = order_by_time(_total([sample.timing.milliseconds for sample in alike]), alike[0].standing, margin)
        if order:
            found.append((dict(zip(names, kind, strict=True)), order))
    return found


def _total(times: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Returns the sum for each backend; None if it did not serve every call."""
    found: dict[str, float | None] = {}
    for name in times[0]:
        own = [one.get(name) for one in times]
        found[name] = None if None in own else sum(time for time in own if time is not None)
    return found


def _features(signature: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns what a condition can compare: sizes, the first tensor's dtype, which optional tensors are given, flags."""
    found: dict[str, Any] = {}
    for name in signature.tensors:
        value = arguments.get(name)
        if isinstance(value, torch.Tensor):
            found |= {f'{name}.shape[{i}]': int(size) for i, size in enumerate(value.shape)}
    first = arguments.get(signature.tensors[0]) if signature.tensors else None
    if isinstance(first, torch.Tensor):
        found[f'{signature.tensors[0]}.dtype'] = str(first.dtype).removeprefix('torch.')
    for name in signature.tensors:
        if signature.is_optional_tensor(name):
            found[f'{name} is None'] = arguments.get(name) is None
    return found | {name: value for name in signature.names if isinstance(value := arguments.get(name), bool)}


def _time(entry: Any, name: str, bound: Any, device: torch.device, warmup: int, repeats: int) -> float | None:
    """Returns the median in milliseconds; None if the backend raises."""
    # past the dispatcher: these runs are not counted as calls, and a circuit breaker does not refuse them
    function = entry.direct(next(member for member in entry.members() if member.name == name))
    wanted = [x for x in bound.arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    originals = {changed: bound.arguments[changed] for changed in entry.spec.mutates if changed in bound.arguments}
    times = []
    try:
        for number in range(warmup + repeats):
            bound.arguments.update({changed: _copied(value) for changed, value in originals.items()})
            stop = _start_clock(device)
            made = function(*bound.args, **bound.kwargs)
            outputs = [x for x in (made if isinstance(made, (tuple, list)) else (made,)) if isinstance(x, torch.Tensor)]
            outputs = [x for x in outputs if x.requires_grad]
            if outputs and wanted and torch.is_grad_enabled():
                torch.autograd.grad(outputs, wanted, [torch.ones_like(x) for x in outputs], allow_unused=True)
            elapsed = stop()
            if number >= warmup:
                times.append(elapsed)
    except Exception as error:
        logs.logger.warning('measure: %s of %s raised %s: %s', name, entry.spec.key, type(error).__name__, error)
        return None
    finally:
        bound.arguments.update(originals)
    return float(sorted(times)[len(times) // 2])


def _copied(value: Any) -> Any:
    """Copies an argument: the tensors in lists, tuples and mappings, and any other object whole."""
    return tree_map(lambda one: one.detach().clone() if isinstance(one, torch.Tensor) else copy.deepcopy(one), value)


def _start_clock(device: torch.device) -> Callable[[], float]:
    """Starts a clock; the returned function gives the milliseconds that have passed on the device."""
    if device.type == 'cuda':
        stream = torch.cuda.current_stream(device)
        make: Callable[..., Any] = torch.cuda.Event
        begin, end = make(enable_timing=True), make(enable_timing=True)
        begin.record(stream)

        def stop() -> float:
            end.record(stream)
            end.synchronize()
            return float(begin.elapsed_time(end))

        return stop
    start = time.perf_counter()
    return lambda: (time.perf_counter() - start) * 1e3


def _versions(names: Iterable[str], platform: str) -> dict[str, str | None]:
    known = {'torch': torch.__version__, **drivers(platform)}
    return {name: known[name] if name in known else version_of(name) for name in names}


def _with_progress(calls: Sequence[Any]) -> Iterator[Any]:
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        for number, call in enumerate(calls, 1):
            print(f'\rmeasuring {number}/{len(calls)}', end='', file=sys.stderr, flush=True)
            yield call
        print(file=sys.stderr)
    else:
        yield from track(calls, 'measuring', console=Console(stderr=True))
