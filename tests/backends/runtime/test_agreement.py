"""The rules, `explain`, the eager call and the compiled call agree, for any registry, environment, policy and call.

`expected` implements the rules of dispatch a second time, as a plain loop over plain data. It shares no code with the
framework.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fla.backends import BackendRegistry, BaseBackend, Policy, default_dispatcher, explain, policy_context, set_policy
from fla.backends.core import logs
from tests.backends.toy import Toy

NAMES = ('a', 'b', 'c', 'd')
# 'idle' is registered but has no method f: a known name that cannot serve f
KNOWN = ('idle', 'default', 'triton', 'VENDOR', 'native', 'reference', 'vendor:NV', 'vendor:other')
SPELLINGS = {None: None, '1': True, ' On': True, '0': False, 'FALSE': False, 'maybe': None, '': None}


# -- what is drawn ----------------------------------------------------------------------------------------------------------


@dataclass
class Drawn:
    """A drawn backend."""

    name: str
    kind: str
    vendor: str | None
    everywhere: bool
    priority: int
    default_enable: bool
    has_toggle: bool
    toggle: str | None
    available: bool
    devices: tuple | None
    dtypes: tuple | None
    grad: str
    lacks: tuple
    verifier: str
    prefers: str


@dataclass
class Layer:
    """A policy as plain lists."""

    source: str
    use: tuple = ()
    prefer: tuple = ()
    only: tuple | None = None
    allow: tuple | None = None
    deny: tuple = ()
    strict: bool | None = None
    require_first: bool | None = None


@dataclass
class Call:
    """The arguments of a call of f."""

    k: int
    dtype: torch.dtype
    requires_grad: bool
    grad_enabled: bool
    scale: float | None
    flag: bool


@dataclass
class World:
    """Everything that a selection depends on."""

    backends: list
    default_verifier: str
    scopes: list
    code: Layer | None
    env: dict
    calls: list = field(default_factory=list)


def yes_or_no(*few):
    """Draws a boolean, mostly the first value."""
    return st.sampled_from([few[0]] * 3 + list(few))


VERIFIERS = ('none', 'yes', 'no', 'k8', 'noflag', 'scale', 'raises', 'true', 'none returned', 'one', 'list')

backends = st.builds(
    Drawn,
    name=st.just(''),
    kind=st.sampled_from(['vendor', 'vendor', 'native', 'reference']),
    vendor=st.sampled_from([None, 'NV', 'Other']),
    everywhere=yes_or_no(False, True),
    priority=st.sampled_from([1, 3, 5, 5, 5, 100, 101]),
    default_enable=yes_or_no(True, False),
    has_toggle=st.booleans(),
    toggle=st.sampled_from([None, None, None, *SPELLINGS]),
    available=yes_or_no(True, False),
    devices=yes_or_no(None, ('cpu',), ('cuda', 'rocm'), ('cuda', 'cpu')),
    dtypes=yes_or_no(None, (torch.float32,), (torch.float16, torch.float64)),
    grad=yes_or_no('backward', 'none'),
    lacks=yes_or_no((), ('flag',), ('scale',), ('scale', 'flag')),
    verifier=st.sampled_from(VERIFIERS),
    prefers=yes_or_no('none', 'yes', 'no', 'k8', 'raises'),
)


def some(words, most, least=1):
    return st.lists(st.sampled_from(words), min_size=least, max_size=most).map(tuple)


def layer(source, words):
    """Draws a policy with one or several settings."""
    make = partial(st.builds, Layer, st.just(source))
    return st.one_of(
        make(use=some(words, 2)),
        make(prefer=some(words, 2)),
        make(prefer=some(words, 2)),
        make(only=some(words, 3)),
        make(allow=some(words, 4, least=0)),
        make(deny=some(words, 2)),
        make(strict=st.booleans()),
        make(require_first=st.booleans()),
        make(prefer=some(words, 2), deny=some(words, 1), strict=st.booleans()),
    )


def environments(words):
    whole = st.fixed_dictionaries(
        {},
        optional={
            'PER_OP': some(words, 3),
            'PREFER': some(words, 2),
            'ALLOW_BACKENDS': some(words, 6, least=0),
            'DENY_BACKENDS': some(words, 2),
            'STRICT': st.sampled_from(['1', '0', 'off', 'maybe']),
            'REQUIRE_FIRST': st.sampled_from(['yes', 'no', '']),
        },
    )
    return st.one_of(whole, st.just({}), whole.map(lambda env: dict(list(env.items())[:1])))


calls = st.builds(
    Call,
    k=st.sampled_from([8, 4]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64]),
    requires_grad=st.booleans(),
    grad_enabled=yes_or_no(True, False),
    scale=yes_or_no(None, 0.5),
    flag=yes_or_no(False, True),
)


@st.composite
def worlds(draw):
    drawn = draw(st.lists(backends, max_size=4))
    for name, backend in zip(NAMES, drawn, strict=False):
        backend.name = name
    words = (*KNOWN, *(b.name for b in drawn), *(f'impl:{b.kind}.{b.name.upper()}' for b in drawn))
    world = World(
        backends=drawn,
        default_verifier=draw(st.sampled_from(['none', 'none', 'none', 'k8', 'no', 'noflag', 'raises', 'one'])),
        scopes=draw(st.lists(layer('policy_context()', words), max_size=2)),
        code=draw(st.none() | layer('set_policy()', words)),
        env=draw(environments(words)),
        calls=draw(st.lists(calls, min_size=1, max_size=3)),
    )
    # combinations that random draws rarely give
    leaning = draw(st.sampled_from(['nothing', 'nothing', 'strict wishes', 'demotion']))
    if leaning == 'strict wishes':
        world.scopes.append(Layer('policy_context()', prefer=draw(some(words, 3)), strict=True))
    elif leaning == 'demotion':
        world.default_verifier = 'no'
        for b in drawn:
            b.prefers = draw(yes_or_no('no', 'yes', 'k8'))
            b.verifier = draw(yes_or_no('none', 'k8', 'noflag'))
    return world


# -- the rules, once more ---------------------------------------------------------------------------------------------------


def ask(question, call):
    """Returns a verifier's answer, 'yes', 'no' or 'bug', and its reason."""
    return {
        'none': ('yes', None),
        'yes': ('yes', None),
        'list': ('yes', None),
        'no': ('no', 'never'),
        'k8': ('yes', None) if call.k == 8 else ('no', f'K must be 8, got {call.k}'),
        'noflag': ('no', 'no flag') if call.flag else ('yes', None),
        'scale': ('yes', None) if call.scale is None else ('no', 'no scale'),
    }.get(question, ('bug', None))


