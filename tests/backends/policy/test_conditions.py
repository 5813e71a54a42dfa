"""Conditions of `Policy(rules=…)` and the orders they choose: eager, compiled and in `explain`."""

import logging
import re

import pytest
import torch

from fla.backends import (
    BackendBugError,
    Policy,
    UnknownNameError,
    dispatch,
    explain,
    get_policy,
    policy_context,
    prefer_backend,
    set_policy,
    use_backend,
)
from fla.backends.policy.conditions import Condition, ConditionError
from fla.backends.policy.policy import Rule
from tests.backends.toy import Q, Toy

SHORT, LONG = torch.zeros(2, 8), torch.zeros(2, 64)


def toy_with_backends():
    toy = Toy()
    toy.add('a', priority=1)
    toy.add('b', priority=2)
    return toy


def rules(toy, *made):
    return Policy(rules=tuple(Rule(toy.op, use, when) for when, use in made))


HOLD = [
    'q.dtype == float32',
    'q.dtype == torch.float32',
    'q.dtype != bfloat16',
    'q.shape[1] == 8',
    'q.shape[-1] >= 8',
    'q.shape[0] < 8',
    'q.shape[0] <= q.shape[1]',
    '2 <= q.shape[0] < 3',
    'q.shape[1] > 7',
    'q.shape[1] in (8, 16)',
    'q.shape[1] not in [1, 2]',
    "q.device.type == 'cpu'",
    "q.device.type != 'cuda'",
    'q.dtype in (bfloat16, float32)',
    'scale is None',
    'q is not None',
    'not flag',
    'flag == False',
    'flag or q.shape[1] == 8',
    'q.shape[1] == 8 and not (scale is not None)',
    'scale is None or scale > 0.5',
    '-1 < q.shape[0]',
    ' and '.join(['not flag'] * 200),
    '((((((((((((((((((((((((((((((((((((((((not flag))))))))))))))))))))))))))))))))))))))))',
]


@pytest.mark.parametrize('when', HOLD)
def test_what_a_condition_knows(when):
    toy = toy_with_backends()
    assert toy.ran() == 'a'
    with policy_context(rules(toy, (when, 'b'))):
        assert toy.ran() == 'b'
        decision = explain(toy.f, SHORT, SHORT)
        assert decision.winner == 'b'
        assert decision.rules[0].endswith(f'when {when} → b: holds')
    with policy_context(rules(toy, (f'not ({when})', 'b'))):
        assert toy.ran() == 'a'
        assert explain(toy.f, SHORT, SHORT).winner == 'a'


@pytest.mark.parametrize(
    ('when', 'holds', 'fails'),
    [
        ('scale == 3  # a remark\nand flag', {'scale': 3, 'flag': True}, {'scale': 3}),
        ('not (\n  flag\n) and\n  scale == 3', {'scale': 3}, {'scale': 3, 'flag': True}),
        ("scale == 'a  b'", {'scale': 'a  b'}, {'scale': 'a b'}),
        ("scale == 'a\tb'", {'scale': 'a\tb'}, {'scale': 'a b'}),
        ("scale == '((((((((((((((((((((((((((((((((((((((((('", {'scale': '(' * 41}, {'scale': '('}),
        ("scale == ' # '", {'scale': ' # '}, {'scale': ' '}),
    ],
)
def test_every_character_of_a_condition_counts(when, holds, fails):
    toy = toy_with_backends()
    with policy_context(rules(toy, (when, 'b'))):
        assert (toy.ran(SHORT, SHORT, **holds), toy.ran(SHORT, SHORT, **fails)) == ('b', 'a')
        assert 'b' in explain(toy.f, SHORT, SHORT, **holds).winner


