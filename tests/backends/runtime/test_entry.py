"""A dispatched function behaves like the decorated one when it is inspected, called, copied or wrapped."""

import asyncio
import copy
import functools
import gc
import inspect
import io
import linecache
import pickle
import pydoc
import subprocess
import sys
import textwrap
import threading
import traceback
import typing
import weakref
from pathlib import Path

import pytest
import torch

from fla.backends import (
    BackendRegistry,
    BaseBackend,
    NoBackendError,
    default_dispatcher,
    deny_backends,
    dispatch,
    explain,
    prefer_backend,
    use_backend,
)
from tests import process
from tests.backends.toy import Q, Toy

ROOT = Path(__file__).parents[3]
DEFAULT_LIST: list = [1]


class Config:
    """A default value without a literal."""


CONFIG = Config()


def plain(
    q: torch.Tensor,
    k: 'torch.Tensor',
    /,
    scale: float | None = None,
    *shapes: int,
    config: Config = CONFIG,
    names: list = DEFAULT_LIST,
    flag: bool = False,
    **options: 'dict[str, int]',
) -> 'tuple[torch.Tensor, dict]':
    """Every kind of parameter.

    Second paragraph.
    """
    return q, {'k': k, 'scale': scale, 'shapes': shapes, 'config': config, 'names': names, 'flag': flag, **options}


# An operation needs a registry or a package for its backends.
REGISTRY = BackendRegistry('entrytest')
for _operation in ('entrycell', 'entryouter'):
    BackendRegistry(_operation)


@dispatch('entrytest')
def module_level(q, k=None):
    """At module level, for pickle."""
    return 'default'


@pytest.fixture(params=['cold', 'hot', 'with a backend'])
def function(request):
    """`plain`, dispatched, in each state of an entry point."""
    made = dispatch('entrytest')(plain)
    if request.param == 'with a backend':

        class Other(BaseBackend):
            backend_type = 'other'

            def plain_verifier(self, flag):
                return (flag == 'other', 'flag')

            def plain(self, q, k, scale=None, flag=False, **rest):
                raise AssertionError('nobody asked for it')

        handle = REGISTRY.register(Other())
    if request.param != 'cold':
        made(Q, Q)
    yield made
    if request.param == 'with a backend':
        handle.remove()


# -- seen from outside --------------------------------------------------------------------------------------------------


def test_introspection(function):
    assert inspect.signature(function) == inspect.signature(plain)
    assert str(inspect.signature(function)) == str(inspect.signature(plain))
    assert inspect.getsource(function) == inspect.getsource(plain)
    assert inspect.getsourcelines(function) == inspect.getsourcelines(plain)
    assert inspect.getdoc(function) == inspect.getdoc(plain)
    assert inspect.isfunction(function)
    assert inspect.unwrap(function) is plain
    assert typing.get_type_hints(function) == typing.get_type_hints(plain)
    assert function.__annotations__ == plain.__annotations__
    assert inspect.get_annotations(function) == inspect.get_annotations(plain)
    for name in ('__name__', '__qualname__', '__module__', '__doc__', '__defaults__', '__kwdefaults__'):
        assert getattr(function, name) == getattr(plain, name), name
    assert inspect.getmodule(function) is inspect.getmodule(plain)


def test_own_signature_without_following_wrapped(function):
    """Tools that ignore `__wrapped__` see the same parameters."""
    own, theirs = inspect.signature(function, follow_wrapped=False), inspect.signature(plain)
    assert [(p.name, p.kind, p.default) for p in own.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]
    assert own.return_annotation == theirs.return_annotation
    assert function.__code__.co_argcount == plain.__code__.co_argcount
    assert function.__code__.co_posonlyargcount == plain.__code__.co_posonlyargcount
    assert function.__code__.co_kwonlyargcount == plain.__code__.co_kwonlyargcount


def test_defaults_are_the_very_objects(function):
    _, found = function(Q, Q)
    assert found['names'] is DEFAULT_LIST
    assert found['config'] is CONFIG