@dataclass
class Member:
    """A candidate, with the facts that the rules read."""

    name: str
    kind: str
    vendor: str | None
    drawn: Drawn | None

    def is_named(self, token):
        token = token.casefold()
        token = 'default' if token == 'triton' else token
        if token.startswith('vendor:'):
            return self.vendor is not None and token == f'vendor:{self.vendor.casefold()}'
        if token.startswith('impl:'):
            return token == f'impl:{self.kind}.{self.name}'
        return token in (self.name, self.kind)


def by_priority(world):
    ranked = []
    for place, b in enumerate(world.backends):
        priority = 1000 if b.kind == 'reference' and b.priority == 5 else b.priority
        ranked.append(((priority, b.everywhere, place), Member(b.name, b.kind, b.vendor, b)))
    ranked.append(((100, 2, 0), Member('default', 'default', None, None)))
    return [member for _, member in sorted(ranked, key=lambda row: row[0])]


def layers_of(world):
    layers = list(reversed(world.scopes)) + ([world.code] if world.code else [])
    env = world.env
    booleans = {'1': True, 'yes': True, '0': False, 'off': False, 'no': False}
    if 'PER_OP' in env:
        layers.append(Layer('FLA_PER_OP', only=env['PER_OP']))
    if 'PREFER' in env:
        layers.append(Layer('FLA_PREFER', prefer=env['PREFER']))
    layers.append(Layer('FLA_ALLOW_BACKENDS', allow=env.get('ALLOW_BACKENDS')))
    layers.append(Layer('FLA_DENY_BACKENDS', deny=env.get('DENY_BACKENDS', ())))
    layers.append(Layer('FLA_STRICT', strict=booleans.get(env.get('STRICT'))))
    layers.append(Layer('FLA_REQUIRE_FIRST', require_first=booleans.get(env.get('REQUIRE_FIRST'))))
    return layers


