"""Namespaces: a package outside fla with its own operations, variables and policies."""

import pytest

from fla.backends import (
    BackendRegistry,
    BaseBackend,
    Dispatcher,
    Policy,
    UnknownNameError,
    allow_backends,
    default_dispatcher,
    deny_backends,
    dispatch,
    explain,
    get_policy,
    policy_context,
    prefer_backend,
    set_policy,
    strict_mode,
    trace,
    use_backend,
    validate,
)
from fla.backends.observe.describe import describe, snapshot
from fla.backends.runtime.freeze import freeze_dispatch, is_frozen, thaw_dispatch
from tests.backends.library import backend_source
from tests.backends.toy import Q, Toy

TWO = backend_source('a', 'registry', "env_var = 'TOGGLE_OF_A'") + backend_source('b', 'registry')


@pytest.fixture
def twins(library):
    """Returns `f` of the operation `op` in another namespace and in fla's, with the same backends."""
    library.add('op', TWO)
    registry = BackendRegistry('op')
    exec(TWO, {'BaseBackend': BaseBackend, 'registry': registry})

    @dispatch('op')
    def f(x=None, flag=False):
        return 'default'

    theirs = library.f('op')
    assert (theirs(), f()) == ('a', 'a')
    yield theirs, f, library
    for handle in list(registry.registrations()):
        registry.unregister(handle.name)


@pytest.mark.parametrize(
    ('namespace', 'prefix'),
    [('', 'X'), ('my lib', 'X'), ('mylib.', 'X'), ('mylib', 'x'), ('mylib', ''), ('mylib', 'MY-LIB'), ('mylib', '1X')],
)
def test_a_namespace_is_a_package_and_a_prefix(namespace, prefix):
    with pytest.raises(ValueError):
        Dispatcher(namespace, prefix)


def test_two_namespaces_may_have_the_same_operation(twins):
    theirs, ours, library = twins
    assert library.dispatcher.registry('op') is not BackendRegistry('op')
    BackendRegistry('op').unregister('a')
    assert (theirs(), ours()) == ('a', 'b')
    library.dispatcher.registry('op').unregister('a')
    library.dispatcher.registry('op').unregister('b')
    assert (theirs(), ours()) == ('default', 'b')
    assert library.dispatcher.catalogue.entry('op.f').wrapper is theirs
    assert default_dispatcher().catalogue.entry('op.f').wrapper is ours


@pytest.mark.parametrize(
    ('name', 'value', 'runs'),
    [
        ('PER_OP', 'op=default', 'default'),
        ('PREFER', 'b', 'b'),
        ('ALLOW_BACKENDS', 'b', 'b'),
        ('DENY_BACKENDS', 'a', 'b'),
    ],
)
def test_each_namespace_has_its_own_variables(twins, monkeypatch, name, value, runs):
    theirs, ours, library = twins
    monkeypatch.setenv(f'{library.prefix}_{name}', value)
    library.dispatcher.refresh()
    default_dispatcher().refresh()
    assert (theirs(), ours()) == (runs, 'a')
    monkeypatch.delenv(f'{library.prefix}_{name}')
    monkeypatch.setenv(f'FLA_{name}', value)
    library.dispatcher.refresh()
    default_dispatcher().refresh()
    assert (theirs(), ours()) == ('a', runs)
    assert f'FLA_{name}' in explain(ours)['a'].source or explain(ours).order == f'FLA_{name}'


def test_fla_strict_does_not_concern_another_namespace(twins, monkeypatch):
    theirs, ours, library = twins
    for registry in (library.dispatcher.registry('op'), BackendRegistry('op')):
        bad = {'backend_type': 'bad', 'priority': 0, 'f_verifier': lambda self: 1 / 0, 'f': lambda self, x=None: 'bad'}
        registry.register(type('Bad', (BaseBackend,), bad)())
    monkeypatch.setenv('FLA_STRICT', '1')
    library.dispatcher.refresh()
    default_dispatcher().refresh()
    assert theirs() == 'a'
    with pytest.raises(Exception, match='bad'):
        ours()


@pytest.mark.parametrize('scope', [use_backend, prefer_backend, allow_backends])
def test_each_namespace_has_its_own_scopes(twins, scope):
    theirs, ours, library = twins
    with scope('b', op='op'):
        assert (theirs(), ours()) == ('a', 'b')
    with scope('b', op='op', dispatcher=library.dispatcher):
        assert (theirs(), ours()) == ('b', 'a')
        with scope('default', op='op'):
            assert (theirs(), ours()) == ('b', 'default')
    assert (theirs(), ours()) == ('a', 'a')


def test_other_scopes_take_a_namespace_too(twins):
    theirs, ours, library = twins
    with deny_backends('a', dispatcher=library.dispatcher), policy_context(Policy(prefer=('default',))):
        assert (theirs(), ours()) == ('b', 'default')
    with policy_context(Policy(prefer=('default',)), dispatcher=library.dispatcher):
        assert (theirs(), ours()) == ('default', 'a')
    with strict_mode(dispatcher=library.dispatcher):
        assert library.dispatcher.policies.is_strict()
        assert not default_dispatcher().policies.is_strict()


def test_each_namespace_has_its_own_policy(twins):
    theirs, ours, library = twins
    library.dispatcher.policies.set_policy(Policy(prefer=('b',)))
    assert (theirs(), ours()) == ('b', 'a')
    assert get_policy() is None
    set_policy(Policy(prefer=('default',)))
    assert (theirs(), ours()) == ('b', 'default')
    library.dispatcher.policies.reset_policy()
    assert (theirs(), ours()) == ('a', 'default')


