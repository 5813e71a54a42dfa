"""The entry point that `@dispatch` makes.

The public function is one function object for life; its code changes:
    cold: `_d_cold(''); return _d_self(...)`; the first call, also inside a trace (which then begins anew), loads the
        backends and plans;
    hot: the plan as straight-line code (see `codegen`), swapped in with one store to `__code__`.
Dynamo guards the code of a function it inlines, so every re-plan is seen by compiled callers. The code for a policy is
cached, so that coming back to that policy costs a compiled caller nothing.

The code in force is the only record of what is in force: which plan it came from is looked up by the code itself.
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
from fla.backends.codegen.generator import source_of
from fla.backends.core import logs
from fla.backends.core.dynamo import another_thread_compiles, never_a_frame, renew_after_compiling, while_tracing
from fla.backends.core.errors import UnknownNameError
from fla.backends.core.locking import lock
from fla.backends.core.spec import FunctionSpec
from fla.backends.plan.decision import Decision, NoBackendError
from fla.backends.plan.members import any_match, collect
from fla.backends.plan.plan import Facts, Member, Plan, build
from fla.backends.policy.policy import Policy, covers
from fla.backends.policy.precedence import Layer, ResolvedPolicy, State, effective, overruled, refuse_if_locked
from fla.backends.runtime.dispatcher import Dispatcher
from fla.backends.runtime.explain import decide
from fla.backends.runtime.function import Namespace, attach, check_call, check_default, check_source, make_wrapper
from fla.backends.runtime.hooks import RuntimeHooks
from fla.backends.runtime.situation import Situation
from fla.backends.runtime.traced_scopes import TracedScopePlans

_serials = itertools.count()

# Plans cached per function, and states remembered to lead to one of them. Compiled callers are only as good as the plans
# that are cached, so this is generous; a plan is a few kilobytes.
_MOST_PLANS = 64
_MOST_STATES = 1024
# How often a plan that is out of date before it is finished is begun anew.
_MOST_ATTEMPTS = 20


def _new_serial() -> str:
    """A number that no plan and no function had before."""
    return str(next(_serials))


@dataclass(eq=False)
class Planned:
    """A plan with its code."""

    plan: Plan
    code: CodeType
    source: str
    serial: str


@dataclass(eq=False)
class Entry:
    """A dispatched function: its plans, and the function object that users hold.

    Attributes:
        spec: what it is.
        default: the default as a backend.
        own: the policy of a bound function, above every other.
        platforms: platforms of the calls so far.
        was_called: it has been planned for a call.
    """

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
    # whose plan a code object is; cold code is not listed
    _serials: weakref.WeakKeyDictionary[CodeType, str] = field(default_factory=weakref.WeakKeyDictionary, init=False)

    def __post_init__(self) -> None:
        spec, dispatcher = self.spec, self.dispatcher
        check_call(spec)
        check_default(spec)
        self.label = f'{dispatcher.namespace.split(".")[0]}::{spec.name}'
        self._hooks = functools.partial(RuntimeHooks, spec, dispatcher)
        self._traced = TracedScopePlans(dispatcher, spec.operation, self._make_traced, _new_serial)
        self._generation = dispatcher.generation(spec.operation)
        self.namespace = Namespace(spec)
        self.wrapper = make_wrapper(self.namespace, _new_serial())
        self._cold = self.wrapper.__code__
        self.namespace.globals.update(
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

    def __hash__(self) -> int:
        return id(self)

    # -- planning -----------------------------------------------------------------------------------------------------

    @property
    def globals(self) -> dict[str, Any]:
        """Globals of the generated code."""
        return self.namespace.globals

    def state(self) -> State:
        """The state this function is planned for."""
        return self._above(self.dispatcher.policies.state)

    def _above(self, state: State) -> State:
        return state.above(self.own) if self.own is not None else state

    def policy(self, state: State) -> ResolvedPolicy:
        """The policy in force for this function under a state."""
        return effective(state, self.spec.operation, self.spec.name, self._any_match)

    def _any_match(self, tokens: tuple[str, ...]) -> bool:
        return any_match(self.members(), tokens)

    def members(self) -> tuple[Member, ...]:
        """Every backend with a method of this name, and the default, by priority."""
        dispatcher, operation = self.dispatcher, self.spec.operation
        generation = dispatcher.generation(operation)
        known = self._members
        if known is None or known[0] != generation:
            found = dispatcher.registries.registrations(operation)
            members = collect(self.spec, self.default, found, dispatcher.toggles, dispatcher.check_methods)
            known = self._members = generation, members
        return known[1]

    def facts(self, policy: ResolvedPolicy) -> Facts:
        """What planning asks of this machine."""
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
        return build(self.spec.signature, self.members(), policy, self.platforms, self.facts(policy))

    def _generate(self, plan: Plan, *, in_trace: bool = False) -> Planned:
        """A plan with its code; `in_trace` for a scope entered in a trace, whose code looks at no further such scopes."""
        serial, namespace, spec = _new_serial(), self.namespace, self.spec
        generator = Call(spec.signature, plan, serial, self._hooks(), key=spec.key, label=self.label, virtual=not in_trace)
        source = source_of(generator, spec.name, check_source(spec, plan.policy))
        namespace.globals.update(generator.w.bindings)
        ranged = f'_d_ranged{serial}'
        namespace.globals[ranged] = functools.partial(self._ranged, plan, serial)
        code = namespace.compile(source, f'plan {serial}').__code__
        self._serials[code] = serial
        # a frame that still runs this code may need its names: they go when the code does
        namespace.drop_with(code, *generator.w.bindings, ranged)
        return Planned(plan, code, source, serial)

    def _make_traced(self, state: State) -> tuple[FunctionType, str]:
        made = self._generate(self.plan(self._above(state)), in_trace=True)
        positional, keyword = self.spec.signature.defaults()
        function = FunctionType(made.code, self.namespace.globals, self.spec.name, positional)
        function.__kwdefaults__ = keyword
        return function, made.serial

    def _ranged(self, plan: Plan, of: str, *args: Any, **kwargs: Any) -> Any:
        """First call while a profiler is active: make the variant of the plan `of` that serial that opens a range."""
        serial, name, namespace, spec = _new_serial(), f'_d_ranged{of}', self.namespace, self.spec
        generator = Call(
            spec.signature, plan, serial, self._hooks(), key=spec.key, label=self.label, ranges=True, virtual=False
        )
        generator.asks = of  # it is the plan that is in force
        source = source_of(generator, spec.name, check_source(spec, plan.policy))
        namespace.globals.update(generator.w.bindings)
        function = namespace.compile_whole(source, f'ranges {serial}')
        namespace.drop_with(function.__code__, *generator.w.bindings)
        if name in namespace.globals:
            namespace.globals[name] = function
        return function(*args, **kwargs)

    def _plan_again(self, serial: str) -> int:
        """Plan for the state in force and install the code. Never holds the lock while foreign code runs.

        Args:
            serial: whose code asks: of a plan, '' when cold. Where that one has been replaced meanwhile (by another thread;
                by the first attempt of a trace that began with it), there is nothing to do.

        Returns:
            Whether something was planned.
        """
        dispatcher, operation = self.dispatcher, self.spec.operation
        dispatcher.control.settle()
        if serial != self._serials.get(self.wrapper.__code__, '') and not self._traced.has(serial):
            with lock:  # until another thread's new code is in place: else it would be asked for again and again
                return 0
        self.was_called = True
        for attempt in itertools.count():
            complete = dispatcher.discovery.load(operation)
            now = dispatcher.policies.now
            if complete:
                dispatcher.policies.check_environment_once()
            generation = dispatcher.generation(operation)
            # for this state and no newer one: a scope that came and went meanwhile would leave its plan under this one
            made = self._generate(self.plan(self._above(now.state)))
            with lock:
                unchanged = dispatcher.policies.state == now.state and dispatcher.generation(operation) == generation
                if unchanged:
                    self._keep(now.state, made, None if complete else self._complete)
                    break
                if attempt == _MOST_ATTEMPTS:
                    # changed as fast as it is planned: serve this call, plan again on the next
                    self._keep(now.state, made, _from_the_second_time())
                    break
        if not unchanged:
            logs.warn_once(
                ('restless', self.spec.key),
                '%s: backends or policy changed %d times while it was planned. If an is_available, probe or is_enabled '
                'changes its own backend or the policy, it must not.',
                self.spec.key,
                attempt,
            )
        self._announce(made)
        return 1

    def _keep(self, state: State, made: Planned, until: Callable[[], int] | None) -> None:
        """Install a plan; for good, or `until` a function that is asked on each call makes the function plan again."""
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
        name, namespace = f'_d_until{made.serial}', self.namespace
        namespace.globals[name] = while_tracing(until)
        forward = self.spec.signature.forward_all()
        again = f'        if _d_cold({made.serial!r}) and _d_dyn(): _d_restart()\n        return _d_self({forward})'
        source = f'{head}\n    if {name}():\n{again}\n{body}'
        code = namespace.compile(source, f'provisional {_new_serial()}').__code__
        self._serials[code] = made.serial
        # the body's names live as long as the code they were made for, so this code has to hold that one
        weakref.finalize(code, id, made)
        namespace.drop_with(code, name)
        return Planned(made.plan, code, source, made.serial)

    def _complete(self) -> int:
        """Whether loading has finished since a provisional plan was made."""
        return int(self.dispatcher.discovery.load(self.spec.operation))

    def _install(self, code: CodeType) -> None:
        if self.wrapper.__code__ is not code:
            before = another_thread_compiles()
            self.wrapper.__code__ = code
            if before or another_thread_compiles():
                renew_after_compiling(self)

    def renew(self) -> None:
        """Have the code in force as another object, so that guards on the old one no longer hold."""
        with lock:
            old = self.wrapper.__code__
            code = old.replace()
            serial = self._serials.get(old)
            if serial is not None:
                self._serials[code] = serial
            # the names of the old code are those of the new one
            weakref.finalize(code, id, old).atexit = False
            for made in self._by_policy.values():
                if made.code is old:
                    made.code = code
            if self._cold is old:
                self._cold = code
            self.wrapper.__code__ = code

    def adopt(self, now: Situation) -> None:
        """Called under the lock when the situation changes: the cached code for it, else cold."""
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
            # only members that are known: collecting them runs foreign code, and that never under the lock
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
        """What a call would run and why; for another platform, or under another state than the one in force."""
        return decide(self, args, kwargs, platform, state)

    def explain(self, *args: Any, **kwargs: Any) -> Decision:
        """What this call would run and why; see `fla.backends.explain`."""
        return self.decide(args, kwargs)

    def resolve(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The callable that this call would run, for loops that make the same call again and again.

        Takes the public function's arguments. It is the caller's: no policy, toggle or verifier is asked again.

        Raises:
            NoBackendError: if no candidate accepts the call.
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
        name, spec = f'_d_direct{_new_serial()}', self.spec
        self.namespace.globals[name] = member.implementation
        source = f'{spec.signature.header(spec.name)}\n    return {name}({member.call.arguments})\n'
        function = self.namespace.compile_whole(source, name)
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
            self.dispatcher.catalogue.check_operation(policy.op)
            if not policy.concerns(self.spec.operation, self.spec.name):
                raise ValueError(f'the policy is for {policy.op!r} and would say nothing of {self.spec.key}')
        policy = replace(policy, op=self.spec.key)
        self._check_bound(policy)
        entry = Entry(self.dispatcher, self.spec, self.default, Layer(policy, 'bind()', of_call=True), self.platforms)
        self.dispatcher.catalogue.add(entry, public=False)
        return entry.wrapper

    def _check_bound(self, policy: Policy) -> None:
        """Raises for unknown names, for fields that say nothing of this function, and for orders against a lock."""
        policies, spec = self.dispatcher.policies, self.spec
        policies.check_policy(policy)
        refuse_if_locked(policy, policies.state.layers, of_call=True)
        own = (spec.operation, spec.key)
        idle = [f'{name}[{key!r}]' for name in ('order', 'lock') for key, _ in getattr(policy, name) if key not in own]
        idle += [f'boost[{glob!r}]' for glob, _ in policy.boost if not covers(glob, spec.operation, spec.name)]
        idle += [f'rules[{n}]' for n, rule in enumerate(policy.rules) if not rule.concerns(spec.operation, spec.name)]
        if idle:
            raise ValueError(f'bind(): {", ".join(idle)} would say nothing of {spec.key}')
        for number, rule in enumerate(policy.rules):
            problems = rule.condition.problems(spec.signature) if rule.condition else []
            if problems:
                raise UnknownNameError(f'bind(): rules[{number}]: {"; ".join(problems)}')

    def _announce(self, made: Planned) -> None:
        """At plan time: the ordered candidates at INFO, and warnings for wishes that cannot come true."""
        key = self.spec.key
        hidden = overruled(self.state(), self.spec.operation, self.spec.name, self._any_match)
        if hidden is not None:
            locked = hidden[0].policy.locked(self.spec.operation, self.spec.name)[1] is not None
            words = (
                'the lock of %s holds against %s'
                if locked
                else 'the order of %s replaces that of %s, its exclusivity included'
            )
            logs.warn_once(('overruled', key, hidden), f'%s: {words}', key, hidden[0].source, hidden[1].source)
        for platform, chain in made.plan.chains.items():
            for c in chain:
                if c.wished and c.out is not None:
                    logs.warn_once(
                        ('unmet', key, c.member.name),
                        '%s: backend %r was asked for by %s and cannot run: %s',
                        key,
                        c.member.name,
                        made.plan.policy.order_source,
                        format_reason(c.out[1]),
                    )
            if logs.logger.isEnabledFor(logging.INFO):
                names = [c.member.name for c in chain if c.out is None]
                out = [f'{c.member.name} ({format_reason(c.out[1])})' for c in chain if c.out is not None]
                logs.logger.info('%s on %s: candidates %s; out: %s', key, platform, names, '; '.join(out) or 'none')


# reached in eager from frames that Dynamo gave up on; tracing all that explains a call takes half a minute
never_a_frame(Entry._raise_no_backend, callees=True)
never_a_frame(Entry._ranged)


def _from_the_second_time() -> Callable[[], int]:
    """0 when first called, then 1."""
    calls = itertools.count()
    return lambda: min(next(calls), 1)