def speaks(layer, members):
    """Returns (verb, tokens) of a layer's order, or None. A forced choice without a candidate for f does not count."""
    if layer.use and any(m.is_named(token) for m in members for token in layer.use):
        return 'use', layer.use
    if layer.only is not None:
        return 'only', layer.only
    return ('prefer', layer.prefer) if layer.prefer else None


def verdict(world, member, call, layers, forced):
    """Returns the verdict of a candidate for a call, and a part of the reason."""
    b = member.drawn
    if b is not None:
        if not b.available:
            return 'unavailable', 'is not installed'
        if b.devices and 'cpu' not in b.devices:
            return 'unavailable', "'q' is on cpu"
    if not forced:
        if any(member.is_named(token) for layer in layers for token in layer.deny):
            return 'excluded', 'denied by'
        if not all(any(map(member.is_named, layer.allow)) for layer in layers if layer.allow is not None):
            return 'excluded', 'not on the allow list'
        if b is not None:
            stated = SPELLINGS[b.toggle] if b.has_toggle else None
            if not (b.default_enable if stated is None else stated):
                return 'disabled', 'switched off by'
    if b is not None:
        if b.grad == 'none' and call.grad_enabled and call.requires_grad:
            return 'rejected', 'requires grad'
        if b.dtypes and call.dtype not in b.dtypes:
            return 'rejected', "dtype of 'q'"
        if 'scale' in b.lacks and call.scale is not None:
            return 'rejected', 'argument scale'
        if 'flag' in b.lacks and call.flag:
            return 'rejected', 'argument flag'
    said, reason = ask(world.default_verifier if b is None else b.verifier, call)
    if said == 'no':
        return 'rejected', reason
    if said == 'yes' and b is not None and not forced:
        said, reason = ask(b.prefers, call)
        if said == 'no':
            return 'demoted', reason
    return ('bug', '') if said == 'bug' else ('eligible', None)


def expected(world, call):
    """Returns the winner, or None if the call raises, and [(name, verdict, part of the reason)] in order of candidates."""
    members = by_priority(world)
    layers = layers_of(world)
    verb, words = next((said for said in (speaks(layer, members) for layer in layers) if said), ('prefer', ()))
    chosen = []
    for token in words:
        chosen += [m for m in members if m.is_named(token) and m not in chosen]
    rest = [m for m in members if m not in chosen]
    strict = next((layer.strict for layer in layers if layer.strict is not None), False)
    require_first = next((layer.require_first for layer in layers if layer.require_first is not None), False)

    asked = chosen if verb in ('use', 'only') else chosen + rest
    names = {token.casefold() for token in words}
    wishes = [m for m in asked if verb == 'prefer' and names & {m.name, f'impl:{m.kind}.{m.name}'} - {'default'}]
    verdicts = [(m, *verdict(world, m, call, layers, verb == 'use')) for m in asked]

    winner, over, late = None, False, []
    for member, said, _ in verdicts:
        if member.kind == 'reference' and late and not over:
            winner, over = late[0], True
        if over:
            break
        if said == 'eligible':
            winner, over = member, True
        elif said == 'demoted':
            late.append(member)
        over = over or (said == 'bug' and strict)
        over = over or (require_first and said in ('rejected', 'demoted', 'bug'))
        over = over or (strict and bool(wishes) and member is wishes[-1])
    if not over and late:
        winner = late[0]
    rows = [(m.name, said, reason) for m, said, reason in verdicts]
    if verb in ('use', 'only'):
        rows += [(m.name, 'excluded', 'not listed') for m in rest]
    return (winner.name if winner else None), rows


