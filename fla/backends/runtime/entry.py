"""The entry point that `@dispatch` makes.

The public function stays the same function object; its code changes:
    cold: `_d_cold(''); return _d_self(...)`: the first call loads the backends and plans, also inside a trace, which then
        restarts;
    hot: the plan as straight-line code (see `codegen`), installed with one store to `__code__`.
Dynamo guards the code of a function that it inlines, so a new plan invalidates compiled callers. The code for a policy is
cached, so a compiled caller that returns to that policy does not recompile.

The installed code is the only record of the plan in force: `_serials` maps code to plan.
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

from fla.backends.backend.base import BaseBackend, format_reason
from fla.backends.codegen.call import Call
from fla.backends.core import logs
from fla.backends.core.dynamo import another_thread_compiles, never_a_frame, renew_after_compiling, while_tracing
from fla.backends.core.errors import UnknownNameError
from fla.backends.core.locking import lock
from fla.backends.core.spec import FunctionSpec
from fla.backends.plan.decision import Decision, NoBackendError
from fla.backends.plan.members import any_match, collect
from fla.backends.plan.plan import Facts, Member, Plan, build
from fla.backends.policy.policy import Policy, covers
from fla.backends.policy.precedence import Layer, ResolvedPolicy, State, effective, overruled
from fla.backends.runtime.dispatcher import Dispatcher
from fla.backends.runtime.explain import decide
from fla.backends.runtime.function import Namespace, attach, check_parameters, check_source, make_wrapper
from fla.backends.runtime.hooks import RuntimeHooks
from fla.backends.runtime.situation import Situation
from fla.backends.runtime.traced_scopes import TracedScopePlans

# numbers plans and generated functions
_counter = itertools.count()

# Plans cached per function, and states that map to one of them. An evicted plan makes compiled callers recompile, so the
# limits are generous; a plan is a few kilobytes.
_MOST_PLANS = 64
_MOST_STATES = 1024
# Attempts at a plan that is out of date before it is finished.
_MOST_ATTEMPTS = 20


@dataclass(eq=False)
class Planned:
    """A plan with its code."""

    plan: Plan
    code: CodeType
    source: str
    serial: str


@dataclass(eq=False)
class Entry:
    """A dispatched function: its plans, and the function object that users hold. Attributes: see `LiveFunction`."""

    dispatcher: Dispatcher
    spec: FunctionSpec
    default: BaseBackend
    own: Layer | None = None
    platforms: tuple[str, ...] = ()
    was_called: bool = False
    wrapper: FunctionType = field(init=False)
    namespace: Namespace = field(init=False)
    _plans: dict[State, Planned] = field(default_factory=dict, init=False)
    _by_policy: dict[ResolvedPolicy, Planned] = field(default_factory=dict, init=False)
    _members: tuple[int, tuple[Member, ...]] | None = field(default=None, init=False)
    # serial of each code object's plan; cold code has none
    _serials: weakref.WeakKeyDictionary[CodeType, str] = field(default_factory=weakref.WeakKeyDictionary, init=False)

    def __post_init__(self) -> None:
        spec, dispatcher = self.spec, self.dispatcher
        check_parameters(spec)
        self.label = f'{dispatcher.namespace.split(".")[0]}::{spec.name}'
        self._traced = TracedScopePlans(dispatcher, spec.operation, self._make_traced)
        self._generation = dispatcher.control.now.generation(spec.operation)
        self.namespace = Namespace(spec)
        self.wrapper = make_wrapper(self.namespace, str(next(_counter)))
        self._cold = self.wrapper.__code__
        self.globals.update(
            _d_box=self._traced.box,
            _d_cold=while_tracing(self._plan_again),
            _d_need=while_tracing(self._need_platform),
            _d_none=self._raise_no_backend,
            _d_offer=self._offer,
            _d_select=while_tracing(self._traced.select),
            _d_self=self.wrapper,
            _d_virtual=dispatcher.scopes_in_trace,
        )
        attach(self.wrapper, self)

    # -- planning -----------------------------------------------------------------------------------------------------

    @property
    def globals(self) -> dict[str, Any]:
        return self.namespace.globals

    def state(self) -> State:
        return self._above(self.dispatcher.policies.state)

    def _above(self, state: State) -> State:
        return state.above(self.own) if self.own is not None else state

    def policy(self, state: State) -> ResolvedPolicy:
        return effective(state, self.spec.operation, self.spec.name, self._any_match)

    def _any_match(self, tokens: tuple[str, ...]) -> bool:
        return any_match(self.members(), tokens)

    def members(self) -> tuple[Member, ...]:
        """Every backend with a method of this name, and the default, by priority."""
        dispatcher, operation = self.dispatcher, self.spec.operation
        generation = dispatcher.control.now.generation(operation)
        known = self._members
        if known is None or known[0] != generation:
            found = dispatcher.registries.registrations(operation)
            members = collect(self.spec, self.default, found, dispatcher.toggles, dispatcher.check_methods)
            known = self._members = generation, members
        return known[1]

    def facts(self, policy: ResolvedPolicy) -> Facts:
        dispatcher = self.dispatcher
        return Facts(
            package=dispatcher.availability.package,
            device=dispatcher.availability.device,
            devices=dispatcher.device_facts,
            gate=lambda backend: dispatcher.gate(backend, policy),
        )

    def plan(self, state: State) -> Plan:
        """The ordered candidates under a state, for the platforms of the calls so far."""
        policy = self.policy(state)
        return build(self.spec.signature, self.members(), policy, self.platforms, self.facts(policy))

    def _write(self, plan: Plan, serial: str, *, asks: str | None = None, virtual: bool = True) -> tuple[str, list[str]]:
        """Source of a plan, and the names that it adds to the globals.

        Args:
            asks: the plan in force, for its variant that opens a profiler range.
            virtual: whether the code looks at scopes that were entered in a trace.
        """
        spec, hooks, ranges = self.spec, RuntimeHooks(self.spec, self.dispatcher), asks is not None
        generator = Call(spec.signature, plan, serial, hooks, key=spec.key, label=self.label, ranges=ranges, virtual=virtual)
        generator.asks = asks or serial
        source = generator.source(spec.name, check_source(spec, plan.policy))
        self.globals.update(generator.w.bindings)
        return source, list(generator.w.bindings)

    def _generate(self, plan: Plan, *, virtual: bool = True) -> Planned:
        """A plan with its code."""
        serial = str(next(_counter))
        source, names = self._write(plan, serial, virtual=virtual)
        ranged = f'_d_ranged{serial}'
        self.globals[ranged] = functools.partial(self._ranged, plan, serial)
        code = self.namespace.compile(source, f'plan {serial}').__code__
        self._serials[code] = serial
        # a frame that still runs this code may need its names: they live as long as the code
        self.namespace.drop_with(code, *names, ranged)
        return Planned(plan, code, source, serial)

    def _make_traced(self, state: State) -> tuple[FunctionType, str]:
        """The function for a scope entered in a trace; its code looks at no further such scopes."""
        made = self._generate(self.plan(self._above(state)), virtual=False)
        positional, keyword = self.spec.signature.defaults()
        function = FunctionType(made.code, self.globals, self.spec.name, positional)
        function.__kwdefaults__ = keyword
        return function, made.serial

    def _ranged(self, plan: Plan, of: str, *args: Any, **kwargs: Any) -> Any:
        """Makes and calls the variant of plan `of` that opens a profiler range; runs on its first call under a profiler."""
        serial, name = str(next(_counter)), f'_d_ranged{of}'
        source, names = self._write(plan, serial, asks=of, virtual=False)
        function = self.namespace.compile(source, f'ranges {serial}')
        self.namespace.drop_with(function.__code__, *names)
        if name in self.globals:
            self.globals[name] = function
        return function(*args, **kwargs)

    def _plan_again(self, serial: str) -> int:
        """Plan for the state in force and install the code; returns whether it planned. Never holds the lock while foreign
        code runs.

        Args:
            serial: the plan whose code asks; '' for cold code. If that code has been replaced meanwhile (by another thread,
                or by the first attempt of a trace that began with it), nothing is planned.
        """
        dispatcher, control, operation = self.dispatcher, self.dispatcher.control, self.spec.operation
        control.settle()
        if serial != self._serials.get(self.wrapper.__code__, '') and not self._traced.has(serial):
            with lock:  # waits until another thread has installed its code; without it, callers would ask in a loop
                return 0
        self.was_called = True
        for attempt in itertools.count():
            complete = dispatcher.discovery.load(operation)
            now = dispatcher.policies.now
            if complete:
                dispatcher.policies.check_environment_once()
            generation = control.now.generation(operation)
            # for exactly this state: a scope that is entered and left meanwhile must not store its plan under this state
            made = self._generate(self.plan(self._above(now.state)))
            with lock:
                unchanged = dispatcher.policies.state == now.state and control.now.generation(operation) == generation
                if unchanged or attempt == _MOST_ATTEMPTS:
                    # an outdated plan serves this call only; one made during loading serves until loading has finished
                    until = None if complete else lambda: int(dispatcher.discovery.load(operation))
                    self._store(now.state, made, until if unchanged else _from_the_second_time())
                    break
        if not unchanged:
            logs.warn_once(
                ('restless', self.spec.key),
                '%s: backends or policy changed %d times while it was planned. is_available, probe and is_enabled must not '
                'change their own backend or the policy.',
                self.spec.key,
                attempt,
            )
        self._log_plan(made)
        return 1

    def _store(self, state: State, made: Planned, until: Callable[[], int] | None) -> None:
        """Install a plan. With `until`, each call first asks this function, and plans again if it returns 1."""
        if until is not None:
            made = self._provisional(made, until)
        else:
            policy = made.plan.policy
            self._by_policy.pop(policy, None)
            self._by_policy[policy] = made
            if len(self._by_policy) > _MOST_PLANS:
                gone = self._by_policy.pop(next(iter(self._by_policy)))
                self._plans = {s: k for s, k in self._plans.items() if k is not gone}
            self._plans = {s: k for s, k in self._plans.items() if k.plan.policy != policy}
            if len(self._plans) > _MOST_STATES:
                self._plans.clear()
            self._plans[state] = made
        self._traced.forget()
        self._install(made.code)

    def _provisional(self, made: Planned, until: Callable[[], int]) -> Planned:
        head, _, body = made.source.partition('\n')
        name = f'_d_until{made.serial}'
        self.globals[name] = while_tracing(until)
        forward = self.spec.signature.forward_all()
        again = f'        if _d_cold({made.serial!r}) and _d_dyn(): _d_restart()\n        return _d_self({forward})'
        source = f'{head}\n    if {name}():\n{again}\n{body}'
        code = self.namespace.compile(source, f'provisional {next(_counter)}').__code__
        self._serials[code] = made.serial
        # the body's names live as long as the original code, so this code holds that one
        weakref.finalize(code, id, made)
        self.namespace.drop_with(code, name)
        return Planned(made.plan, code, source, made.serial)

    def _install(self, code: CodeType) -> None:
        if self.wrapper.__code__ is not code:
            before = another_thread_compiles()
            self.wrapper.__code__ = code
            if before or another_thread_compiles():
                renew_after_compiling(self)

    def renew(self) -> None:
        """Replace the installed code by a copy, so that guards on the old object fail."""
        with lock:
            old = self.wrapper.__code__
            code = old.replace()
            serial = self._serials.get(old)
            if serial is not None:
                self._serials[code] = serial
            # the copy uses the old code's names
            weakref.finalize(code, id, old).atexit = False
            for made in self._by_policy.values():
                if made.code is old:
                    made.code = code
            if self._cold is old:
                self._cold = code
            self.wrapper.__code__ = code

    def adopt(self, now: Situation) -> None:
        """Install the cached code for a new situation, else the cold code. Called under the lock."""
        generation = now.generation(self.spec.operation)
        if generation != self._generation:
            self._plans, self._by_policy, self._members = {}, {}, None
            self._traced.forget()
            self._install(self._cold)
            self._generation = generation
            return
        made = self._plans.get(now.state)
        known = self._members
        if made is None and known is not None and known[0] == generation:
            # only cached members: collecting them runs foreign code, which must not run under the lock
            members = known[1]
            policy = effective(
                self._above(now.state), self.spec.operation, self.spec.name, lambda tokens: any_match(members, tokens)
            )
            made = self._by_policy.get(policy)
            if made is not None:
                self._plans[now.state] = made
        self._install(made.code if made is not None else self._cold)

    def _need_platform(self, serial: str, platform: str) -> int:
        with lock:
            if platform not in self.platforms:
                self.platforms = (*self.platforms, platform)
        return self._plan_again(serial)

    # -- called by generated code -----------------------------------------------------------------------------------------

    def _offer(self, relevant: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        return torch.overrides.handle_torch_function(self.wrapper, relevant, *args, **kwargs)

    def _raise_no_backend(self, *args: Any, **kwargs: Any) -> Any:
        raise NoBackendError.of(self.decide(args, kwargs))

    # -- the public side --------------------------------------------------------------------------------------------------

    def decide(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], platform: Any = None, state: State | None = None
    ) -> Decision:
        """Explains a call, for another platform or state if given."""
        return decide(self, args, kwargs, platform, state)

    def explain(self, *args: Any, **kwargs: Any) -> Decision:
        """Which backend this call would run and why; see `fla.backends.explain`."""
        return self.decide(args, kwargs)

    def resolve(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The implementation that this call would run, with the public signature, for loops that repeat a call.

        It no longer depends on policies, toggles or verifiers. Raises NoBackendError if no candidate accepts the call.
        """
        decision = self.decide(args, kwargs)
        if decision.member is None:
            raise NoBackendError.of(decision)
        return self.direct(decision.member)

    def direct(self, member: Member) -> Callable[..., Any]:
        """A member's implementation with the public signature."""
        assert member.implementation is not None
        assert member.call is not None
        if member.call.identical:
            return member.implementation
        name, spec = f'_d_direct{next(_counter)}', self.spec
        self.globals[name] = member.implementation
        source = f'{spec.signature.header(spec.name)}\n    return {name}({member.call.arguments})\n'
        function = self.namespace.compile(source, name)
        function.__doc__ = spec.default.__doc__
        self.namespace.drop_with(function.__code__, name)
        return function

    def bind(self, backend: str | None = None, *, policy: Policy | None = None, **fields: Any) -> Callable[..., Any]:
        """A function of the same signature with a policy of its own, above every scope.

        Args:
            backend: the only backend that may run (name, kind, `vendor:NAME`, `impl:IMPL_ID`), overriding filters.
            policy: a whole policy instead.
            fields: fields of `Policy`, such as `prefer='tilelang'`.

        Raises:
            UnknownNameError: for a backend that the operation does not have.
            DispatchError: for an order that contradicts a lock of the function, unless `backend` is given.
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
            self.dispatcher.catalogue.check_operation(policy.op)
            if not policy.concerns(self.spec.operation, self.spec.name):
                raise ValueError(f'the policy is for {policy.op!r} and does not concern {self.spec.key}')
        policy = replace(policy, op=self.spec.key)
        self._check_bound(policy)
        entry = Entry(self.dispatcher, self.spec, self.default, Layer(policy, 'bind()', of_call=True), self.platforms)
        self.dispatcher.catalogue.add(entry, public=False)
        return entry.wrapper

    def _check_bound(self, policy: Policy) -> None:
        """Raises for unknown names, for fields that do not concern this function, and for orders that contradict a lock."""
        spec = self.spec
        self.dispatcher.policies.check_scope(policy)
        own = (spec.operation, spec.key)
        idle = [f'{name}[{key!r}]' for name in ('order', 'lock') for key, _ in getattr(policy, name) if key not in own]
        idle += [f'boost[{glob!r}]' for glob, _ in policy.boost if not covers(glob, spec.operation, spec.name)]
        idle += [f'rules[{n}]' for n, rule in enumerate(policy.rules) if not rule.concerns(spec.operation, spec.name)]
        if idle:
            raise ValueError(f'bind(): {", ".join(idle)} does not concern {spec.key}')
        for number, rule in enumerate(policy.rules):
            problems = rule.condition.problems(spec.signature) if rule.condition else []
            if problems:
                raise UnknownNameError(f'bind(): rules[{number}]: {"; ".join(problems)}')

    def _log_plan(self, made: Planned) -> None:
        """Logs the ordered candidates at INFO, and a warning for each requested backend that cannot run."""
        operation, name, key = self.spec.operation, self.spec.name, self.spec.key
        hidden = overruled(self.state(), operation, name, self._any_match)
        if hidden is not None:
            locked = hidden[0].policy.locked(operation, name)[1] is not None
            words = 'lock of %s holds against %s' if locked else 'order of %s replaces that of %s, its exclusivity included'
            logs.warn_once(('overruled', key, hidden), f'%s: the {words}', key, hidden[0].source, hidden[1].source)
        for platform, chain in made.plan.chains.items():
            reasons = [(c, format_reason(c.out[1])) for c in chain if c.out is not None]
            for backend, reason in [(c.member.name, reason) for c, reason in reasons if c.wished]:
                text = '%s: backend %r was asked for by %s and cannot run: %s'
                logs.warn_once(('unmet', key, backend), text, key, backend, made.plan.policy.order_source, reason)
            if logs.logger.isEnabledFor(logging.INFO):
                names = [c.member.name for c in chain if c.out is None]
                out = [f'{c.member.name} ({reason})' for c, reason in reasons]
                logs.logger.info('%s on %s: candidates %s; out: %s', key, platform, names, '; '.join(out) or 'none')


# reached in eager from frames that Dynamo gave up on; tracing the code that explains a call takes half a minute
never_a_frame(Entry._raise_no_backend, callees=True)
never_a_frame(Entry._ranged)


def _from_the_second_time() -> Callable[[], int]:
    """A function that returns 0 on its first call, then 1."""
    calls = itertools.count()
    return lambda: min(next(calls), 1)