def test_help_reads_like_the_plain_function(function):
    def text(f):
        page = io.StringIO()
        pydoc.Helper(output=page).help(f)
        return page.getvalue()

    assert text(function) == text(plain)


CALLS = [
    ((Q, Q), {}),
    ((Q, Q, 2.0), {}),
    ((Q, Q, 2.0, 3, 4), {'flag': True}),
    ((Q, Q), {'scale': 1.0, 'other': {'a': 1}, 'names': [2]}),
    ((Q, Q, None, 1), {'k': 5, 'q': 6}),
]

WRONG_CALLS = [
    ((), {}),
    ((Q,), {}),
    ((), {'q': Q, 'k': Q}),
    ((Q,), {'k': Q}),
    ((Q, Q, 1.0), {'scale': 2.0}),
    ((Q, Q, 1.0, 2), {'scale': 2.0}),
]


@pytest.mark.parametrize('call', range(len(CALLS)))
def test_arguments_arrive(function, call):
    args, kwargs = CALLS[call]
    found, expected = function(*args, **kwargs), plain(*args, **kwargs)
    assert found[0] is expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(found[1][name] is expected[1][name] or found[1][name] == expected[1][name] for name in expected[1])


@pytest.mark.parametrize('call', range(len(WRONG_CALLS)))
def test_wrong_calls_say_the_same(function, call):
    args, kwargs = WRONG_CALLS[call]
    with pytest.raises(TypeError) as expected:
        plain(*args, **kwargs)
    with pytest.raises(TypeError) as found:
        function(*args, **kwargs)
    assert str(found.value) == str(expected.value)


def test_wrong_calls_of_an_ordinary_signature():
    def ordinary(q, k, scale=None, *, flag=False):
        return q

    made = dispatch('entrytest')(ordinary)
    for args, kwargs in (((Q,), {}), ((Q, Q, 1, 2), {}), ((Q, Q), {'nobody': 1}), ((Q, Q), {'q': 1}), ((), {'k': 1})):
        with pytest.raises(TypeError) as expected:
            ordinary(*args, **kwargs)
        with pytest.raises(TypeError) as found:
            made(*args, **kwargs)
        assert str(found.value) == str(expected.value)


SELF = 'def f(this, q, self=None): return "narrow", self'


@pytest.mark.parametrize('name', ['type', 'getattr', 'dict', 'len', 'Exception', 'isinstance', 'object', 'self', 'f'])
def test_parameters_named_like_builtins(name):
    """The generated code must work with parameters that shadow builtins."""
    scope = {}
    exec(f'def f(q, {name}=None, *args, **kwargs): return "default", {name}', scope)
    operation = f'entry_{name}'
    made = dispatch(operation)(scope['f'])
    registry = BackendRegistry(operation)

    class Narrow(BaseBackend):
        backend_type, grad, dtypes = 'narrow', 'none', (torch.float16,)

        def f_verifier(self, q):
            return (q.shape[0] == 2, ('%s', q.shape[0]))

        def f_prefers(self, q):
            return (q.shape[1] == 8, 'wide')

    exec(f'def f(self, q, {name}=None): return "narrow", {name}' if name != 'self' else SELF, scope)
    Narrow.f = scope['f']
    registry.register(Narrow())
    for value in (None, 3):
        assert made(Q, value) == ('default', value)
        assert made(torch.nn.Parameter(Q), **{name: value}) == ('default', value)
        assert made(Q.half(), value) == ('narrow', value)
        assert made(Q.half()[:1], value)[0] == 'default'
    assert explain(made, Q.half()).winner == 'narrow'


def test_pickle_and_copy():
    assert pickle.loads(pickle.dumps(module_level)) is module_level
    assert copy.copy(module_level) is module_level
    assert copy.deepcopy({'f': module_level})['f'] is module_level
    assert pickle.loads(pickle.dumps(functools.partial(module_level, k=1))).func is module_level