@pytest.mark.parametrize(
    ('when', 'words'),
    [
        ('', 'is an expression such as'),
        ('q.shape[1] >=', 'is no expression'),
        ('q.shape[1] + 1 > 2', 'not allowed'),
        ('len(q) > 2', 'not allowed'),
        ("__import__('os')", 'not allowed'),
        ('q.sum() > 0', 'not allowed'),
        ('q.shape > 1', 'not allowed'),
        ('q.shape[scale] > 1', 'not allowed'),
        ('q.shape[True] > 1', 'not allowed'),
        ('q.data_ptr == 1', 'not allowed'),
        ('q.device == 1', 'not allowed'),
        ('lambda: 1', 'not allowed'),
        ('q == None', 'compared by `is`'),
        ('q is 3', '`is` is for None alone'),
        ('1 < 2', 'reads no parameter'),
        ('q.dtype < float32', 'only numbers are larger'),
        ('q.dtype == 3', 'compares a dtype with a number'),
        ("q.shape[0] == 'cpu'", 'compares a number with a string'),
        ('q.shape[1] in (1, float32)', 'of one kind'),
        ('q.shape[1] in q', 'list of constants'),
        ('not ' * 40 + 'flag', 'more than 32'),
        ('not\t' * 250 + 'flag', 'more than 32'),
        ('(flag and ' * 40 + 'flag' + ')' * 40, 'more than 32'),
        ('(' * 250 + 'flag' + ')' * 250, 'no expression'),
        ('flag) or (flag', 'no expression'),
        ('flag] or [flag', 'no expression'),
        ('flag,', 'not allowed'),
        ('# flag', 'not allowed'),
        ('half > 2', "compares a dtype with a number ('half' is read as a dtype"),
        ('half.shape[0] > 2', "not allowed ('half' is read as a dtype"),
        ('scale > 1e400', 'not allowed'),
        (f'scale > {2**64}', 'not allowed'),
        ('scale > 0x' + 'f' * 4000, 'digits'),
        ('q.shape[99999999999999999999] > 2', 'not allowed'),
        (' and '.join(['flag'] * 2000), 'has 10000 characters at most'),
        (['flag'], 'got'),
        ('q\0', 'no expression'),
        (3, 'got 3'),
    ],
)
def test_what_a_condition_refuses(when, words):
    with pytest.raises(ConditionError, match=words.replace('(', r'\(')):
        Rule('kda', 'default', when)


class NoTruth:
    """An argument like an array, whose comparison has no single truth value."""

    def __gt__(self, other):
        return self

    def __bool__(self):
        raise ValueError('neither true nor false')


@pytest.mark.parametrize(
    'when', ['scale > 1', 'flag == False and scale > 1', '0 < 1 < scale and flag == False', 'not scale > 1']
)
def test_a_comparison_that_is_neither_true_nor_false_does_not_hold(when, caplog):
    toy = toy_with_backends()
    with policy_context(rules(toy, (when, 'b'))):
        with caplog.at_level(logging.WARNING, logger='fla'):
            assert toy.ran(Q, Q, scale=NoTruth()) == 'a'
        assert 'has no answer' in caplog.text
        assert explain(toy.f, Q, Q, scale=NoTruth()).winner == 'a'


def test_conditions_that_are_written_otherwise_are_one():
    toy = toy_with_backends()
    policies = [rules(toy, (when, 'b')) for when in ('scale  >  1', '(scale > 1)  # a remark', 'scale > 1.5', None)]
    assert policies[0] == policies[1]
    assert hash(policies[0]) == hash(policies[1])
    assert len(set(policies)) == 3


def test_rules_are_asked_by_priority_then_as_written():
    toy = toy_with_backends()
    policy = Policy(rules=(Rule(toy.op, 'a', 'q.shape[1] >= 8', 1), Rule(f'{toy.op}.f', 'b', 'q.shape[1] >= 64', 0)))
    with policy_context(policy):
        assert toy.ran(SHORT, SHORT) == 'a'
        assert toy.ran(LONG, LONG) == 'b'
    with policy_context(rules(toy, ('flag', 'b'), (None, 'default'))):
        assert toy.ran(SHORT, SHORT, flag=True) == 'b'
        assert toy.ran(SHORT, SHORT) == 'default'
        assert explain(toy.f, SHORT, SHORT).rules[-1].endswith('holds for every call')


def test_a_rule_never_goes_around_a_verifier_a_filter_or_a_toggle(monkeypatch):
    toy = Toy()
    toy.add('a', priority=1)
    toy.add('b', priority=2, env_var='FLA_TOY_B', accepts=lambda self, scale: (scale is None, 'no scale'))
    toy.add('c', priority=3)
    set_policy(rules(toy, ('flag', ('b', 'c'))))
    assert toy.ran(SHORT, SHORT, flag=True) == 'b'
    assert toy.ran(SHORT, SHORT, 2.0, flag=True) == 'c'
    monkeypatch.setenv('FLA_TOY_B', '0')
    assert toy.ran(SHORT, SHORT, flag=True) == 'c'
    set_policy(Policy(rules=(Rule(toy.op, ('b', 'c'), 'flag'),), deny='c'))
    assert toy.ran(SHORT, SHORT, flag=True) == 'a'
    monkeypatch.delenv('FLA_TOY_B')
    assert toy.ran(SHORT, SHORT, flag=True) == 'b'


