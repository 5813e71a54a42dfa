"""`diff_policy`: which recorded calls another policy decides otherwise."""

import pytest
import torch

from fla.ops.backends import Policy, Rule, default_dispatcher, diff_policy, trace
from tests.backends.toy import Toy

SHORT, LONG = torch.zeros(2, 8), torch.zeros(2, 64)


def recorded(tmp_path):
    toy = Toy()
    toy.add('a', priority=1)
    toy.add('b', priority=2)
    with trace() as calls:
        for q in (SHORT, LONG, LONG):
            toy.f(q, q, flag=True)
    calls.to_json(tmp_path / 'calls.json')
    return toy, calls


def test_decisions_that_change(tmp_path):
    toy, calls = recorded(tmp_path)
    new = Policy(rules=(Rule(toy.op, 'b', 'flag and q.shape[1] > 8', place='new.yaml:3'),))
    for given in (calls, calls.to_json(), tmp_path / 'calls.json', str(tmp_path / 'calls.json'), list(calls)):
        (change,) = diff_policy(None, new, given)
        assert (change.function, change.times, change.old, change.new) == (f'{toy.op}.f', 2, 'a', 'b')
        assert change.new_order == 'rule at new.yaml:3'
        assert 'flag=True' in str(change)
    assert diff_policy(new, new, calls) == []
    assert toy.ran(LONG, LONG, flag=True) == 'a'


def test_files_take_the_place_of_the_one_in_force(tmp_path):
    pytest.importorskip('yaml')
    pytest.importorskip('pydantic')
    _, calls = recorded(tmp_path)
    one, other = tmp_path / 'one.yaml', tmp_path / 'other.yaml'
    one.write_text('prefer: b')
    other.write_text('allow: []')
    version = default_dispatcher().load_policy(one)
    assert diff_policy(one, one, calls) == []
    assert {(c.old, c.new) for c in diff_policy(one, other, calls)} == {('b', None)}
    assert {(c.old, c.new) for c in diff_policy(one, None, calls)} == {('b', 'a')}
    assert default_dispatcher().policy_version() is version


def test_a_call_that_cannot_be_judged_says_so():
    toy = Toy()
    record = {'function': f'{toy.op}.f', 'backend': 'a', 'tensors': {}, 'flags': {}, 'compiled': False}
    (change,) = diff_policy(None, None, [record])
    assert 'missing a required argument' in change.problem
    assert diff_policy(None, None, [{**record, 'compiled': True}]) == []
