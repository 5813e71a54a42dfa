"""The entry point that `@dispatch` makes.

The public function is one function object for life. What changes is its code:
    cold: `_d_cold(''); return _d_self(...)`; the first call, also inside a trace (which then begins anew), loads the
        backends and plans;
    hot: the plan as straight-line code (see `codegen`), swapped in with one store to `__code__`.
Dynamo guards the code of a function it inlines, so every re-plan is seen by compiled callers. Code that a policy has been
given once is kept, so that coming back to that policy costs a compiled caller nothing.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.autograd.forward_ad
import torch.autograd.profiler

from fla.backends.backend.base import BaseBackend, format_reason
from fla.backends.codegen.call import Call
from fla.backends.codegen.generator import source_of
from fla.backends.core import logs
from fla.backends.core.dynamo import another_thread_compiles, never_a_frame, renew_after_compiling, while_tracing
from fla.backends.core.errors import NoBackendError, UnknownNameError
from fla.backends.core.locking import lock
from fla.backends.core.signature import Signature, location
from fla.backends.plan.members import any_match, collect
from fla.backends.plan.plan import Facts, Member, Plan, build
from fla.backends.policy.policy import Policy, covers
from fla.backends.policy.precedence import Layer, ResolvedPolicy, State, effective, overruled, refuse_if_locked
from fla.backends.runtime.dispatcher import Dispatcher
from fla.backends.runtime.function import (
    check_call,
    check_source,
    check_what_default_needs,
    compile_source,
    drop_with,
    make_wrapper,
    namespace_of,
)
from fla.backends.runtime.hooks import RuntimeHooks
from fla.backends.runtime.traced_scopes import TracedScopePlans

_serials = itertools.count()

# Plans kept per function, and states remembered to lead to one of them. Compiled callers are only as good as the plans
# that are kept, so this is generous; a plan is a few kilobytes.
_PLANS_KEPT = 64
_STATES_KEPT = 1024
# How often a plan that is out of date before it is finished is begun anew.
_MOST_ATTEMPTS = 20


@dataclass(eq=False)
class Kept:
    """A plan with its code."""

    plan: Plan
    code: CodeType
    source: str
    serial: str


@dataclass(eq=False)
class Entry:
    """A dispatched function: what it is, its plans, and the function object that users hold.

    Attributes:
        operation, name: its operation and its own name; together the `key` 'operation.name'.
        function: the default implementation.
        default: the default as a backend.
        check: raises for bad calls, before any candidate is asked.
        mutates: parameters the operation changes in place.
        own: the policy of a bound function, above every other.
        platforms: platforms that calls have been seen on.
        was_called: it has been planned for a call.
    """

    dispatcher: Dispatcher
    operation: str
    name: str
    function: Callable[..., Any]
    signature: Signature
    default: BaseBackend
    default_verifier: Callable[..., Any] | None
    check: Callable[..., Any] | None
    mutates: tuple[str, ...] = ()
    own: Layer | None = None
    platforms: tuple[str, ...] = ()
    was_called: bool = False
    wrapper: FunctionType = field(init=False)
    _plans: dict[State, Kept] = field(default_factory=dict, init=False)
    _by_policy: dict[ResolvedPolicy, Kept] = field(default_factory=dict, init=False)
    _members: tuple[int, tuple[Member, ...]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.key = f'{self.operation}.{self.name}'
        self.place = location(self.function)
        self.label = f'{self.dispatcher.namespace.split(".")[0]}::{self.name}'
        self._check_call = check_call(self)
        check_what_default_needs(self)
        self._boxed = TracedScopePlans(self)
        self._namespace = namespace_of(self)
        self.wrapper = make_wrapper(self)
        self._cold = self.wrapper.__code__
        self._in_force: Kept | None = None
        self._installed = ''
        self._namespace['_d_self'] = self.wrapper

    def __hash__(self) -> int:
        return id(self)

    def serial(self) -> str:
        """A name that no plan, box or function had before."""
        return str(next(_serials))

    # -- planning -----------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """The state this function is planned for."""
        state = self.dispatcher.state()
        return state.above(self.own) if self.own is not None else state

    def policy(self, state: State) -> ResolvedPolicy:
        """The policy in force for this function under a state."""
        return effective(state, self.operation, self.name, self._serves)

    def _serves(self, tokens: tuple[str, ...]) -> bool:
        return any_match(self.members(), tokens)

    def members(self) -> tuple[Member, ...]:
        """Every backend with a method of this name, and the default, by priority."""
        generation = self.dispatcher.generation(self.operation)
        known = self._members
        if known is None or known[0] != generation:
            known = self._members = generation, collect(self)
        return known[1]

    def _facts(self, policy: ResolvedPolicy) -> Facts:
        dispatcher = self.dispatcher
        return Facts(
            package=dispatcher.availability.package,
            device=dispatcher.availability.device,
            devices=dispatcher.device_facts,
            gate=lambda backend: dispatcher.gate(backend, policy),
        )

    def plan(self, state: State) -> Plan:
        """Who is asked, and in which order, under a state."""
        policy = self.policy(state)
        return build(self.signature, self.members(), policy, self.platforms, self._facts(policy))

    def _make(self, state: State) -> Kept:
        return self._generate(self.plan(state), virtual=True)

    def _generate(self, plan: Plan, *, virtual: bool) -> Kept:
        serial = self.serial()
        notes = RuntimeHooks(self)
        generator = Call(self.signature, plan, serial, notes, key=self.key, label=self.label, virtual=virtual)
        source = source_of(generator, self.name, check_source(self, plan.policy))
        self._namespace.update(generator.w.bindings)
        ranged = f'_d_ranged{serial}'
        self._namespace[ranged] = functools.partial(self._ranged, plan, serial)
        code = compile_source(self, source, f'plan {serial}').__code__
        # a frame that still runs this code may need its names: they go when the code does
        drop_with(self, code, *generator.w.bindings, ranged)
        return Kept(plan, code, source, serial)

    def _ranged(self, plan: Plan, of: str, *args: Any, **kwargs: Any) -> Any:
        """First call while a profiler is active: make the variant of the plan `of` that serial that opens a range."""
        serial, name = self.serial(), f'_d_ranged{of}'
        generator = Call(
            self.signature, plan, serial, RuntimeHooks(self), key=self.key, label=self.label, ranges=True, virtual=False
        )
        generator.asks = of  # it is the plan that is in force
        source = source_of(generator, self.name, check_source(self, plan.policy))
        self._namespace.update(generator.w.bindings)
        function = compile_source(self, source, f'ranges {serial}')
        function.__defaults__, function.__kwdefaults__ = self.signature.defaults()
        drop_with(self, function.__code__, *generator.w.bindings)
        if name in self._namespace:
            self._namespace[name] = function
        return function(*args, **kwargs)

    def _plan_again(self, serial: str) -> int:
        """Plan for the state in force and install the code. Never holds the lock while foreign code runs.

        Args:
            serial: whose code asks: of a plan, '' when cold. Where that one has been replaced meanwhile (by another thread;
                by the first attempt of a trace that began with it), there is nothing to do.

        Returns:
            Whether something was planned.
        """
        if serial != self._installed and f'plan{serial}' not in self._boxed.known.values():
            with lock:  # until whoever replaced it has put the new code in place: else it would be asked for again and again
                return 0
        self.was_called = True
        dispatcher = self.dispatcher
        for attempt in itertools.count():
            complete = dispatcher.discovery.load(self.operation)
            base = dispatcher.state()
            if complete:
                dispatcher.check_environment_once()
            generation = dispatcher.generation(self.operation)
            # for `base` and no newer state: a scope that came and went meanwhile would leave its plan under this one
            kept = self._make(base.above(self.own) if self.own is not None else base)
            with lock:
                unchanged = dispatcher.state() == base and dispatcher.generation(self.operation) == generation
                if unchanged:
                    self._keep(base, kept, None if complete else self._complete)
                    break
                if attempt == _MOST_ATTEMPTS:
                    # somebody changes it as fast as it is planned: serve this call, plan again on the next
                    self._keep(base, kept, _from_the_second_time())
                    break
        if not unchanged:
            logs.warn_once(
                ('restless', self.key),
                '%s: backends or policy changed %d times while it was planned. If an is_available, probe or is_enabled '
                'changes its own backend or the policy, it must not.',
                self.key,
                attempt,
            )
        self._announce(kept)
        return 1

    def _keep(self, state: State, kept: Kept, until: Callable[[], int] | None) -> None:
        """Install a plan; for good, or `until` something, asked on each call, that makes the function plan again."""
        if until is not None:
            kept = self._provisional(kept, until)
        else:
            self._by_policy.pop(kept.plan.policy, None)
            self._by_policy[kept.plan.policy] = kept
            if len(self._by_policy) > _PLANS_KEPT:
                gone = self._by_policy.pop(next(iter(self._by_policy)))
                self._plans = {s: k for s, k in self._plans.items() if k is not gone}
            self._plans = {s: k for s, k in self._plans.items() if k.plan.policy != kept.plan.policy}
            if len(self._plans) > _STATES_KEPT:
                self._plans.clear()
            self._plans[state] = kept
        self._boxed.known = {}
        self._install(kept)

    def _provisional(self, kept: Kept, until: Callable[[], int]) -> Kept:
        head, _, body = kept.source.partition('\n')
        name = f'_d_until{kept.serial}'
        self._namespace[name] = while_tracing(until)
        forward = self.signature.forward_all()
        again = f'        if _d_cold({kept.serial!r}) and _d_dyn(): _d_restart()\n        return _d_self({forward})'
        source = f'{head}\n    if {name}():\n{again}\n{body}'
        code = compile_source(self, source, f'provisional {self.serial()}').__code__
        # the body's names live as long as the code they were made for, so this code has to hold that one
        weakref.finalize(code, id, kept)
        drop_with(self, code, name)
        return Kept(kept.plan, code, source, kept.serial)

    def _complete(self) -> int:
        """Whether loading has finished since a provisional plan was made."""
        return int(self.dispatcher.discovery.load(self.operation))

    def _install(self, kept: Kept | None) -> None:
        """The code of a kept plan, or cold."""
        self._in_force = kept
        code, self._installed = (kept.code, kept.serial) if kept is not None else (self._cold, '')
        if self.wrapper.__code__ is not code:
            before = another_thread_compiles()
            self.wrapper.__code__ = code
            if before or another_thread_compiles():
                renew_after_compiling(self)

    def renew(self) -> None:
        """Have the code in force as another object, so that nobody's guard on it holds any longer."""
        with lock:
            kept = self._in_force
            old = self._cold if kept is None else kept.code
            code = old.replace()
            # the names of the old code are those of the new one
            weakref.finalize(code, id, old).atexit = False
            if kept is None:
                self._cold = code
            else:
                kept.code = code
            self.wrapper.__code__ = code

    def install(self, state: State) -> None:
        """Called under the lock, when the state changes: the kept code for it, else cold."""
        kept = self._plans.get(state)
        known = self._members
        if kept is None and known is not None and known[0] == self.dispatcher.generation(self.operation):
            # only members that are known: collecting them runs foreign code, and that never under the lock
            above = state.above(self.own) if self.own is not None else state
            policy = effective(above, self.operation, self.name, lambda tokens: any_match(known[1], tokens))
            kept = self._by_policy.get(policy)
            if kept is not None:
                self._plans[state] = kept
        self._install(kept)

    def forget_plans(self) -> None:
        """Called under the lock, when the backends change."""
        self._plans, self._by_policy, self._members = {}, {}, None
        self._install(None)
        self._boxed.known = {}

    def _need_platform(self, serial: str, platform: str) -> int:
        with lock:
            if platform not in self.platforms:
                self.platforms = (*self.platforms, platform)
        return self._plan_again(serial)

    # -- what generated code calls --------------------------------------------------------------------------------------

    def _offer(self, relevant: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        return torch.overrides.handle_torch_function(self.wrapper, relevant, *args, **kwargs)

    def _raise_no_backend(self, *args: Any, **kwargs: Any) -> Any:
        decision = self.explain(*args, **kwargs)
        raise NoBackendError.of(decision)

    # -- the public side --------------------------------------------------------------------------------------------------

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """See `fla.backends.runtime.explain`."""
        from fla.backends.runtime.explain import explain_entry

        return explain_entry(self, args, kwargs, platform=None)

    def resolve(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The callable that this call would run, for loops that make the same call again and again.

        Takes the public function's arguments. It is the caller's: no policy, toggle or verifier is asked again.

        Raises:
            NoBackendError: if no candidate accepts the call.
        """
        from fla.backends.runtime.explain import explain_entry

        decision = explain_entry(self, args, kwargs, platform=None)
        if decision.member is None:
            raise NoBackendError.of(decision)
        return self.direct(decision.member)

    def direct(self, member: Member) -> Callable[..., Any]:
        """A member's implementation with the public signature."""
        assert member.implementation is not None
        assert member.call is not None
        if member.call.identical:
            return member.implementation
        serial = self.serial()
        self._namespace[f'_d_direct{serial}'] = member.implementation
        source = f'{self.signature.header(self.name)}\n    return _d_direct{serial}({member.call.arguments})\n'
        function = compile_source(self, source, f'direct {serial}')
        function.__defaults__, function.__kwdefaults__ = self.signature.defaults()
        function.__doc__ = self.function.__doc__
        drop_with(self, function.__code__, f'_d_direct{serial}')
        return function

    def bind(self, backend: str | None = None, *, policy: Policy | None = None, **fields: Any) -> Callable[..., Any]:
        """A function of the same signature with a policy of its own, above every scope.

        Args:
            backend: the only backend that may run (name, kind, `vendor:NAME`, `impl:IMPL_ID`), overriding filters.
            policy: a whole policy instead.
            fields: fields of `Policy`, such as `prefer='tilelang'`.

        Raises:
            UnknownNameError: for a backend the operation does not have.
            DispatchError: for another order than a lock of the function, unless it names `backend`.
        """
        if policy is not None and (backend is not None or fields):
            raise TypeError('bind() takes either a policy or its fields, not both')
        if backend is None and policy is None and not fields:
            raise TypeError("bind() needs a backend, a policy, or fields of one such as prefer='tilelang'")
        if backend is not None:
            fields['use'] = (backend,) if isinstance(backend, str) else tuple(backend)
        policy = Policy(**fields) if policy is None else policy
        if not isinstance(policy, Policy):
            raise TypeError(f'policy must be a Policy, got {policy!r}')
        if policy.op is not None:
            self.dispatcher.check_operation(policy.op)
            if not policy.concerns(self.operation, self.name):
                raise ValueError(f'the policy is for {policy.op!r} and would say nothing of {self.key}')
        policy = replace(policy, op=self.key)
        self._check_bound(policy)
        entry = Entry(
            self.dispatcher,
            self.operation,
            self.name,
            self.function,
            self.signature,
            self.default,
            self.default_verifier,
            self.check,
            self.mutates,
            Layer(policy, 'bind()', of_call=True),
            self.platforms,
        )
        self.dispatcher.add(entry, public=False)
        return entry.wrapper

    def _check_bound(self, policy: Policy) -> None:
        """Raise for what nobody knows, for what says nothing of this function, and for what a lock stands against."""
        self.dispatcher.check_policy(policy)
        refuse_if_locked(policy, self.dispatcher.state().layers, of_call=True)
        own = (self.operation, self.key)
        idle = [f'{name}[{key!r}]' for name in ('order', 'lock') for key, _ in getattr(policy, name) if key not in own]
        idle += [f'boost[{glob!r}]' for glob, _ in policy.boost if not covers(glob, self.operation, self.name)]
        idle += [f'rules[{n}]' for n, rule in enumerate(policy.rules) if not rule.concerns(self.operation, self.name)]
        if idle:
            raise ValueError(f'bind(): {", ".join(idle)} would say nothing of {self.key}')
        for number, rule in enumerate(policy.rules):
            problems = rule.condition.problems(self.signature) if rule.condition else []
            if problems:
                raise UnknownNameError(f'bind(): rules[{number}]: {"; ".join(problems)}')

    def _announce(self, kept: Kept) -> None:
        """At plan time: the ordered candidates at INFO, and warnings for wishes that cannot come true."""
        hidden = overruled(self.state(), self.operation, self.name, self._serves)
        if hidden is not None:
            lock = hidden[0].policy.locked(self.operation, self.name)[1] is not None
            words = (
                'the lock of %s holds against %s'
                if lock
                else 'the order of %s replaces that of %s, its exclusivity included'
            )
            logs.warn_once(
                ('overruled', self.key, hidden),
                f'%s: {words}',
                self.key,
                hidden[0].source,
                hidden[1].source,
            )
        for platform, chain in kept.plan.chains.items():
            for c in chain:
                if c.wished and c.out is not None:
                    logs.warn_once(
                        ('unmet', self.key, c.member.name),
                        '%s: backend %r was asked for by %s and cannot run: %s',
                        self.key,
                        c.member.name,
                        kept.plan.policy.order_source,
                        format_reason(c.out[1]),
                    )
            if logs.logger.isEnabledFor(logging.INFO):
                names = [c.member.name for c in chain if c.out is None]
                out = [f'{c.member.name} ({format_reason(c.out[1])})' for c in chain if c.out is not None]
                logs.logger.info('%s on %s: candidates %s; out: %s', self.key, platform, names, '; '.join(out) or 'none')


# reached in eager from frames that Dynamo gave up on; tracing all that explains a call takes half a minute
never_a_frame(Entry._raise_no_backend, callees=True)
never_a_frame(Entry._ranged)


def _from_the_second_time() -> Callable[[], int]:
    """0 when first called, then 1."""
    calls = itertools.count()
    return lambda: min(next(calls), 1)
