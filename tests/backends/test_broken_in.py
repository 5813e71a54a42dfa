"""What a fresh user broke: each once more, as it should be."""

import numpy as np
import pytest
import torch

from fla.backends import (
    BackendRegistry,
    BaseBackend,
    Policy,
    UnknownNameError,
    call_op,
    describe,
    dispatch,
    explain,
    refresh,
    require_manifest,
    trace,
    use_backend,
)
from tests.backends.toy import Q, Toy


@pytest.mark.parametrize('hook', ['is_available', 'is_enabled'])
def test_a_hook_that_changes_its_own_backend_does_not_hang(hook):
    toy = Toy()
    counter = iter(range(10**9))

    def restless(self):
        self.priority = next(counter)
        return True

    toy.add('a', **{hook: restless})
    assert toy.ran() == 'a'


@pytest.mark.parametrize('hook', ['is_available', 'is_enabled'])
def test_a_hook_that_refreshes_does_not_hang(hook):
    toy = Toy()

    def restless(self):
        refresh()
        return True

    toy.add('a', **{hook: restless})
    assert toy.ran() == 'a'


def test_setting_what_is_already_there_changes_nothing():
    toy = Toy()
    backend = toy.add('a')
    toy.ran()
    code = toy.f.__code__
    backend.priority = 4
    backend.priority = 4
    assert toy.ran() == 'a'
    code = toy.f.__code__
    backend.priority = 4
    assert toy.f.__code__ is code


def inference_only(declare):
    registry = BackendRegistry(f'grad_{declare.__name__}')

    class Inference(BaseBackend):
        backend_type = 'inference'
        grad = 'none'

        def f(self, x, y=None, *rest):
            return 'inference'

    registry.register(Inference())
    return dispatch(registry.operation)(declare())


def unannotated():
    def f(x, y=None):
        return 'default'

    return f


def partly_annotated():
    def f(x: torch.Tensor, y=None):
        return 'default'

    return f


def parameter():
    def f(x: torch.Tensor, y: torch.nn.Parameter | None = None):
        return 'default'

    return f


def aliased():
    def f(x: 'TT', y: 'TT' = None):  # noqa: F821
        return 'default'

    return f


def starred():
    def f(x: torch.Tensor, *rest):
        return 'default'

    return f


def module():
    def f(x: torch.Tensor, y: torch.nn.Module | None = None):
        return 'default'

    return f


@pytest.mark.parametrize('declare', [unannotated, partly_annotated, parameter, aliased, starred, module])
def test_no_tensor_that_requires_grad_is_missed(declare):
    f = inference_only(declare)
    x = torch.ones(2)
    other = torch.nn.Linear(1, 1) if declare is module else torch.nn.Parameter(torch.ones(2))
    assert f(x, other) == 'default'
    with torch.no_grad():
        assert f(x, other) == 'inference'
    assert f(x) == 'inference'


def test_a_star_names_no_operation():
    toy = Toy()
    toy.add('a')
    with pytest.raises(UnknownNameError, match='Leave op out'), use_backend('default', op='*'):
        pass


def test_bind_takes_no_policy_for_something_else():
    toy, other = Toy(), Toy()
    toy.add('a')
    with pytest.raises(UnknownNameError, match='nope'):
        toy.f.bind(policy=Policy(op='nope', prefer=('a',)))
    with pytest.raises(ValueError, match='does not concern'):
        toy.f.bind(policy=Policy(op=other.op, use=('a',)))
    with pytest.raises(TypeError, match='must be a Policy'):
        toy.f.bind(policy=3)


@pytest.mark.parametrize('answer', [(False,), 'x', (1, 2, 3), (1, None), 1])
def test_availability_is_a_bool_or_a_verdict(answer):
    toy = Toy()
    toy.add('a', is_available=lambda self: answer)
    assert toy.ran() == 'default'
    assert 'must return a bool' in explain(toy.f, Q, Q)['a'].reason


def test_a_toggle_that_says_no_in_words_is_not_on(caplog):
    toy = Toy()
    toy.add('a', default_enable=staticmethod(lambda: 'no'))
    assert toy.ran() == 'default'
    assert "got 'no'" in caplog.text