def test_one_function_object_for_life():
    toy = Toy()
    toy.add('a')
    f, seen = toy.f, id(toy.f)
    kept = {f: 'key', 'list': [f]}
    for _ in range(3):
        assert toy.ran() == 'a'
        with use_backend('default', op=toy.op):
            assert f(Q, Q).sum() == 0
        default_dispatcher().replan()
    assert id(toy.f) == seen
    assert kept[toy.f] == 'key'
    assert toy.f in kept['list']
    assert hash(f) == hash(toy.f)


# -- tracebacks ---------------------------------------------------------------------------------------------------------


def test_tracebacks_show_the_caller_the_generated_line_and_the_implementation():
    @dispatch('entrytest')
    def failing(q):
        raise RuntimeError('inside the implementation')

    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            failing(Q)  # the line of the user
        text = ''.join(traceback.format_exception(error.value))
        assert 'failing(Q)  # the line of the user' in text
        assert '<fla dispatch entrytest.failing plan' in text
        assert 'return _d_i' in text
        assert "raise RuntimeError('inside the implementation')" in text
        assert error.value.__cause__ is None
        assert error.value.__context__ is None


def test_errors_of_a_check_and_of_no_backend_point_at_the_call():
    def check(q):
        if q.ndim != 2:
            raise ValueError('q must have 2 dimensions')

    toy = Toy(check=check, default_verifier=lambda q: (q.shape[0] < 9, 'too many rows'))
    with pytest.raises(ValueError, match='2 dimensions') as error:
        toy.f(Q[0], Q)
    assert Path(error.traceback[0].path).name == 'test_entry.py'
    with pytest.raises(NoBackendError, match='too many rows') as error:
        toy.f(torch.zeros(9, 8), Q)
    assert error.value.__context__ is None
    assert error.value.decision.winner is None
    assert pickle.loads(pickle.dumps(NoBackendError('text'))).args == ('text',)


# -- wrapped and unwrapped ----------------------------------------------------------------------------------------------


def test_torch_compiler_disable_in_either_order():
    """FLA #1110: with torch < 2.11 the marks of a disabled function bypassed the dispatcher."""
    registry = BackendRegistry('entrydisable')

    @dispatch('entrydisable')
    @torch.compiler.disable
    def under(q):
        return 'default'

    @torch.compiler.disable
    @dispatch('entrydisable')
    def above(q):
        return 'default'

    @torch.compiler.disable(recursive=False)
    @dispatch('entrydisable')
    def flat(q):
        return 'default'

    class Backend(BaseBackend):
        backend_type = 'backend'

        def under(self, q):
            return 'backend'

        above = flat = under

    handle = registry.register(Backend())
    functions = under, above, flat
    for function in functions:
        assert function(Q) == 'backend'
        assert torch.compile(lambda q, function=function: (q + 1, function(q)), backend='eager')(Q)[1] == 'backend'
        assert torch.compile(function, backend='eager')(Q) == 'backend'
    handle.remove()
    for function in functions:
        assert function(Q) == 'default'
        assert torch.compile(lambda q, function=function: (q + 1, function(q)), backend='eager')(Q)[1] == 'default'
    assert not any(name.startswith('_torchdynamo') for name in vars(under))


