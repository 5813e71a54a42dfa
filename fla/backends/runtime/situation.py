"""Everything that selection depends on besides the call: one immutable value with one owner.

A change computes a new `Situation` and puts it in force with a single store; then every entry point gets the code for it. A
change that is interrupted, or nested in a signal handler or finalizer, may leave entry points unsettled; the next change or
cold call settles them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fla.backends.backend.base import BaseBackend
from fla.backends.core.locking import lock
from fla.backends.policy.policy import Policy
from fla.backends.policy.precedence import Layer, State
from fla.backends.policy.version import PolicyVersion
from fla.backends.runtime.recorders import Recorder


class EnteredScope(NamedTuple):
    """A scope in force. `pinned` replaces the whole state. `thread` entered the scope; None for a recomputation's scope."""

    token: int
    layer: Layer
    pinned: State | None
    thread: int | None


@dataclass(frozen=True)
class Frozen:
    """The policy, the toggles' values, and which backends are enabled, as `freeze_dispatch()` fixed them."""

    layers: tuple[Layer, ...]
    env: tuple[tuple[str, str | None], ...]
    enabled: Mapping[BaseBackend, bool]


@dataclass(frozen=True)
class Situation:
    """Layers of policy and other inputs of selection.

    Attributes:
        scopes: entered scopes, outermost first.
        code: the layer of `set_policy()`.
        environment: the layers of the environment variables; None until they are read.
        file, file_versions: the policy file in force, and the number of versions so far.
        config, config_error: the file that the environment names, as last put in force, and why it cannot be used.
        measured: the layer of measured choices.
        frozen: set while dispatch is frozen.
        recorders: traces, telemetry, observers.
        generations: operation ('*' for all) → number of changes of its backends.
        state: the part that plans are made for.
    """

    scopes: tuple[EnteredScope, ...] = ()
    code: Layer | None = None
    environment: tuple[Layer, ...] | None = None
    file: PolicyVersion | None = None
    file_versions: int = 0
    config: PolicyVersion | None = None
    config_error: str | None = None
    measured: Layer | None = None
    frozen: Frozen | None = None
    recorders: tuple[Recorder, ...] = ()
    generations: Mapping[str, int] = field(default_factory=dict)
    state: State = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, 'state', self._compose())

    @property
    def below_code(self) -> tuple[Layer, ...]:
        """The layers below `set_policy()`."""
        file = () if self.file is None else (file_layer(self.file.policy, self.file.source),)
        return (*(self.environment or ()), *file, *(() if self.measured is None else (self.measured,)))

    @property
    def file_source(self) -> str | None:
        """The source of the policy file's layer."""
        return None if self.file is None else file_layer(self.file.policy, self.file.source).source

    def generation(self, operation: str) -> int:
        """A number that changes whenever the backends of an operation do."""
        return self.generations.get(operation, 0) + self.generations.get('*', 0)

    def _compose(self) -> State:
        tracing, telemetry = any(r.wants_calls for r in self.recorders), self._telemetry()
        pinned = next((scope.pinned for scope in reversed(self.scopes) if scope.pinned is not None), None)
        if pinned is not None:
            return State(pinned.layers, tracing, pinned.env, telemetry)
        if self.frozen is not None:  # even if a scope was left since
            return State(self.frozen.layers, tracing, self.frozen.env, telemetry)
        layers = [scope.layer for scope in reversed(self.scopes)]
        if self.code is not None:
            layers.append(self.code)
        return State((*layers, *self.below_code), tracing, telemetry=telemetry)

    def _telemetry(self) -> str:
        if any(recorder.wants_times for recorder in self.recorders):
            return 'time'
        return 'count' if any(recorder.wants_outcomes for recorder in self.recorders) else ''


def file_layer(policy: Policy, path: str) -> Layer:
    """A policy file's layer."""
    return Layer(policy, f'policy file {path}')


class Settled(Protocol):
    """An entry point that follows changes."""

    def adopt(self, now: Situation) -> None:
        """Install the cached code for this situation, or cold code. Called under the lock."""


class Control:
    """Owns the situation in force.

    Args:
        entries: every entry point.
    """

    def __init__(self, entries: Callable[[], Iterable[Settled]]) -> None:
        self.now = Situation()
        self._settled: Situation | None = self.now
        self._entries = entries

    def change(self, make: Callable[[Situation], Situation]) -> Situation:
        """Put `make(the situation in force)` in force and return it. `make` has no side effects: it may run again."""
        with lock:
            while True:
                before = self.now
                after = make(before)
                if self.now is before:  # else a signal handler or finalizer has changed it
                    self.now = after
                    break
            self.settle()
            return after

    def settle(self) -> None:
        """Give every entry point the code for the situation in force, until it stays the same."""
        with lock:
            while self._settled is not self.now:
                now = self.now
                for entry in self._entries():
                    entry.adopt(now)
                self._settled = now
