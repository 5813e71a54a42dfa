"""Rules and breakers under torch.compile, with each compiler: a compiled caller follows a rule, guards on the facts that the
rule reads, and recompiles only where the rule can change the choice."""

import itertools

import pytest
import torch

from fla.backends import (
    BackendRegistry,
    BaseBackend,
    Policy,
    Rule,
    breaker,
    dispatch,
    explain,
    on_error,
    policy_context,
    reset_policy,
    set_policy,
)
from tests.backends.compiled import Compiled, two
from tests.backends.toy import Toy

BACKENDS = ['eager', 'aot_eager', pytest.param('inductor', marks=pytest.mark.slow)]
every_compiler = pytest.mark.parametrize('backend', BACKENDS)

SIZES = (8, 16, 31, 32, 64, 100)


def of(size, dtype=torch.float32):
    return torch.zeros(2, size, dtype=dtype)


def rules(toy, *pairs):
    return Policy(rules=tuple(Rule((toy.op,), use, when) for when, use in pairs))


def undispatched_frames(backend, calls, **options):
    """Returns the compilations of the undispatched function for these calls."""
    f = Compiled(Toy(), lambda q, k, scale=None, flag=False: q * 0, backend, **options)
    for args, kwargs in calls:
        f(*args, **kwargs)
    return f.frames


@every_compiler
@pytest.mark.parametrize('dynamic', [None, True])
def test_a_rule_on_a_size_makes_two_programs_for_any_number_of_sizes(backend, dynamic):
    toy = two()
    set_policy(rules(toy, ('q.shape[1] >= 32', 'b')))
    f = Compiled(toy, backend=backend, dynamic=dynamic)
    calls = [((of(size), of(size)), {}) for size in SIZES]
    for (q, k), _ in calls:
        assert f.agrees(q, k) == ('b' if q.shape[1] >= 32 else 'a') == explain(toy.f, q, k).winner
    assert f.frames <= undispatched_frames(backend, calls, dynamic=dynamic) + 1
    f = Compiled(toy, backend=backend, dynamic=dynamic)
    for (q, k), _ in itertools.chain(reversed(calls), calls):
        assert f.agrees(q, k) == ('b' if q.shape[1] >= 32 else 'a')
    assert f.frames <= undispatched_frames(backend, calls, dynamic=dynamic) + 1


@every_compiler
def test_a_size_that_no_rule_reads_makes_no_program(backend):
    toy = two()
    set_policy(rules(toy, ('q.shape[0] >= 2', 'b')))
    f = Compiled(toy, backend=backend, dynamic=True)
    for size in SIZES:
        assert f.agrees(of(size), of(size)) == 'b'
    assert f.frames == 1