def test_names_of_one_namespace_are_unknown_to_the_other(twins):
    _, _, library = twins
    exclusive = {'backend_type': 'exclusive_zz', 'f': lambda self, x=None: 'exclusive'}
    library.dispatcher.registry('op').register(type('Exclusive', (BaseBackend,), exclusive)())
    with use_backend('exclusive_zz', op='op', dispatcher=library.dispatcher):
        assert library.f('op')() == 'exclusive'
    with pytest.raises(UnknownNameError, match='exclusive_zz'):
        with use_backend('exclusive_zz', op='op'):
            pass
    with pytest.raises(UnknownNameError, match='kda_of_nobody'):
        with use_backend('a', op='kda_of_nobody', dispatcher=library.dispatcher):
            pass


def test_star_means_every_operation_of_one_namespace(twins):
    theirs, ours, library = twins
    star = {'backend_type': 'star', 'priority': 0, 'f': lambda self, x=None, flag=False: 'star'}
    library.dispatcher.registry('*').register(type('Star', (BaseBackend,), star)())
    assert (theirs(), ours()) == ('star', 'a')


def test_a_toggle_is_what_the_backend_says_in_every_namespace(twins, monkeypatch):
    theirs, ours, _ = twins
    monkeypatch.setenv('TOGGLE_OF_A', 'off')
    assert (theirs(), ours()) == ('b', 'b')


def test_unknown_variables_of_the_own_prefix_are_reported(twins, monkeypatch, caplog):
    theirs, _, library = twins
    monkeypatch.setenv(f'{library.prefix}_PREFERR', 'b')
    monkeypatch.setenv('FLA_PER_OPP', 'b')
    library.dispatcher.refresh()
    assert theirs() == 'a'
    said = [record.getMessage() for record in caplog.records]
    assert any(f'{library.prefix}_PREFERR' in text and f'{library.prefix}_PREFER' in text for text in said)
    assert not any('FLA_PER_OPP' in text for text in said)


def test_a_variable_that_only_a_source_file_names_is_known(library, monkeypatch, caplog):
    library.add('op', TWO)
    library.add('other', backend_source('c', 'registry', f"env_var = '{library.prefix}_C'"))
    monkeypatch.setenv(f'{library.prefix}_C', '0')
    assert library.f('op')() == 'a'
    assert not [r for r in caplog.records if f'{library.prefix}_C' in r.getMessage()]
    assert library.f('other')() == 'default'


def test_disabling_dispatch_of_one_namespace(library, monkeypatch):
    library.add('op', TWO)
    monkeypatch.setenv(f'{library.prefix}_DISABLE_BACKEND_DISPATCH', '1')
    f = library.f('op')
    assert f() == 'default'
    assert list(f.backends) == ['a', 'b', 'default']
    toy = Toy()
    toy.add('a')
    assert toy.ran() == 'a'


def test_each_namespace_is_reset_and_refreshed_alone(twins):
    theirs, ours, library = twins
    library.dispatcher.policies.set_policy(Policy(prefer=('b',)))
    set_policy(Policy(prefer=('b',)))
    library.dispatcher.reset()
    assert (theirs(), ours()) == ('a', 'b')


def test_each_namespace_is_frozen_alone(twins):
    _, ours, library = twins
    freeze_dispatch(dispatcher=library.dispatcher)
    try:
        assert is_frozen(library.dispatcher)
        assert not is_frozen()
        with prefer_backend('b', op='op'):
            assert ours() == 'b'
    finally:
        thaw_dispatch(dispatcher=library.dispatcher)


def test_traces_and_pictures_are_of_one_namespace(twins):
    theirs, ours, library = twins
    with trace(dispatcher=library.dispatcher) as seen:
        theirs()
        ours()
    assert [record.function for record in seen] == ['op.f']
    assert set(snapshot(library.dispatcher)) == {'op'}
    assert library.prefix in describe(library.dispatcher)
    assert 'kda' not in library.dispatcher.discovery.operations()


def test_one_backend_may_serve_two_namespaces(twins, monkeypatch):
    theirs, ours, library = twins
    shared = type('Shared', (BaseBackend,), {'backend_type': 'shared', 'priority': 0, 'f': lambda self, x=None: 'shared'})()
    library.dispatcher.registry('op').register(shared)
    BackendRegistry('op').register(shared)
    assert (theirs(), ours()) == ('shared', 'shared')
    monkeypatch.setattr(shared, 'priority', 50)
    assert (theirs(), ours()) == ('a', 'a')


def test_a_namespace_whose_package_does_not_exist(caplog):
    dispatcher = Dispatcher('no_such_package_zz.ops', 'NO_SUCH_ZZ')
    registry = dispatcher.registry('op')

    @dispatch('op', dispatcher=dispatcher)
    def f(x=None):
        return 'default'

    assert f() == 'default'
    assert dispatcher.discovery.operations() == ['op']
    registry.register(type('A', (BaseBackend,), {'backend_type': 'a', 'f': lambda self, x=None: 'a'})())
    assert f() == 'a'
    assert not validate(dispatcher)
    assert not caplog.records


def test_a_namespace_without_init_files(library):
    library.add('op', TWO)
    (library.root / library.name / 'ops' / '__init__.py').unlink()
    assert library.f('op')() == 'a'
    assert library.dispatcher.discovery.operations() == ['op']


def test_a_toy_in_another_namespace():
    dispatcher = Dispatcher('toy_namespace_zz.ops', 'TOY_NAMESPACE_ZZ')
    toy = Toy(dispatcher=dispatcher)
    toy.add('a', accepts=lambda self, q: (q.shape[-1] == 8, 'K must be 8'))
    assert toy.ran() == 'a'
    assert toy.ran(Q[:, :4], Q) == 'default'