def test_other_decorators_around_and_under():
    calls = []

    def counting(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return wrapper

    toy = Toy()
    toy.add('a')

    @counting
    @dispatch(toy.op)
    @counting
    def f(q: torch.Tensor, k: torch.Tensor, scale: float | None = None, flag: bool = False) -> torch.Tensor:
        return q * 0

    assert toy.name_of(f(Q, Q)) == 'a'
    assert calls == ['f']
    assert list(inspect.signature(f).parameters) == ['q', 'k', 'scale', 'flag']
    assert f.backends['a'] == 'available'
    assert explain(f, Q, Q).winner == 'a'
    toy.handle.remove()
    assert toy.name_of(f(Q, Q)) == 'default'
    assert calls == ['f'] * 3
    for wrap in (torch.no_grad(), torch.inference_mode(), functools.partial, functools.lru_cache):
        assert toy.name_of(wrap(toy.f)(Q, Q)) == 'default'


def test_attributes_of_the_function_stay():
    def f(q):
        return q

    f.tag, f.backends = 'mine', 'overridden'
    made = dispatch('entrytest')(f)
    assert made.tag == 'mine'
    assert made.backends['default'] == 'available'
    made.tag = 'new'
    default_dispatcher().replan()
    made(Q)
    assert made.tag == 'new'


def test_a_function_dispatched_twice():
    """The default of one operation may be a dispatched function of another."""
    inner = Toy()
    inner.add('a')
    outer = dispatch('entryouter')(inner.f)
    assert inner.name_of(outer(Q, Q)) == 'a'
    assert set(outer.backends) == {'default'}
    assert set(inner.f.backends) == {'a', 'default'}
    with deny_backends('a', op=inner.op):
        assert inner.name_of(outer(Q, Q)) == 'default'


def test_methods():
    registry = BackendRegistry('entrymethods')

    class Layer:
        number = 3

        @dispatch('entrymethods')
        def apply(self, q: torch.Tensor) -> str:
            """A method."""
            return f'default {self.number}'

        @staticmethod
        @dispatch('entrymethods')
        def static(q: torch.Tensor) -> str:
            return 'default'

        @classmethod
        @dispatch('entrymethods')
        def of_class(cls, q: torch.Tensor) -> str:
            return f'default {cls.number}'

    class Backend(BaseBackend):
        backend_type = 'backend'
        dtypes = (torch.float16,)

        def apply(self, q, **rest):
            return 'backend'

        def static(self, q):
            return 'backend'

    layer = Layer()
    assert (layer.apply(Q), Layer.static(Q), layer.static(Q), Layer.of_class(Q)) == (
        'default 3',
        'default',
        'default',
        'default 3',
    )
    registry.register(Backend())
    assert (layer.static(Q.half()), layer.static(Q)) == ('backend', 'default')
    # `self` is an ordinary parameter: a backend whose method lacks it is not asked
    assert layer.apply(Q.half()) == 'default 3'
    assert Layer.apply.__qualname__.endswith('Layer.apply')
    assert inspect.signature(layer.apply) == inspect.Signature(
        [inspect.Parameter('q', inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=torch.Tensor)], return_annotation=str
    )


def test_generators_and_coroutines():
    @dispatch('entrytest')
    def generate(n):
        yield from range(n)

    @dispatch('entrytest')
    async def wait(n):
        await asyncio.sleep(0)
        return n

    @dispatch('entrytest')
    async def stream(n):
        for i in range(n):
            yield i

    async def main():
        return await wait(3), [i async for i in stream(2)]

    for _ in range(2):
        assert list(generate(3)) == [0, 1, 2]
        assert asyncio.run(main()) == (3, [0, 1])


# -- bad decorations ----------------------------------------------------------------------------------------------------


class NotAFunction:
    def __call__(self, q):
        return q


@pytest.mark.parametrize(
    ('bad', 'message'),
    [
        (NotAFunction, 'decorates a function'),
        (NotAFunction(), 'decorates a function'),
        (functools.partial(plain, Q), 'decorates a function'),
        (len, 'Python function'),
        (torch.add, 'Python function'),
        (lambda q: q, 'name that backends can use'),
        (staticmethod(plain), 'staticmethod'),
        (classmethod(plain), 'classmethod'),
        ('text', 'decorates a function'),
        (None, 'decorates a function'),
    ],
)
def test_what_cannot_be_decorated(bad, message):
    with pytest.raises(TypeError, match=message):
        dispatch('entrytest')(bad)


def test_reserved_names():
    for name in ('priority', 'is_available', 'verify', 'f_verifier', 'f_prefers', '__init__'):

        def f(q):
            return q

        f.__name__ = name
        with pytest.raises(ValueError, match='means something else'):
            dispatch('entrytest')(f)
    for name in ('class', 'a b', '1f'):

        def g(q):
            return q

        g.__name__ = name
        with pytest.raises(TypeError, match='name that backends can use'):
            dispatch('entrytest')(g)

    def h(q, _d_x=None):
        return q

    with pytest.raises(ValueError, match='_d_x'):
        dispatch('entrytest')(h)


@pytest.mark.parametrize('operation', ['', ' ', 'a b', '1', 'kda.', '.kda', 'a..b', 'a-b', 3, None, plain])
def test_bad_operation_names(operation):
    with pytest.raises(TypeError, match='name of an operation'):
        dispatch(operation)


def test_bad_options():
    def f(q):
        return q

    with pytest.raises(ValueError, match='mutates'):
        dispatch('entrytest', mutates=('cache',))(f)
    with pytest.raises(TypeError, match='nobody'):
        dispatch('entrytest', check=lambda nobody: None)(f)
    with pytest.raises(TypeError, match='default_verifier'):
        dispatch('entrytest', default_verifier='cuda')(f)
    with pytest.raises(TypeError, match='at most one'):
        dispatch('entrytest', default_verifier=[lambda q: (True, None)] * 2)(f)
    with pytest.raises(TypeError, match='at most one'):
        dispatch('entrytest', default_verifier=[BaseBackend, BaseBackend])(f)


# -- run again ----------------------------------------------------------------------------------------------------------


def test_a_cell_that_runs_twice(caplog):
    source = textwrap.dedent(
        """
        @dispatch('entrycell')
        def cell(q):
            return 'default %d' % VERSION
        """
    )
    made = []
    for version in (1, 2):
        scope = {'dispatch': dispatch, 'VERSION': version}
        exec(compile(source, 'cell.py', 'exec'), scope)
        made.append(scope['cell'])
        assert made[-1](Q) == f'default {version}'
    assert made[0](Q) == 'default 1'
    assert default_dispatcher().catalogue.entry('entrycell.cell').wrapper is made[1]
    assert not caplog.records

    class Backend(BaseBackend):
        backend_type = 'backend'

        def cell(self, q):
            return 'backend'

    handle = BackendRegistry('entrycell').register(Backend())
    assert [f(Q) for f in made] == ['backend', 'backend']
    handle.remove()
    gone = weakref.ref(made[0])
    made.clear()
    scope.clear()
    gc.collect()
    assert gone() is None, 'the function of the first run is not kept alive'


# -- names live as long as plans ----------------------------------------------------------------------------------------


def names_of(function):
    return {name for name in function.__globals__ if name.startswith('_d_')}


def generated_lines():
    return [name for name in linecache.cache if name.startswith('<fla dispatch')]


def with_everything():
    """A toy whose plans bind verifiers, dtypes, defaults and implementations."""
    toy = Toy()
    toy.add('a', accepts=lambda self, q: (q.shape[-1] == 8, 'K'), dtypes=(torch.float16,), env_var='FLA_TOY_A')
    toy.add('b', prefers=lambda self, q: (True, None), grad='none')
    return toy


def test_a_thousand_plans_leave_nothing_behind():
    toy = with_everything()
    toy.ran()
    gc.collect()
    names, lines = len(names_of(toy.f)), len(generated_lines())
    for _ in range(1000):
        default_dispatcher().replan()
        toy.ran()
    gc.collect()
    assert len(names_of(toy.f)) <= names + 16
    assert len(generated_lines()) <= lines + 4


def test_plans_kept_for_policies_are_bounded():
    toy = with_everything()
    entry = toy.f.__fla_entry__
    sizes = []
    for number in range(200):
        tokens = ['a', 'b', 'default', 'vendor', 'native', 'reference', 'impl:vendor.a', 'impl:vendor.b']
        order = [tokens[(number >> shift) % len(tokens)] for shift in (0, 3, 6)]
        with prefer_backend(*order, op=toy.op):
            toy.ran()
        sizes.append(len(entry._by_policy))
    gc.collect()
    assert max(sizes) <= 64
    assert max(sizes) > 20, 'the test makes too few policies to say anything'
    assert len(names_of(toy.f)) < 64 * 30
    assert toy.ran() == 'b'


def test_code_of_an_evicted_plan_runs_to_its_end():
    """A thread that runs an old plan must not get a NameError."""
    started, go_on = threading.Event(), threading.Event()
    toy = Toy()

    def slow(self, q):
        if q.shape[0] == 3:
            started.set()
            assert go_on.wait(60)
        return False, ('no: %s', q.shape[0])

    toy.add('slow', accepts=slow, priority=1)
    toy.add('declared', priority=2, dtypes=(torch.float16,), grad='none')
    toy.add('second', priority=3, accepts=lambda self, q: (q.shape[-1] == 8, 'K'))
    toy.ran()
    found = []
    thread = threading.Thread(target=lambda: found.append(toy.ran(torch.zeros(3, 8), Q[:1])))
    thread.start()
    assert started.wait(60)
    for _ in range(150):
        default_dispatcher().replan()
        toy.ran()
    type(toy.registry.get('second')).priority = 4
    toy.ran()
    gc.collect()
    go_on.set()
    thread.join(60)
    assert found == ['second']


def test_values_of_one_plan_are_not_taken_by_another():
    """Two backends' names differ only in punctuation, and an old plan is freed after the new one was made."""
    toy = Toy()
    toy.add('x.y', dtypes=(torch.float32,), priority=1)
    toy.add('x_y', dtypes=(torch.float16,), priority=2)
    assert toy.ran() == 'x.y'
    assert toy.ran(Q.half(), Q) == 'x_y'
    kept = toy.f.__code__
    with deny_backends('x_y', op=toy.op):
        assert toy.ran(Q.half(), Q) == 'default'
    default_dispatcher().replan()
    assert toy.ran(Q.half(), Q) == 'x_y'
    del kept
    gc.collect()
    assert toy.ran(Q.half(), Q) == 'x_y'


def test_bound_functions_are_not_kept_alive():
    toy = with_everything()
    dispatcher = default_dispatcher()
    before = len(dispatcher.catalogue.entries())
    for _ in range(50):
        bound = toy.f.bind('b')
        assert toy.name_of(bound(Q, Q)) == 'b'
    assert bound.backends['b'] == 'available'
    assert inspect.signature(bound) == inspect.signature(toy.f)
    del bound
    gc.collect()
    assert len(dispatcher.catalogue.entries()) <= before
    toy.f.resolve(Q, Q)
    gc.collect()
    assert not [name for name in names_of(toy.f) if name.startswith('_d_direct')]


def test_generated_source_can_be_read_while_a_plan_lives():
    toy = with_everything()
    toy.ran()
    code = toy.f.__code__
    assert ''.join(linecache.getlines(code.co_filename)).startswith('def f(q, k, scale=None, flag=None):')
    linecache.checkcache()
    assert linecache.getlines(code.co_filename)


# -- baseline -----------------------------------------------------------------------------------------------------------


BASELINE = """
import functools, logging, sys
import torch
from fla.backends import *
from fla.backends.observe import add_observer

class Said(logging.Handler):
    def __init__(self, said):
        super().__init__()
        self.emit = lambda record: said.append(record.getMessage())

def plain(q, k=2):
    return 'default', k

def check(q):
    raise AssertionError('a check is not run in baseline mode')

f = dispatch('baseline', check=check)(plain)
assert f is plain

class Backend(BaseBackend):
    backend_type = 'backend'
    def plain(self, q, k=2):
        return 'backend', k

BackendRegistry('baseline').register(Backend())
q = torch.zeros(1)
assert f(q) == f.bind('default')(q) == f.bind(prefer='backend')(q) == f.resolve(q)(q) == ('default', 2)
assert set(f.backends) == {'backend', 'default'}, f.backends

def use():
    with use_backend('backend', op='baseline'):
        pass

for force in (use, lambda: set_policy(Policy(use='backend')), lambda: measure([functools.partial(f, q)])):
    try:
        force()
    except DispatchError as error:
        assert 'FLA_DISABLE_BACKEND_DISPATCH' in str(error)
    else:
        raise AssertionError('it must say that nothing is dispatched')
said = []
logging.getLogger('fla').addHandler(Said(said))
with prefer_backend('backend', op='baseline'), trace() as t, telemetry() as counted, on_error('fallback'):
    assert f(q) == ('default', 2)
with prefer_backend('backend', op='baseline.plain'), policy_context(Policy(rules=[Rule('baseline.*', 'backend', 'k > 1')])):
    assert f(q) == ('default', 2)
set_policy(Policy(prefer='backend', op='baseline.plain'))
breaker('baseline.plain', 'backend').force_open()
assert counted.count('baseline.plain') == 0
assert manifest()['selections'] == {}
add_observer(print)()
for _ in range(2):
    load_policy(sys.argv[1])
assert len(t) == 0
why = ' has no effect: FLA_DISABLE_BACKEND_DISPATCH was set at import, so that nothing is dispatched'
expected = 'prefer_backend() trace() telemetry() on_error() policy_context() set_policy() a_circuit_breaker add_observer()'
assert [text.removesuffix(why) for text in said if text.endswith(why)] == [
    *(word.replace('a_circuit_', 'a circuit ') for word in expected.split()), 'a policy file'
], said
print('good')
"""


def test_baseline_mode(tmp_path):
    pytest.importorskip('ruamel.yaml')
    file = tmp_path / 'policy.yaml'
    file.write_text('prefer: backend')
    done = process.run(BASELINE, str(file), FLA_DISABLE_BACKEND_DISPATCH='1')
    assert done.stdout == 'good\n', done.stderr
    for value in ('0', 'no'):
        line = BASELINE.splitlines().index('assert f is plain') + 1
        assert (
            f'line {line}, in <module>\nAssertionError' in process.run(BASELINE, FLA_DISABLE_BACKEND_DISPATCH=value).stderr
        )


# -- types --------------------------------------------------------------------------------------------------------------


TYPED = """
import torch
from typing_extensions import assert_type
from fla.backends import Decision, dispatch


@dispatch('typed')
def scaled(q: torch.Tensor, scale: float, *, flag: bool = False) -> torch.Tensor:
    return q


q = torch.zeros(1)
assert_type(scaled(q, 1.0, flag=True), torch.Tensor)
assert_type(scaled.bind('default')(q, 1.0), torch.Tensor)
assert_type(scaled.resolve(q, 1.0)(q, 1.0), torch.Tensor)
assert_type(scaled.explain(q, 1.0), Decision)
assert_type(scaled.backends['default'], str)
assert_type(scaled.__name__, str)
scaled(q)  # missing
scaled(q, 'text')  # wrong type
scaled(q, 1.0, flags=True)  # unknown
scaled.bind('default')(q)  # missing
scaled.nothing  # no attribute
"""


@pytest.mark.slow
def test_type_checkers_see_the_signature(tmp_path):
    pytest.importorskip('mypy')
    file = tmp_path / 'typed.py'
    file.write_text(TYPED)
    done = subprocess.run(
        [sys.executable, '-m', 'mypy', '--strict', '--no-error-summary', '--hide-error-context', str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = TYPED.splitlines()
    errors = [line.split(':')[1:] for line in done.stdout.splitlines() if ' error: ' in line and 'typed.py' in line]
    found = [(lines[int(parts[0]) - 1].rpartition('# ')[2], parts[-1].rpartition('[')[2].rstrip(']')) for parts in errors]
    assert found == [
        ('missing', 'call-arg'),
        ('wrong type', 'arg-type'),
        ('unknown', 'call-arg'),
        ('missing', 'call-arg'),
        ('no attribute', 'attr-defined'),
    ], done.stdout + done.stderr
