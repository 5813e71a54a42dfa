"""`diff_policy`: the recorded calls that another policy decides differently."""

from collections import Counter

import pytest
import torch

from fla.backends import (
    BackendRegistry,
    BaseBackend,
    Dispatcher,
    Policy,
    Rule,
    UnknownNameError,
    default_dispatcher,
    dispatch,
    load_policy,
    policy_context,
    trace,
)
from fla.backends.policy_files import diff_policy
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


def test_changed_decisions_are_listed(tmp_path):
    toy, calls = recorded(tmp_path)
    new = Policy(rules=(Rule(toy.op, 'b', 'flag and q.shape[1] > 8', place='new.yaml:3'),))
    for given in (calls, calls.to_json(), tmp_path / 'calls.json', str(tmp_path / 'calls.json'), list(calls)):
        (change,) = diff_policy(None, new, given)
        assert (change.function, change.times, change.old, change.new) == (f'{toy.op}.f', 2, 'a', 'b')
        assert change.new_order == 'rule at new.yaml:3'
        assert 'flag=True' in str(change)
    assert diff_policy(new, new, calls) == []
    assert toy.ran(LONG, LONG, flag=True) == 'a'


def test_compared_files_replace_the_one_in_force(tmp_path):
    pytest.importorskip('ruamel.yaml')
    pytest.importorskip('pydantic')
    _, calls = recorded(tmp_path)
    one, other = tmp_path / 'one.yaml', tmp_path / 'other.yaml'
    one.write_text('prefer: b')
    other.write_text('allow: []')
    version = load_policy(one)
    assert diff_policy(one, one, calls) == []
    assert {(c.old, c.new) for c in diff_policy(one, other, calls)} == {('b', None)}
    assert {(c.old, c.new) for c in diff_policy(one, None, calls)} == {('b', 'a')}
    assert default_dispatcher().policies.now.file is version


def test_a_call_without_arguments_is_not_judged():
    toy = Toy()
    record = {'function': f'{toy.op}.f', 'backend': 'a', 'tensors': {}, 'flags': {}, 'compiled': False}
    (change,) = diff_policy(None, None, [record])
    assert 'missing a required argument' in change.problem
    assert diff_policy(None, None, [{**record, 'compiled': True}]) == []


class Kinds:
    """Backends that differ in what no shape shows, and a call of each kind."""

    def __init__(self, **options):
        toy = self.toy = Toy(**options)
        toy.add('plain', priority=5)
        toy.add('inference', priority=9, grad='none')
        toy.add('dense', priority=8, accepts=lambda self, q: (q.is_contiguous(), 'not contiguous'))
        toy.add('scaled', priority=7, accepts=lambda self, scale: (scale is None or scale == 1, 'scaled'))

    def calls(self):
        plain = torch.ones(4, 4)
        wanting = torch.ones(4, 4, requires_grad=True)
        return [(plain, plain), (plain, wanting), (plain.T[:, 1:], plain), (plain, plain, 2.0), (wanting, plain)]


@pytest.mark.parametrize('name', ['plain', 'inference', 'dense', 'scaled'])
@pytest.mark.parametrize('with_grad', [True, False])
def test_predictions_match_calls_under_the_other_policy(tmp_path, name, with_grad):
    kinds = Kinds()
    new = Policy(prefer=name)
    with torch.set_grad_enabled(with_grad), trace() as calls:
        before = [kinds.toy.ran(*call) for call in kinds.calls()]
    with torch.set_grad_enabled(with_grad), policy_context(new):
        after = [kinds.toy.ran(*call) for call in kinds.calls()]
    expected = Counter((old, now) for old, now in zip(before, after, strict=True) if old != now)
    for given in (calls, calls.to_json()):
        found = Counter()
        for change in diff_policy(None, new, given):
            assert change.problem is None
            found[change.old, change.new] += change.times
        assert found == expected


@dispatch('toy_of_more')
def more(
    q: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    n: int | None = 5,
    sizes: list | None = None,
    *rest: float,
    **named: float,
) -> torch.Tensor:
    return q * 0


class Half(BaseBackend):
    backend_type = 'half'

    def more_verifier(self, dtype, n):
        return dtype is torch.float32 and n is not None, 'no'

    def more(self, q, dtype=torch.float32, n=5, sizes=None, *rest, **named):
        return q * 0 + 1


def test_other_arguments_are_recorded_or_named_as_lost():
    BackendRegistry('toy_of_more').register(Half())
    with policy_context(Policy(deny='half')), trace() as calls:
        more(SHORT)
        more(SHORT, dtype=torch.float16)
        more(SHORT, n=None)
        more(SHORT, sizes=[1])
        more(SHORT, torch.float32, 5, None, 1.0)
        more(SHORT, named=1.0)
    for given in (calls, calls.to_json()):
        changes = diff_policy(Policy(deny='half'), None, given)
        assert [(c.old, c.new, c.problem) for c in changes] == [
            ('default', 'half', None),
            (None, None, 'the record has no value of sizes'),
            (None, None, 'the record has no value of rest'),
            (None, None, 'the record has no value of named'),
        ]


