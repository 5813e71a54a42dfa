"""Which backend is the quickest on this card: an explicit step at start-up. A call never times anything and never talks to
another process; it compares sizes with what was written down here."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from fla.backends.tuning.measurements import Choice, Measured, MeasurementError, Measurements, Timing, choose, chosen, read
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
    """Time the backends that could serve these calls, and let the quickest be asked first from now on.

    Args:
        calls: `functools.partial(chunk_kda, q, k, v, g, beta)`, one for each size that matters. With arguments that require
            a gradient the backward pass is timed as well. Parameters that an operation changes are copied for each run.
        group: process group all of whose ranks call this: its first rank measures, the others get the result.
        path: where to write it (the first rank does).
        warmup, repeats: runs before, and runs of which the median counts.
        margin: by what part of its time a backend has to beat the one that would be asked first without measurements. Less
            is taken for noise.
        progress: show a bar.
        dispatcher: the namespace; default: that of the calls.

    Returns:
        What was measured; it is in force, below every other layer of policy, in the place of what was measured before for
            the same functions.

    Raises:
        ValueError: without a call, for a number of runs that is none, or a margin that is none.
        FrozenError: while dispatch is frozen.
        MeasurementError: if a call can be served by nobody, or raises whoever serves it; on every rank where another one
            failed, in whatever way. Nothing has changed then, on any.
        DispatchError: where nothing is dispatched (FLA_DISABLE_BACKEND_DISPATCH=1).
    """
    ranks = Ranks(group, MeasurementError)

    def checked() -> tuple[Dispatcher, list[functools.partial[Any]]]:
        for name, value, least in (('warmup', warmup, 0), ('repeats', repeats, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f'{name} must be a whole number from {least}, got {value!r}')
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin < 1:
            raise ValueError(f'margin must be a part of the time, from 0 to below 1, got {margin!r}')
        listed = _listed(calls)
        owner = _owner(listed, dispatcher)
        owner.policies.refuse_in_baseline('measure()')
        owner.policies.refuse_if_frozen('measure')
        return owner, listed

    def measured() -> Measurements:
        target = None if path is None else Path(path).expanduser()
        if target is not None and target.is_dir():
            raise IsADirectoryError(errno.EISDIR, 'path has to be a file to write to, this is a folder', str(path))
        if target is not None and not target.absolute().parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, 'there is no such folder to write to', str(target.parent))
        return _measure(listed, warmup, repeats, margin, progress, owner)

    owner, listed = ranks.all_do('measure', checked)
    made = ranks.first_does('measure', measured)
    source = str(path) if path is not None else made.source
    policy = ranks.all_do('use what was measured', lambda: _policy(owner, made, source))
    if path is not None:
        ranks.first_does('write what was measured', lambda: made.save(path))
    owner.policies.set_measured(policy, source)
    return made


def _owner(calls: Sequence[functools.partial[Any]], dispatcher: Dispatcher | None) -> Dispatcher:
    """The namespace of the calls."""
    entries = [entry_of(call.func) for call in calls]
    bound = [entry.spec.key for entry in entries if entry.own is not None]
    if bound:
        raise ValueError(f'calls has a binding of {bound[0]}, whose policy is its own: measure the public function')
    owners = list(dict.fromkeys(entry.dispatcher for entry in entries))
    if len(owners) > 1:
        raise ValueError(f'calls are of one namespace, got those of {", ".join(owner.namespace for owner in owners)}')
    if dispatcher is not None and owner_of(dispatcher) is not owners[0]:
        raise ValueError(f'dispatcher is {dispatcher!r}, and the calls are of {owners[0]!r}')
    return owners[0]


def load_measurements(path: str | os.PathLike[str], dispatcher: Dispatcher | None = None) -> Measurements:
    """Put in force what `measure(path=…)` wrote, below every other layer of policy and in the place of what was measured
    before for the same functions.

    Raises:
        MeasurementError: for a file that is none, and for another card; other versions are a warning.
        UnknownNameError: for a function or backend that nobody knows, with the nearest match.
        FrozenError: while dispatch is frozen.
        OSError: if it cannot be read.
    """
    owner = owner_of(dispatcher)
    owner.policies.refuse_if_frozen('load measurements')
    found = read(path)
    platform = found.device.partition(':')[0]
    here = device_label(platform)
    if here != found.device:
        raise MeasurementError(f'{path} was measured on {found.device!r}, this is {here!r}: measure() again on this card')
    others = found.other_versions(_versions(list(found.versions), platform))
    if others:
        logs.logger.warning('%s was measured with other versions: %s; measure() again', path, ', '.join(others))
    owner.policies.set_measured(_policy(owner, found, str(path)), str(path))
    return found


def unload_measurements(dispatcher: Dispatcher | None = None) -> None:
    """Take away what was measured, of every function.

    Raises:
        FrozenError: while dispatch is frozen.
    """
    owner_of(dispatcher).policies.set_measured(None)


def _policy(owner: Dispatcher, made: Measurements, source: str) -> Policy:
    """The rules of what was measured, with those that stand for other functions.

    Raises:
        MeasurementError, UnknownNameError: for what does not fit the functions that are there.
        FrozenError: while dispatch is frozen.
    """
    owner.policies.refuse_if_frozen('change what was measured')
    keys = {(key,) for key in made.functions}
    rules = [rule for rule in owner.policies.measured_rules() if rule.ops not in keys]
    for key, measured in made.functions.items():
        with _named(source):
            entry = owner.catalogue.entry(key)
        for choice in measured.choices:
            rule = Rule((key,), choice.use, choice.when, place=f'{source} ({_summary(measured, choice)})')
            with _named(source):
                owner.catalogue.check_tokens(rule.use, key)
            problems = rule.condition.problems(entry.spec.signature) if rule.condition else []
            if problems:
                raise MeasurementError(f'{source}: {key} when {choice.when!r}: {"; ".join(problems)}')
            rules.append(rule)
    return Policy(rules=tuple(rules))


@contextlib.contextmanager
def _named(source: str) -> Iterator[None]:
    """Errors of names say where those stand."""
    try:
        yield
    except UnknownNameError as error:
        raise UnknownNameError(f'{source}: {error}') from None


def _summary(measured: Measured, choice: Choice) -> str:
    """The timings in a few words, for `explain`: those that speak for a choice, of an edited one any."""
    own = [timing for timing in measured.timings if timing.order[:1] == choice.use[:1]] or measured.timings
    lines = []
    for timing in own[:4]:
        first = next(iter(timing.call.values()), '')
        times = ', '.join(f'{name} {_words(timing.milliseconds[name])}' for name in timing.milliseconds)
        lines.append(f'{first}: {times}')
    return '; '.join(lines) + ('; …' if len(own) > 4 else '') if lines else 'edited'


def _words(milliseconds: float | None) -> str:
    return 'failed' if milliseconds is None else f'{milliseconds:.3g} ms'


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


def _measure(
    calls: Sequence[functools.partial[Any]], warmup: int, repeats: int, margin: float, progress: bool, owner: Dispatcher
) -> Measurements:
    timings: dict[str, list[Timing]] = {}
    told: dict[str, list[dict[str, Any]]] = {}
    standing: dict[str, list[tuple[str, ...]]] = {}
    cards: set[str] = set()
    platform = 'cpu'
    packages: set[str] = set()
    for call in _shown(calls) if progress else calls:
        entry = entry_of(call.func)
        try:
            bound = entry.spec.signature.signature.bind(*call.args, **call.keywords)
        except TypeError as error:
            raise TypeError(f'a call of {entry.spec.key}: {error}') from None
        state = owner.policies.state_without_measured()
        # a backend whose circuit is open now may be the quickest when it is closed again
        state = state.above(Layer(Policy(on_error='raise'), 'measure()'))
        decision = entry.decide(call.args, call.keywords, None, state)
        names = [c.name for c in decision.candidates if c.can_run]
        by_name = {member.name: member.backend for member in entry.members()}
        serious = [name for name in names if by_name[name].kind != 'reference'] or names
        if not serious:
            raise MeasurementError(
                f'{entry.spec.key}: nobody serves this call, so that there is nothing to measure\n{decision}'
            )
        packages |= {p for name in serious if (p := by_name[name].package_name)}
        bound.apply_defaults()
        device = next((x.device for x in bound.arguments.values() if isinstance(x, torch.Tensor)), torch.device('cpu'))
        if device.type == 'meta':
            raise MeasurementError(f'{entry.spec.key}: meta tensors hold nothing, so that there is nothing to measure')
        platform = platform_of_type(device.type)
        cards.add(device_label(platform, device.index))
        times = {name: _time(entry, name, bound, device, warmup, repeats) for name in serious}
        shown = {n: describe_argument(v) for n, v in bound.arguments.items() if isinstance(v, torch.Tensor)}
        timing = Timing(shown, dict(sorted(times.items(), key=lambda item: (item[1] is None, item[1]))))
        if not timing.order:
            raise MeasurementError(
                f'{entry.spec.key}: each backend that could serve this call raised (see the log): {shown}'
            )
        timings.setdefault(entry.spec.key, []).append(timing)
        told.setdefault(entry.spec.key, []).append(_features(entry.spec.signature, bound.arguments))
        standing.setdefault(entry.spec.key, []).append(tuple(serious))
    if len(cards) > 1:
        raise MeasurementError(f'one file is for one card, the calls are on {", ".join(sorted(cards))}')
    functions = {}
    for key, of in timings.items():
        points = _joined(told[key], of, standing[key], margin)
        signature = owner.catalogue.entry(key).spec.signature
        optional = [name for name in signature.tensors if signature.annotated and signature.is_optional_tensor(name)]
        functions[key] = Measured(choose(points, optional) if points else (), tuple(of))
    names = ['torch', 'triton', 'fla-dispatch', *drivers(platform), *sorted(packages)]
    return Measurements(cards.pop(), _versions(names, platform), functions)


def _joined(
    told: Sequence[dict[str, Any]], timings: Sequence[Timing], standing: Sequence[tuple[str, ...]], margin: float
) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Each kind of call with its backends, the chosen one first; calls that no condition tells apart count together."""
    # sizes of a tensor that only some of the calls have cannot be compared
    names = [name for name in told[0] if all(name in features for features in told)]
    kinds: dict[tuple[Any, ...], list[tuple[Timing, tuple[str, ...]]]] = {}
    for features, timing, usual in zip(told, timings, standing, strict=True):
        kinds.setdefault(tuple(features[name] for name in names), []).append((timing, usual))
    found = []
    for kind, of in kinds.items():
        order = chosen(_sum([timing.milliseconds for timing, _ in of]), of[0][1], margin)
        if order:
            found.append((dict(zip(names, kind, strict=True)), order))
    return found