def test_layers_above_decide_first_and_a_rule_that_does_not_hold_leaves_it_to_those_below():
    toy = toy_with_backends()
    set_policy(rules(toy, ('flag', 'b')))
    with prefer_backend('default', op=toy.op):
        assert toy.ran(SHORT, SHORT, flag=True) == 'default'
    with use_backend('a', op=toy.op):
        assert toy.ran(SHORT, SHORT, flag=True) == 'a'
    set_policy(Policy(prefer='default'))
    with policy_context(rules(toy, ('flag', 'b'))):
        assert toy.ran(SHORT, SHORT, flag=True) == 'b'
        assert toy.ran(SHORT, SHORT) == 'default'


def test_a_rule_does_not_widen_an_exclusive_order():
    toy = toy_with_backends()
    set_policy(Policy(order={toy.op: ('a', 'default')}, rules=(Rule(toy.op, ('b', 'default'), 'flag'),)))
    assert toy.ran(SHORT, SHORT) == 'a'
    assert toy.ran(SHORT, SHORT, flag=True) == 'default'
    assert explain(toy.f, SHORT, SHORT, flag=True)['b'].verdict == 'excluded'


UNANSWERABLE = ['q.shape[7] > 1', 'scale > 1', 'scale', 'scale.dtype == float32', 'q.shape[0] == scale or scale < 2']


@pytest.mark.parametrize('when', UNANSWERABLE)
def test_a_condition_without_an_answer_does_not_hold_and_says_so_once(when, caplog):
    toy = toy_with_backends()
    policy = Policy(rules=(Rule(toy.op, 'b', when, place='policy.yaml:7'),))
    with policy_context(policy), caplog.at_level(logging.WARNING, logger='fla'):
        assert toy.ran() == toy.ran() == 'a'
        assert explain(toy.f, SHORT, SHORT).rules[0].startswith(f'rule at policy.yaml:7 when {when} → b: has no answer (')
    said = [record for record in caplog.records if 'has no answer' in record.getMessage()]
    assert len(said) == 1
    assert 'policy.yaml:7' in said[0].getMessage()
    with policy_context(policy), policy_context(Policy(strict=True)):
        with pytest.raises(BackendBugError, match=r'policy\.yaml:7'):
            toy.f(SHORT, SHORT)
        assert explain(toy.f, SHORT, SHORT).winner is None


@pytest.mark.parametrize('when', UNANSWERABLE)
def test_a_condition_without_an_answer_compiled(when):
    toy = toy_with_backends()
    compiled = torch.compile(lambda *args: toy.f(*args), backend='eager', fullgraph=True)
    with policy_context(rules(toy, (when, 'b'))):
        assert toy.name_of(compiled(SHORT, SHORT)) == 'a'


def test_the_numbers_of_a_tensor_are_not_looked_at(caplog):
    toy = toy_with_backends()
    with policy_context(rules(toy, ('scale > 0', 'b'))), caplog.at_level(logging.WARNING, logger='fla'):
        assert toy.ran(SHORT, SHORT, torch.ones(())) == 'a'
    assert 'has no answer' in caplog.text
    (problem,) = Condition('q > 0').problems(toy.f.__fla_entry__.spec.signature)
    assert 'is a tensor' in problem


@pytest.mark.parametrize('dynamic', [None, True, False])
@pytest.mark.parametrize('when', ['q.shape[1] >= 32', 'q.shape[-1] > 8 and scale is None', 'not q.shape[1] < 32'])
def test_compiled_callers_choose_by_size_as_eager_does(when, dynamic):
    toy = toy_with_backends()
    compiled = torch.compile(lambda *args: toy.f(*args), backend='eager', fullgraph=True, dynamic=dynamic)
    with policy_context(rules(toy, (when, 'b'))):
        for q in (SHORT, LONG, SHORT, torch.zeros(2, 33), torch.zeros(2, 31)):
            assert toy.name_of(compiled(q, q)) == toy.ran(q, q) == explain(toy.f, q, q).winner
    assert toy.name_of(compiled(LONG, LONG)) == 'a'


def test_a_scope_of_rules_entered_inside_a_compiled_region():
    toy = toy_with_backends()
    policy = rules(toy, ('q.shape[1] >= 32', 'b'))

    def model(q):
        with policy_context(policy):
            return toy.f(q, q)

    compiled = torch.compile(model, backend='eager', fullgraph=True)
    assert [toy.name_of(compiled(q)) for q in (SHORT, LONG)] == ['a', 'b']


def test_rules_are_for_the_functions_that_have_their_parameters():
    toy = toy_with_backends()

    @dispatch(toy.op)
    def other(q: torch.Tensor, width: int = 1) -> torch.Tensor:
        return q

    with policy_context(rules(toy, ('width == 1', 'b'))):
        assert toy.ran() == 'a'
        assert "no parameter 'width'" in explain(toy.f, SHORT, SHORT).rules[0]