@pytest.mark.filterwarnings('ignore:.*prototype')
def test_tensors_that_no_shape_describes_are_lost(tmp_path):
    toy = Toy()
    sparse = torch.eye(2).to_sparse()
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        with trace() as calls:
            toy.f(nested, SHORT)
        (change,) = diff_policy(None, None, calls.to_json())
        assert change.problem == 'the record has no value of q'
    with trace() as calls:
        toy.f(SHORT, sparse)
    (change,) = diff_policy(None, None, calls.to_json())
    assert change.problem == 'the record has no value of k'
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for view in (torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj().imag, quantised):
        with trace() as calls:
            toy.f(SHORT, view)
        (change,) = diff_policy(None, None, calls.to_json())
        assert change.problem == 'the record has no value of k'


def test_checks_that_read_values_are_not_judged():
    toy = Toy()
    toy.add('a', accepts=lambda self, q: (bool(q.sum() >= 0), 'negative'))
    checked = Toy(check=lambda q: q.sum().item())
    checked.add('a')
    with trace() as calls:
        assert (toy.ran(), checked.ran()) == ('a', 'a')
    first, second = diff_policy(None, Policy(deny='a'), calls)
    assert (first.function, second.function) == (f'{toy.op}.f', f'{checked.op}.f')
    assert 'a: ' in first.problem
    assert 'DataDependent' in second.problem


def test_the_namespace_comes_from_the_trace():
    mine = Dispatcher('nowhere.ops', 'NOWHERE')
    toy = Toy(dispatcher=mine)
    toy.add('a')
    with trace(dispatcher=mine) as calls:
        assert toy.ran() == 'a'
    (change,) = diff_policy(None, Policy(deny='a'), calls)
    assert (change.old, change.new) == ('a', 'default')
    with pytest.raises(UnknownNameError, match='unknown operation'):
        diff_policy(None, Policy(strict=True), list(calls))


CALL = {'function': 'x.f', 'backend': 'a'}
TENSOR = {'dtype': 'float32', 'shape': [2, 3], 'device': 'cpu'}


@pytest.mark.parametrize(
    ('calls', 'words'),
    [
        (3, 'calls is a trace'),
        ('{}', 'this has nothing'),
        (b'{"a": 1}', "this has 'a'"),
        ('{"records": 3}', 'calls is a trace'),
        ('{bad', 'calls is not JSON'),
        ('[' * 100_000, 'calls is not JSON'),
        ([3], r'calls\[0\] is 3'),
        ([{}], r'calls\[0\]\.function is missing'),
        ([{'function': 'x.f', 'backend': ''}], 'backend: string should have at least 1 character'),
        ([{'tensors': 3}], 'tensors must be a mapping, got 3'),
        (
            [{'tensors': {'q': {**TENSOR, 'dtype': 'float99'}}}],
            "tensors.q.dtype: must be the name of a dtype .* got 'float99'",
        ),
        (
            [{'tensors': {'q': {**TENSOR, 'shape': [-1]}}}],
            r'tensors\.q\.shape\.0: input should be greater than or equal to 0, got -1',
        ),
        (
            [{'tensors': {'q': {**TENSOR, 'shape': [True]}}}],
            r'tensors\.q\.shape\.0: input should be a valid integer, got True',
        ),
        ([{'tensors': {'q': {**TENSOR, 'device': 'nowhere'}}}], "tensors.q.device: must be a device .* got 'nowhere'"),
        ([{'tensors': {'q': {'dtype': 'float32'}}}], 'tensors.q.shape is missing; .*tensors.q.device is missing'),
        ([{'tensors': {'q': TENSOR}, 'strides': {'q': [1]}, **CALL}], 'strides.q must have one number for each dimension'),
        (
            [{'tensors': {'q': {**TENSOR, 'dtype': 'int32'}}, 'requires_grad': ['q'], **CALL}],
            'requires_grad must name floating',
        ),
        ([{'flags': {'n': [1]}, **CALL}], r'flags\.n: must be a number, true, false, .* got \[1\]'),
        ([{'compiled': 1, **CALL}], 'compiled: input should be a valid boolean, got 1'),
        ([{'lost': 'q', **CALL}], "lost: input should be a valid tuple, got 'q'"),
        ([{'flag': {}, **CALL}], "unknown key 'flag'. Did you mean 'flags'"),
    ],
)
def test_malformed_calls_are_refused(calls, words):
    with pytest.raises((TypeError, ValueError), match=words):
        diff_policy(None, None, calls)


def test_a_file_name_may_look_like_json(tmp_path, monkeypatch):
    _, calls = recorded(tmp_path)
    monkeypatch.chdir(tmp_path)
    calls.to_json('[x].json')
    assert diff_policy(None, None, '[x].json') == []


def test_a_policy_of_another_type_is_refused():
    with pytest.raises(TypeError, match='new must be a Policy, the path of a policy file, or None; got 3'):
        diff_policy(None, 3, [])