@pytest.mark.parametrize(('name', 'value'), [('priority', 'zzz'), ('devices', 'cuda'), ('dtypes', ('float32',))])
def test_facts_spoilt_after_registration_make_a_backend_unavailable(name, value):
    toy = Toy()
    backend = toy.add('a')
    assert toy.ran() == 'a'
    setattr(type(backend), name, value)
    assert toy.ran() == 'default'
    report = explain(toy.f, Q, Q)['a']
    assert (report.verdict, f'.{name} is' in report.reason) == ('unavailable', True)


def lacks_s(self, x):
    return 'lacks'


@pytest.mark.parametrize(
    ('default', 'value', 'ran'),
    [(1.0, 1, 'lacks'), (1, 1.0, 'lacks'), (1.0, 2, 'default'), (np.ones(3), np.ones(3), 'default'), ('a', 'a', 'lacks')],
)
def test_a_missing_argument_is_compared_as_a_value(default, value, ran):
    registry = BackendRegistry('values')
    registry.register(type('A', (BaseBackend,), {'backend_type': 'a', 'f': lacks_s})())

    @dispatch('values')
    def f(x: torch.Tensor, s=default):
        return 'default'

    assert f(Q, value) == ran
    assert f(Q) == 'lacks'


def test_explain_describes_what_it_can():
    toy = Toy()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(4)])
    assert 'nested' in explain(toy.f, nested, nested).arguments['q']
    assert explain(toy.f, Q, Q, platform=torch.device('cuda')).platform == 'any'
    assert explain(toy.f, Q, Q, platform='cuda:0').winner == 'default'


def test_a_parameter_called_platform_is_the_callers():
    BackendRegistry('platforms')

    @dispatch('platforms')
    def g(x: torch.Tensor, platform=None):
        return platform

    assert g(Q, platform=3) == 3
    assert explain(g, Q, platform=3).arguments['platform'] == '3'


def test_a_method_is_explained_with_its_object():
    BackendRegistry('methods')

    class K:
        @dispatch('methods')
        def scale(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    k = K()
    assert torch.equal(k.scale(Q), Q * 2)
    assert explain(k.scale, Q).winner == 'default'


def test_spellings_are_not_kept_without_end(monkeypatch):
    from fla.backends import default_dispatcher

    toy = Toy()
    toy.add('a', env_var='FLA_SPELT')
    for i in range(200):
        monkeypatch.setenv('FLA_SPELT', f'v{i}' + 'x' * 1000)
        assert toy.ran() == 'a'
    assert len(default_dispatcher().toggles._spellings[('FLA_SPELT',)]) <= 65
    monkeypatch.setenv('FLA_SPELT', '0')
    assert toy.ran() == 'default'


def test_leaving_what_was_not_entered_says_so():
    with pytest.raises(RuntimeError, match='without having been entered'):
        use_backend('default').__exit__(None, None, None)


def test_a_reason_that_cannot_be_shown_harms_nobody():
    class Bad:
        def __repr__(self):
            raise ValueError

        __str__ = __repr__

    toy = Toy()
    toy.add('a', accepts=lambda self, q: (False, ('size %s', Bad())))
    assert explain(toy.f, Q, Q)['a'].reason == 'size %s <Bad>'


@pytest.mark.parametrize(
    ('call', 'error', 'text'),
    [
        (lambda: use_backend('default', dispatcher=3), TypeError, 'dispatcher must be a Dispatcher'),
        (lambda: dispatch('o', dispatcher=3), TypeError, 'dispatcher must be a Dispatcher'),
        (lambda: dispatch('o', check=3), TypeError, 'check must be a function'),
        (lambda: dispatch('o', mutates='x'), TypeError, 'mutates must be a tuple'),
        (lambda: call_op(None), TypeError, "such as 'kda.chunk_kda'"),
        (lambda: call_op('kda'), UnknownNameError, r"chunk_kda.*Write 'kda\.FUNCTION'"),
        (lambda: describe(3), TypeError, "such as 'kda'"),
        (lambda: Policy(prefer=1), TypeError, 'prefer takes names, got 1'),
        (lambda: trace(limit='x'), ValueError, 'limit must be a whole number'),
        (lambda: trace(limit=10**30), ValueError, 'limit must be a whole number'),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_file_that_is_no_manifest_is_named(tmp_path):
    for content in (b'', b'no json', b'\xff\xfe\x00', b'[1]'):
        (tmp_path / 'file.json').write_bytes(content)
        with pytest.raises(ValueError, match=r'file\.json|must be a manifest'):
            require_manifest(tmp_path / 'file.json')