# -- making it real ---------------------------------------------------------------------------------------------------------


def verifier_of(question):
    """Returns a verifier method that answers like `ask`."""

    def k8(self, q):
        if q.shape[-1] == 8:
            return True, None
        return False, ('K must be 8, got %s', q.shape[-1])

    def raises(self, q):
        raise ValueError('deliberate')

    return {
        'none': None,
        'yes': lambda self: (True, None),
        'no': lambda self: (False, 'never'),
        'k8': k8,
        'noflag': lambda self, flag: (not flag, 'no flag'),
        'scale': lambda self, scale, **rest: (scale is None, 'no scale'),
        'raises': raises,
        'true': lambda self: True,
        'none returned': lambda self, q, k: None,
        'one': lambda self: (1, None),
        'list': lambda self: [True, None],
    }[question]


def implementation_of(b, number):
    if b.lacks == ('flag',):
        return lambda self, q, k, scale=None: q * 0 + number
    if b.lacks == ('scale',):
        return lambda self, q, k, *, flag=False: q * 0 + number
    if b.lacks:
        return lambda self, k, q, **rest: q * 0 + number
    return lambda self, q, k, scale=None, flag=False: q * 0 + number


def build(world):
    """Registers the world's operation and backends."""
    verifier = verifier_of(world.default_verifier)
    toy = Toy(default_verifier=verifier and verifier.__get__(object()))
    for number, b in enumerate(world.backends, 1):
        toy.names[number] = b.name
        members = {
            'backend_type': b.name,
            'kind': b.kind,
            'vendor': b.vendor,
            'priority': b.priority,
            'default_enable': b.default_enable,
            'env_var': f'FLA_TOY_{b.name.upper()}' if b.has_toggle else None,
            'package_name': None if b.available else 'no_such_package_anywhere',
            'devices': b.devices,
            'dtypes': b.dtypes,
            'grad': b.grad,
            'f': implementation_of(b, number),
            'f_verifier': verifier_of(b.verifier),
            'f_prefers': verifier_of(b.prefers),
        }
        made = type(f'Drawn_{b.name}', (BaseBackend,), {k: v for k, v in members.items() if v is not None})()
        BackendRegistry('*' if b.everywhere else toy.op).register(made)
    for vendor in ('NV', 'Other'):
        toy.add(f'idle{vendor if vendor != "NV" else ""}', f=None, vendor=vendor)
    return toy


def environ(world, op):
    env = {f'FLA_TOY_{b.name.upper()}': b.toggle for b in world.backends if b.has_toggle and b.toggle is not None}
    for name, value in world.env.items():
        text = '|'.join(value) if isinstance(value, tuple) else value
        env[f'FLA_{name}'] = f'{op}={text}' if name == 'PER_OP' else text
    return env


def policy(layer, op):
    order = () if layer.only is None else {op: layer.only}
    fields = {'strict': layer.strict, 'require_first': layer.require_first}
    return Policy(use=layer.use, prefer=layer.prefer, order=order, allow=layer.allow, deny=layer.deny, **fields)


@contextlib.contextmanager
def inside(world):
    """Context in which the world is in force; leaves nothing of it."""
    dispatcher = default_dispatcher()
    catalogue = dispatcher.catalogue
    before = set(catalogue._functions), set(dispatcher.registries)
    dispatcher.reset()
    logs.logger.setLevel(logging.CRITICAL)
    toy = build(world)
    try:
        with mock.patch.dict(os.environ, environ(world, toy.op)), contextlib.ExitStack() as stack:
            # a registration may have read the variable, which decides how strictly methods are compared with functions
            dispatcher.refresh()
            if world.code:
                set_policy(policy(world.code, toy.op))
            for layer in world.scopes:
                stack.enter_context(policy_context(policy(layer, toy.op)))
            yield toy
    finally:
        dispatcher.reset()
        for known, old in zip((catalogue._functions, dispatcher.registries._registries), before, strict=True):
            for name in set(known) - old:
                del known[name]