def test_boosts_are_added_to_priorities_and_add_up():
    toy = toy_with_backends()
    with policy_context(Policy(boost={toy.op: {'b': -2}})):
        assert toy.ran() == 'b'
        assert '-2 by' in explain(toy.f, SHORT, SHORT)['b'].notes[0]
        with policy_context(Policy(boost={f'{toy.op}.*': {'b': 5}})):
            assert toy.ran() == 'a'
        with prefer_backend('a', op=toy.op):
            assert toy.ran() == 'a'
    with policy_context(Policy(boost={f'{toy_with_backends().op}.*': {'b': -2}})):
        assert toy.ran() == 'a'


def test_a_lock_gives_way_to_use_backend_alone():
    toy = toy_with_backends()
    set_policy(Policy(lock={toy.op: ('b', 'default')}))
    assert toy.ran() == 'b'
    assert explain(toy.f, SHORT, SHORT).order.startswith('lock at')
    with prefer_backend('a'):
        assert toy.ran() == 'b'
    with use_backend('a', op=toy.op):
        assert toy.ran() == 'a'
    assert toy.name_of(toy.f.bind('a')(SHORT, SHORT)) == 'a'


@pytest.mark.parametrize(
    'fields',
    [
        {'boost': {'kda': {'a': 'x'}}},
        {'boost': {'kda': {'a': float('nan')}}},
        {'boost': {'kda': {'triton': 1, 'default': 2}}},
        {'rules': (('kda', ()),)},
        {'rules': (((), 'a'),)},
        {'rules': (('kda', 'a', None, True),)},
        {'rules': (('kda', 'a', None, 10**400),)},
        {'rules': (('kda', 'a', ['flag']),)},
        {'boost': {'kda': {'a': 10**400}}},
        {'breaker': {'cooldown': 10**400}},
        {'breaker': {'probe_timeout': float('inf')}},
    ],
)
def test_fields_that_cannot_be_right_are_refused(fields):
    with pytest.raises((TypeError, ValueError)):
        Policy(**fields)


def test_a_policy_survives_its_spec():
    policy = Policy(
        prefer='a',
        order={'kda': ('a',)},
        lock={'gdn': ('b',)},
        boost={'kda.*': {'a': -1}},
        rules=(Rule('kda', 'a', 'q.shape[1] > 2', 3, 'f:1'),),
        breaker={'threshold': 2},
    )
    assert Policy(*policy.spec) == policy
    assert hash(Policy(*policy.spec)) == hash(policy)
    assert policy.to_dict()['boost'] == {'kda.*': {'a': -1}}
    assert policy.to_dict()['rules'] == [{'ops': ['kda'], 'use': ['a'], 'when': 'q.shape[1] > 2', 'priority': 3}]


@pytest.mark.parametrize(
    ('when', 'said'),
    [
        ('qq.shape[0] > 1', "no parameter 'qq'. Did you mean 'q'"),
        ('q.dtype == bflot16', "no parameter 'bflot16'. Did you mean 'bfloat16'"),
        ('q == 1', "'q' is a tensor"),
    ],
)
def test_rules_in_code_fit_the_function(when, said):
    toy = Toy()
    with pytest.raises(UnknownNameError, match=re.escape(said)):
        set_policy(Policy(rules=[Rule(toy.op, 'default', when)]))
    assert get_policy() is None


def test_rules_in_code_name_what_there_is():
    with pytest.raises(UnknownNameError, match='matches no operation'):
        set_policy(Policy(rules=[Rule('nothing.*', 'default')]))
    assert get_policy() is None


def test_a_rule_whose_backends_a_function_lacks_costs_it_nothing():
    toy, other = toy_with_backends(), Toy()
    other.add('elsewhere')
    toy.ran()
    plain = toy.f.__code__.co_code
    with policy_context(Policy(rules=[Rule('*', 'elsewhere', 'q.shape[0] == 2')])):
        assert (toy.ran(), other.ran()) == ('a', 'elsewhere')
        assert toy.f.__code__.co_code == plain
        assert 'no candidate is elsewhere' in explain(toy.f, SHORT, SHORT).rules[0]


def test_rules_as_mappings():
    toy = Toy()
    toy.add('a')
    toy.add('b')
    with policy_context(Policy(rules=[{'ops': toy.op, 'use': 'b', 'when': 'q.shape[0] == 2'}])):
        assert toy.ran() == 'b'
        assert toy.ran(Q[:1], Q[:1]) == 'a'
    for wrong in ('b', {'use': 'b'}, ['b'], [None]):
        with pytest.raises(TypeError, match='rules must be a list of Rule'):
            Policy(rules=wrong)