@every_compiler
def test_a_rule_on_a_dtype(backend):
    toy = two()
    set_policy(rules(toy, ('q.dtype in (bfloat16, float16)', 'b')))
    f = Compiled(toy, backend=backend)
    calls = [((of(8, dtype), of(8, dtype)), {}) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    for (q, k), _ in calls * 2:
        assert f.agrees(q, k) == ('a' if q.dtype == torch.float32 else 'b')
    assert f.frames == undispatched_frames(backend, calls)


@every_compiler
@pytest.mark.parametrize(
    ('when', 'calls'),
    [
        ('flag', [{}, {'flag': True}, {'flag': False}]),
        ('scale is not None', [{}, {'scale': 0.5}]),
        ('scale is not None and scale > 1', [{}, {'scale': 1}, {'scale': 2}]),
        ('not flag and scale == 3', [{'scale': 3, 'flag': True}, {'scale': 3}, {'scale': 4}]),
    ],
)
def test_a_rule_on_a_parameter(backend, when, calls):
    toy = two()
    set_policy(rules(toy, (when, 'b')))
    f = Compiled(toy, backend=backend, dynamic=False)
    chosen = {f.agrees(of(8), of(8), **call) for call in calls}
    assert chosen == {'a', 'b'}
    frames = f.frames
    assert frames <= len(calls)
    for call in calls:
        f.agrees(of(8), of(8), **call)
    assert f.frames == frames


@every_compiler
def test_a_change_of_the_rules_is_followed_and_coming_back_is_free(backend):
    toy, other = two(), two()
    f = Compiled(toy, backend=backend, dynamic=True)
    policies = [(rules(toy, ('q.shape[1] >= 32', 'b')), 'b'), (rules(toy, ('q.shape[1] >= 128', 'b')), 'a')]
    for policy, expected in policies:
        with policy_context(policy):
            assert f.agrees(of(64), of(64)) == expected
    assert f.frames == 2
    for policy, expected in policies * 3:
        with policy_context(policy):
            assert f.agrees(of(64), of(64)) == expected
        with policy_context(policy), policy_context(rules(other, ('flag', 'b'))):  # a rule for another function
            assert f.agrees(of(64), of(64)) == expected
    assert f.frames == 2
    reset_policy()
    assert f.agrees(of(64), of(64)) == 'a'
    assert f.frames == 3


@every_compiler
def test_several_rules_are_asked_in_order(backend):
    toy = two()
    toy.add('c', priority=3)
    set_policy(rules(toy, ('q.shape[1] >= 32 and flag', 'c'), ('q.shape[1] >= 32', 'b'), ('flag', ('c', 'b'))))
    f = Compiled(toy, backend=backend, dynamic=True)
    expected = {(8, False): 'a', (8, True): 'c', (64, False): 'b', (64, True): 'c'}
    for _ in range(2):
        for (size, flag), name in expected.items():
            assert f.agrees(of(size), of(size), flag=flag) == name
            assert f.agrees(of(size + 1), of(size + 1), flag=flag) == name
    assert f.frames == 4


@every_compiler
def test_gradients_are_those_of_the_chosen_backend(backend):
    registry = BackendRegistry('scaled')

    @dispatch('scaled')
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 1

    class Tripled(BaseBackend):
        backend_type = 'tripled'
        priority = 200

        def scaled(self, x):
            return x * 3

    registry.register(Tripled())
    set_policy(Policy(rules=(Rule(('scaled',), 'tripled', 'x.shape[0] > 4'),)))
    compiled = torch.compile(lambda x: scaled(x).sum(), backend=backend, fullgraph=True)
    for size in (2, 8, 3, 9):
        x = torch.ones(size, requires_grad=True)
        compiled(x).backward()
        assert x.grad.tolist() == [3.0 if size > 4 else 1.0] * size


@every_compiler
def test_a_condition_without_an_answer_does_not_hold(backend):
    toy = two()
    set_policy(rules(toy, ('scale > 1', 'b'), ('q.shape[5] > 1', 'b')))
    f = Compiled(toy, backend=backend)
    assert f.agrees(of(8), of(8)) == 'a'
    assert f.agrees(of(8), of(8), 2.0) == 'b'


class Broken(Exception):
    """An error that is declared retryable."""


@every_compiler
def test_the_state_of_a_breaker_recompiles_nothing(backend):
    toy = Toy()
    toy.broken = False

    def f(self, q, k, scale=None, flag=False):
        if not torch.compiler.is_dynamo_compiling() and toy.broken:
            raise Broken
        return q * 0 + 1

    toy.add('a', f=f, retryable=(Broken,))
    toy.add('b')
    compiled = Compiled(toy, backend=backend, dynamic=True)
    with on_error('fallback', breaker={'threshold': 2, 'cooldown': 1000}):
        set_policy(rules(toy, ('q.shape[1] >= 32', ('a', 'b'))))
        assert compiled(of(64), of(64)) == 'a'
        frames = compiled.frames
        toy.broken = True
        seen = []
        for act in (
            toy.ran,
            toy.ran,
            breaker(toy.f, 'a').reset,
            breaker(toy.f, 'a').force_open,
            breaker(toy.f, 'a').force_close,
        ):
            act()
            seen.append(breaker(toy.f, 'a').state)
            assert compiled(of(64), of(64)) == 'a'  # the backend it was compiled with, independent of eager calls
        assert seen == ['closed', 'open', 'closed', 'open', 'closed']
        assert compiled.frames == frames == 1