def _sum(times: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Of each backend; None where it did not serve every call."""
    found: dict[str, float | None] = {}
    for name in times[0]:
        own = [of.get(name) for of in times]
        found[name] = None if None in own else sum(time for time in own if time is not None)
    return found


def _features(signature: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a condition can tell calls apart by: sizes, the first tensor's dtype, which optional tensors came, and flags."""
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
    """Milliseconds, the median; None where it raises."""
    # past the dispatcher: nobody counts these runs as calls, and no circuit breaker keeps them out
    function = entry.direct(next(member for member in entry.members() if member.name == name))
    wanted = [x for x in bound.arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    given = {changed: bound.arguments[changed] for changed in entry.mutates if changed in bound.arguments}
    times = []
    try:
        for number in range(warmup + repeats):
            bound.arguments.update({changed: _copied(value) for changed, value in given.items()})
            stop = _clock(device)
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
        bound.arguments.update(given)
    return float(sorted(times)[len(times) // 2])


def _copied(value: Any) -> Any:
    """What an operation changes, for one run: the tensors in lists, tuples and mappings, and any other object whole."""
    return tree_map(lambda one: one.detach().clone() if isinstance(one, torch.Tensor) else copy.deepcopy(one), value)


def _clock(device: torch.device) -> Callable[[], float]:
    """Starts now; the function that it returns says how many milliseconds have passed on the device."""
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


def _shown(calls: Sequence[Any]) -> Iterator[Any]:
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