def arguments(call):
    q = torch.zeros(2, call.k, dtype=call.dtype, requires_grad=call.requires_grad)
    return (q, torch.zeros(2, call.k, dtype=call.dtype), call.scale, call.flag)


def compare_with_explain(toy, world, call):
    """Returns the result of the rules, after asserting that `explain` agrees."""
    winner, rows = expected(world, call)
    with torch.set_grad_enabled(call.grad_enabled):
        decision = explain(toy.f, *arguments(call))
    assert decision.winner == winner, f'\n{decision}'
    assert (decision.error is None) == (winner is not None)
    assert [c.name for c in decision.candidates] == [name for name, _, _ in rows], f'\n{decision}'
    for found, (name, said, reason) in zip(decision.candidates, rows, strict=True):
        assert found.verdict == ('chosen' if name == winner else said), f'{name} is {said}\n{decision}'
        if found.verdict in ('chosen', 'eligible'):
            assert found.reason is None
        else:
            assert found.reason
            assert reason in found.reason
        assert found.source
    return winner


def outcome(toy, function, call):
    """Returns the name of the backend that ran, or None if the call raised."""
    with torch.set_grad_enabled(call.grad_enabled):
        try:
            return toy.name_of(function(*arguments(call)).detach())
        except Exception:
            return None


QUIET = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)


@settings(QUIET, max_examples=200)
@given(worlds())
def test_rules_explain_and_call_agree(world):
    with inside(world) as toy:
        for call in [*world.calls, *world.calls]:
            winner = compare_with_explain(toy, world, call)
            assert outcome(toy, toy.f, call) == winner


@settings(QUIET, max_examples=60)
@given(worlds(), st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from([*SPELLINGS])), max_size=4))
def test_they_agree_through_changes_of_toggles(world, flips):
    with inside(world) as toy:
        for name, value in [(None, None), *flips]:
            for b in world.backends:
                if b.name == name and b.has_toggle:
                    b.toggle = value
                    os.environ.pop(f'FLA_TOY_{name.upper()}', None)
                    os.environ.update({} if value is None else {f'FLA_TOY_{name.upper()}': value})
            for call in world.calls:
                winner, _ = expected(world, call)
                assert outcome(toy, toy.f, call) == winner
                assert compare_with_explain(toy, world, call) == winner


@settings(QUIET, max_examples=12, phases=[Phase.explicit, Phase.generate])
@given(worlds())
def test_compiled_calls_agree(world):
    torch._dynamo.reset()
    with inside(world) as toy:
        compiled = torch.compile(lambda *args: toy.f(*args), backend='eager', fullgraph=True)
        for call in world.calls:
            winner = compare_with_explain(toy, world, call)
            assert outcome(toy, compiled, call) == winner


def test_the_rules_tell_calls_apart():
    """Tests the model itself, with a world in which each call has another winner."""
    plain = {
        'vendor': None, 'everywhere': False, 'default_enable': True, 'has_toggle': False, 'toggle': None,
        'available': True, 'devices': None, 'dtypes': None, 'grad': 'backward', 'lacks': (),
    }  # fmt: skip
    world = World(
        backends=[
            Drawn('a', 'vendor', priority=1, verifier='k8', prefers='none', **plain),
            Drawn('b', 'vendor', priority=2, verifier='noflag', prefers='no', **plain),
            Drawn('c', 'reference', priority=5, verifier='none', prefers='none', **plain),
        ],
        default_verifier='no',
        scopes=[],
        code=None,
        env={},
    )
    rows = {(8, False): 'a', (4, False): 'b', (4, True): 'c'}
    with inside(world) as toy:
        for (k, flag), winner in rows.items():
            call = Call(k, torch.float32, False, True, None, flag)
            assert expected(world, call)[0] == winner
            assert compare_with_explain(toy, world, call) == winner
            assert outcome(toy, toy.f, call) == winner
