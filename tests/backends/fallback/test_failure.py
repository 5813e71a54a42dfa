"""on_error='fallback': which calls are retried, which never are, and what the caller gets. Each test names the backend."""

import contextlib
import errno
import gc
import logging
import os
import re
import sys
import threading
import weakref

import pytest
import torch

from fla.backends import (
    BackendRegistry,
    BaseBackend,
    Dispatcher,
    DispatchError,
    NoBackendError,
    Policy,
    breaker,
    dispatch,
    explain,
    health,
    on_error,
    policy_context,
    prefer_backend,
    refresh,
    set_policy,
    strict_mode,
    trace,
    use_backend,
)
from fla.backends.core.errors import RegistrationError
from fla.backends.policy.policy import Rule
from tests.backends.toy import Q, Toy


class Broken(Exception):
    """A failure of a backend."""


class BrokenValue(ValueError):
    """A failure of a backend that is also a ValueError."""


def raising(error, runs=None):
    """Returns an implementation of the toy function that raises; an exception class or a function is called first."""

    def f(self, q, k, scale=None, flag=False):
        if runs is not None:
            runs.append(self.backend_type)
        raise error() if callable(error) else error

    return f


def failing_toy(error=Broken, retryable=(Broken,), **options):
    """a fails, b serves, and the default follows; `toy.runs` lists the backends that were tried and failed."""
    toy = Toy(**options)
    toy.runs = []
    toy.add('a', f=raising(error, toy.runs), retryable=retryable)
    toy.add('b')
    return toy


def by_scope(monkeypatch):
    return on_error('fallback')


def by_variable(monkeypatch):
    monkeypatch.setenv('FLA_ON_ERROR', 'fallback')
    refresh()


def by_code(monkeypatch):
    set_policy(Policy(on_error='fallback'))


# -- switching it on ----------------------------------------------------------------------------------------------------


def test_by_default_what_an_implementation_raises_reaches_the_caller():
    toy = failing_toy()
    with pytest.raises(Broken) as caught:
        toy.ran()
    assert toy.runs == ['a']
    assert caught.value.__context__ is None


def test_by_default_no_code_is_generated_for_failures():
    toy = failing_toy()
    with prefer_backend('b', op=toy.op):
        assert toy.ran() == 'b'
        off = toy.f.__fla_entry__._plans[toy.f.__fla_entry__.state()].source
    assert 'error' not in off
    assert '_d_breaker' not in off
    assert '_d_failures' not in off


@pytest.mark.parametrize('way', [by_variable, by_code])
def test_ways_to_switch_it_on(way, monkeypatch):
    toy = failing_toy()
    way(monkeypatch)
    assert toy.ran() == 'b'
    assert toy.runs == ['a']


def test_a_scope_switches_it_on_and_off():
    toy = failing_toy()
    with on_error('fallback'):
        assert toy.ran() == 'b'
        with on_error('raise'), pytest.raises(Broken):
            toy.ran()
        assert toy.ran() == 'b'
    with pytest.raises(Broken):
        toy.ran()


def test_a_scope_for_one_operation_leaves_others_alone():
    toy, other = failing_toy(), failing_toy()
    with on_error('fallback', op=toy.op):
        assert toy.ran() == 'b'
        with pytest.raises(Broken):
            other.ran()
    with on_error('fallback', op=f'{toy.op}.f'):
        assert toy.ran() == 'b'


def test_a_bad_word_is_an_error_in_code_and_a_warning_in_the_environment(monkeypatch, caplog):
    with pytest.raises(ValueError, match="on_error must be 'raise', 'fallback' or None, got 'retry'"):
        Policy(on_error='retry')
    with pytest.raises(ValueError, match=r"on_error.*'retry'"), on_error('retry'):
        pass
    toy = failing_toy()
    monkeypatch.setenv('FLA_ON_ERROR', 'fallbak')
    refresh()
    with pytest.raises(Broken):
        toy.ran()
    text = '\n'.join(record.getMessage() for record in caplog.records)
    assert 'FLA_ON_ERROR' in text
    assert "Did you mean 'fallback'" in text


@pytest.mark.parametrize('spelling', [' Fallback ', 'FALLBACK'])
def test_the_variable_takes_any_case(spelling, monkeypatch):
    toy = failing_toy()
    monkeypatch.setenv('FLA_ON_ERROR', spelling)
    refresh()
    assert toy.ran() == 'b'


# -- what is tried again ------------------------------------------------------------------------------------------------

RETRIED = [
    (Broken, (Broken,)),
    (Broken, (Exception,)),
    (Broken, [OSError, Broken]),
    (lambda: RuntimeError('cannot compile'), (RuntimeError,)),
    (lambda: RuntimeError('out of resource: shared memory, Required: 300000'), (RuntimeError,)),
    (lambda: RuntimeError('a custom error: no such tile'), (RuntimeError,)),
    (lambda: NotImplementedError('this layout'), (RuntimeError,)),
    (BrokenValue, (BrokenValue,)),
    (BrokenValue, (Exception, BrokenValue)),
    (lambda: ImportError('libcudart.so.13: cannot open shared object file'), (ImportError,)),
]
NEVER_RETRIED = [
    (Broken, ()),
    (Broken, (OSError,)),
    (lambda: TypeError('q must be a tensor'), (Exception,)),
    (lambda: ValueError('scale must be positive'), (Exception,)),
    (BrokenValue, (Exception,)),
    (lambda: DispatchError('no'), (RuntimeError,)),
    (lambda: NoBackendError('none accepts'), (RuntimeError,)),
    (lambda: torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB'), (RuntimeError,)),
    (lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."), (RuntimeError,)),
    (lambda: RuntimeError('DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes.'), (RuntimeError,)),
    (lambda: OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), (OSError,)),
    (lambda: RuntimeError('uncorrectable ECC error encountered'), (RuntimeError,)),
    (lambda: RuntimeError('CUDA error: device-side assert triggered'), (RuntimeError,)),
    (lambda: RuntimeError('CUDA driver error: invalid argument'), (RuntimeError,)),
    (lambda: RuntimeError('CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`'), (RuntimeError,)),
    (lambda: RuntimeError('cuDNN error: CUDNN_STATUS_INTERNAL_ERROR'), (RuntimeError,)),
    (lambda: RuntimeError('HIP error: invalid device function'), (RuntimeError,)),
    (lambda: RuntimeError('Triton Error [CUDA]: misaligned address'), (RuntimeError,)),
    (lambda: Broken('cudaErrorIllegalAddress: an illegal memory access was encountered'), (Broken,)),
    (lambda: MemoryError(), (Exception,)),
    (lambda: torch.distributed.DistBackendError('NCCL error'), (RuntimeError,)),
]

if hasattr(torch, 'AcceleratorError'):  # torch 2.8
    NEVER_RETRIED.append((lambda: torch.AcceleratorError('CUDA error: it asserted'), (RuntimeError,)))


@pytest.mark.parametrize(('error', 'retryable'), RETRIED)
def test_declared_failures_move_on(error, retryable):
    toy = failing_toy(error, retryable)
    with on_error('fallback'):
        assert toy.ran() == 'b'
    assert toy.runs == ['a']
    assert health()[f'{toy.op}.f', 'a'].failures == 1


@pytest.mark.parametrize(('error', 'retryable'), NEVER_RETRIED)
def test_whatever_is_not_the_backends_declared_fault_reaches_the_caller_and_never_counts(error, retryable):
    kind = type(error())
    toy = failing_toy(error, retryable)
    with on_error('fallback'):
        for _ in range(7):
            with pytest.raises(kind):
                toy.ran()
        assert toy.runs == ['a'] * 7
    assert breaker(toy.f, 'a').state == 'closed'
    assert health()[f'{toy.op}.f', 'a'].total_failures == 0


def wrapped(explicitly):
    def f(self, q, k, scale=None, flag=False):
        try:
            raise torch.OutOfMemoryError('CUDA out of memory')
        except RuntimeError as error:
            if explicitly:
                raise Broken('the kernel failed') from error
            raise Broken('the kernel failed')  # noqa: B904 - that is the point

    return f


@pytest.mark.parametrize('explicitly', [True, False])
def test_a_device_error_in_another_ones_clothes_is_one_still(explicitly):
    toy = Toy()
    toy.add('a', f=wrapped(explicitly), retryable=(Broken,))
    toy.add('b')
    with on_error('fallback'), pytest.raises(Broken):
        toy.ran()


def test_an_error_that_the_caller_is_handling_is_not_the_backends():
    toy = failing_toy()
    with on_error('fallback'):
        try:
            raise torch.OutOfMemoryError('CUDA out of memory')
        except torch.OutOfMemoryError:
            assert toy.ran() == 'b'


@pytest.mark.parametrize('bad', [ValueError, TypeError, (OSError, ValueError), NoBackendError, torch.OutOfMemoryError])
def test_what_is_never_retried_cannot_be_declared(bad):
    kinds = bad if isinstance(bad, tuple) else (bad,)
    with pytest.raises(RegistrationError, match='retryable'):
        Toy().add('a', retryable=kinds)


def test_interrupts_are_not_failures():
    toy = failing_toy(KeyboardInterrupt, (Exception,))
    with on_error('fallback'), pytest.raises(KeyboardInterrupt):
        toy.ran()
    assert toy.runs == ['a']


def test_the_check_of_an_operation_is_no_backends_business():
    def check(q):
        raise Broken('bad call')

    toy = failing_toy(check=check)
    with on_error('fallback'), pytest.raises(Broken, match='bad call'):
        toy.ran()
    assert toy.runs == []
    assert health()[f'{toy.op}.f', 'a'].total_failures == 0


def test_the_default_declares_its_failures_with_its_facts():
    class Facts(BaseBackend):
        retryable = (Broken,)

    registry = BackendRegistry('failing_default')

    @dispatch('failing_default', default_verifier=Facts)
    def f(x: torch.Tensor) -> torch.Tensor:
        raise Broken

    class Plain(BaseBackend):
        backend_type = 'plain'
        kind = 'reference'

        def f(self, x):
            return x + 1

    registry.register(Plain())
    with on_error('fallback'):
        assert f(torch.zeros(1)) == 1


# -- a second run must be harmless --------------------------------------------------------------------------------------


def test_a_function_that_changes_its_arguments_is_never_run_twice():
    toy = Toy(mutates=('q',))

    def add_one_and_fail(self, q, k, scale=None, flag=False):
        q += 1
        raise Broken

    toy.add('a', f=add_one_and_fail, retryable=(Broken,))
    toy.add('b')
    q = torch.zeros(2)
    with on_error('fallback'):
        for i in range(5):
            with pytest.raises(Broken):
                toy.f(q, Q)
            assert q[0] == i + 1
        # the next call may choose another backend at once
        assert breaker(toy.f, 'a').state == 'open'
        assert toy.name_of(toy.f(q, Q)) == 'b'


def test_not_in_a_graph_capture(monkeypatch):
    monkeypatch.setattr(sys.modules['fla.backends.fallback.failure'], 'in_capture', lambda: True)
    toy = failing_toy()
    with on_error('fallback'), pytest.raises(Broken):
        toy.ran()
    assert toy.runs == ['a']
    assert health()[f'{toy.op}.f', 'a'].total_failures == 0


def test_not_while_fake_tensors_or_a_tracer_run():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    toy = failing_toy()
    with on_error('fallback'):
        with FakeTensorMode():
            fake = torch.zeros(2)
            with pytest.raises(Broken):
                toy.f(fake, fake)
        with pytest.raises(Broken):
            toy.f(fake, fake)
        with pytest.raises(Broken):
            make_fx(lambda q: toy.f(q, q))(torch.zeros(2))
    assert health()[f'{toy.op}.f', 'a'].total_failures == 0


def test_a_backward_pass_never_falls_back():
    toy = failing_toy()

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return toy.f(grad, grad)

    with on_error('fallback'):
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(Broken):
            Twice.apply(x).sum().backward()
        assert toy.runs == ['a']
        assert toy.ran() == 'b'


def test_the_backward_of_a_backend_that_served_is_its_own():
    toy = Toy()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise Broken

    toy.add('a', f=lambda self, q, k, scale=None, flag=False: Fails.apply(q) * 0 + 1, retryable=(Broken,))
    toy.add('b')
    with on_error('fallback'):
        q = torch.ones(2, requires_grad=True)
        out = toy.f(q, Q)
        assert toy.name_of(out) == 'a'
        with pytest.raises(Broken):
            out.sum().backward()
    assert health()[f'{toy.op}.f', 'a'].total_failures == 0


# -- what the caller gets -----------------------------------------------------------------------------------------------


def numbered(toy, names, kinds=(Broken,)):
    for name in names:
        toy.add(name, f=raising(lambda name=name: Broken(name)), retryable=kinds)


def listed(error):
    """The names in the note of what was tried, and the errors it gives of the earlier candidates."""
    (note,) = [note for note in error.__notes__ if ': tried ' in note]
    names, earlier = re.fullmatch(r'toy\d+\.f: tried (.*), in this order\. Earlier failures: (.*)', note).groups()
    return names.split(', '), earlier.split('; ')


def test_the_last_failure_is_raised_and_lists_the_others_in_order():
    toy = Toy(default_verifier=lambda q: (False, 'not today'))
    numbered(toy, 'abc')
    with on_error('fallback'), pytest.raises(Broken, match='c') as caught:
        toy.ran()
    assert listed(caught.value) == (['a', 'b', 'c'], ['a: Broken: a', 'b: Broken: b'])
    assert caught.value.__context__ is None


def test_an_undeclared_failure_after_others_lists_them():
    toy = Toy()
    numbered(toy, 'ab')
    toy.add('c', f=raising(lambda: OSError('c')))
    with on_error('fallback'), pytest.raises(OSError, match='c') as caught:
        toy.ran()
    assert listed(caught.value) == (['a', 'b', 'c'], ['a: Broken: a', 'b: Broken: b'])
    assert caught.value.__context__ is None


def test_causes_of_each_failure_stay_where_they_are():
    toy = Toy(default_verifier=lambda q: (False, 'not today'))

    def with_cause(name):
        def f(self, q, k, scale=None, flag=False):
            try:
                raise KeyError(f'{name} inside')
            except KeyError as error:
                raise Broken(name) from error

        return f

    for name in 'ab':
        toy.add(name, f=with_cause(name), retryable=(Broken,))
    try:
        raise LookupError('outside')
    except LookupError as outside:
        was = outside
        with on_error('fallback'), pytest.raises(Broken, match='b') as caught:
            toy.ran()
    assert listed(caught.value) == (['a', 'b'], ['a: Broken: a'])
    assert isinstance(caught.value.__cause__, KeyError)
    assert 'b inside' in str(caught.value.__cause__)
    assert was.__context__ is None


def test_what_the_caller_is_handling_stays_the_context():
    toy = Toy(default_verifier=lambda q: (False, 'not today'))
    numbered(toy, 'abc')
    try:
        raise LookupError('outside')
    except LookupError as outside:
        was = outside
        with on_error('fallback'), pytest.raises(Broken, match='c') as caught:
            toy.ran()
    assert caught.value.__context__ is was
    assert listed(caught.value)[0] == ['a', 'b', 'c']


def test_one_exception_object_raised_by_all_is_no_circle():
    toy = Toy(default_verifier=lambda q: (False, 'not today'))
    error = Broken('shared')
    for name in 'abc':
        toy.add(name, f=raising(error), retryable=(Broken,))
    with on_error('fallback'), pytest.raises(Broken) as caught:
        toy.ran()
    assert caught.value is error
    assert error.__context__ is None
    assert error.__cause__ is None
    assert listed(error)[0] == ['a', 'b', 'c']


def test_where_nobody_else_takes_the_call_its_own_error_is_raised():
    toy = Toy(default_verifier=lambda q: (False, 'not today'))
    toy.add('a', f=raising(Broken), retryable=(Broken,))
    toy.add('b', accepts=lambda self, q: (False, 'never'))
    with on_error('fallback'), pytest.raises(Broken):
        toy.ran()


def test_rejections_between_two_failures_are_respected():
    toy = Toy()
    numbered(toy, 'a')
    toy.add('b', accepts=lambda self, q: (False, 'never'))
    numbered(toy, 'c')
    toy.add('d')
    with on_error('fallback'):
        assert toy.ran() == 'd'


def test_a_demoted_backend_is_still_there_to_fall_back_to():
    toy = Toy(default_verifier=lambda q: (False, 'not today'))
    toy.add('a', prefers=lambda self, q: (False, 'small'))
    toy.add('b', f=raising(Broken), retryable=(Broken,))
    with on_error('fallback'):
        assert toy.ran() == 'a'


@pytest.mark.parametrize(('value', 'ran'), [('1', 'b'), ('0', 'c'), (' yEs ', 'b'), (' oFF ', 'c'), ('perhaps', 'b')])
def test_a_toggle_value_never_seen_does_not_run_the_failed_one_again(value, ran, monkeypatch):
    toy = failing_toy()
    toy.registry.unregister('b')
    toy.add('b', env_var='FLA_FAILURE_B', accepts=lambda self, q: (True, None))
    toy.add('c')
    with on_error('fallback'):
        assert toy.ran() == 'b'
        monkeypatch.setenv('FLA_FAILURE_B', value)
        assert toy.ran() == ran
        assert toy.runs == ['a', 'a']
        assert explain(toy.f, Q, Q)['b'].verdict == ('eligible' if ran == 'b' else 'disabled')


def test_the_arguments_reach_the_next_candidate_unchanged():
    seen = []
    toy = Toy()

    def f(self, q, k, scale=None, flag=False):
        seen.append((q, k, scale, flag))
        if self.backend_type == 'a':
            raise Broken
        return q + 2

    toy.add('a', f=f, retryable=(Broken,))
    toy.add('b', f=f)
    with on_error('fallback'):
        toy.f(Q, k=Q, scale=0.5, flag=True)
    assert [(q is Q, k is Q, scale, flag) for q, k, scale, flag in seen] == [(True, True, 0.5, True)] * 2


def test_a_warning_is_given_once(caplog):
    toy = failing_toy()
    with on_error('fallback'):
        toy.ran()
        toy.ran()
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([t for t in texts if "backend 'a' failed" in t and 'Broken' in t]) == 1


def test_failures_keep_nothing_alive():
    """An exception holds its frames; a frame that held its exceptions would be a cycle, and tensors would wait for the
    garbage collector."""
    toy = Toy()
    kept = []

    def f(self, q, k, scale=None, flag=False):
        scratch = torch.zeros(3)
        kept.append(weakref.ref(scratch))
        raise Broken

    toy.add('a', f=f, retryable=(Broken,))

    def at_once(self, q, k, scale=None, flag=False):
        kept.append(kept[0]() is None)
        return q + 2

    toy.add('b', f=at_once)
    q = torch.zeros(2)
    arguments = weakref.ref(q)
    gc.collect()
    gc.disable()
    try:
        with on_error('fallback'):
            toy.f(q, Q)
            assert kept[1] is True  # the failed attempt's tensors were freed before the next attempt ran
            del q
            assert arguments() is None
            toy2 = Toy(default_verifier=lambda q: (False, 'no'))
            toy2.add('a', f=raising(Broken), retryable=(Broken,))
            toy2.add('b', f=raising(Broken), retryable=(Broken,))
            q = torch.zeros(2)
            arguments = weakref.ref(q)
            with contextlib.suppress(Broken):
                toy2.f(q, Q)
            del q
            assert arguments() is None
    finally:
        gc.enable()


# -- with the other features --------------------------------------------------------------------------------------------


def test_compiled_code_raises_and_counts_nothing():
    toy = failing_toy()
    with on_error('fallback'):
        compiled = torch.compile(lambda q: toy.f(q, q) + 10, backend='eager', fullgraph=True)
        with pytest.raises(Exception, match='Broken'):
            compiled(Q)
        assert health()[f'{toy.op}.f', 'a'].total_failures == 0
        assert toy.ran() == 'b'


def test_the_state_of_a_breaker_recompiles_nothing():
    from torch._dynamo.testing import CompileCounter

    toy = Toy()
    toy.broken = False

    def f(self, q, k, scale=None, flag=False):
        if not torch.compiler.is_dynamo_compiling() and toy.broken:
            raise Broken
        return q * 0 + 1

    toy.add('a', f=f, retryable=(Broken,))
    toy.add('b')
    counter = CompileCounter()
    compiled = torch.compile(lambda q: toy.f(q, q) + 10, backend=counter, fullgraph=True)
    with on_error('fallback'):
        assert compiled(Q)[0, 0] == 11
        assert counter.frame_count == 1
        toy.broken = True
        for state in ('closed',) * 4 + ('open',) * 3:
            toy.ran()
            assert breaker(toy.f, 'a').state == state
            assert compiled(Q)[0, 0] == 11
        assert toy.ran() == 'b'
        breaker(toy.f, 'a').force_open()
        assert compiled(Q)[0, 0] == 11
        breaker(toy.f, 'a').reset()
        assert compiled(Q)[0, 0] == 11
        assert counter.frame_count == 1


def test_a_scope_entered_in_a_compiled_region_compiles():
    toy = Toy()
    toy.add('a', retryable=(Broken,))

    def region(q):
        with on_error('fallback'):
            return toy.f(q, q) + 10

    assert torch.compile(region, backend='eager', fullgraph=True)(Q)[0, 0] == 11


def test_a_scope_entered_in_a_compiled_region_holds_after_a_graph_break():
    toy = failing_toy()

    def region(q):
        with on_error('fallback'):
            torch._dynamo.graph_break()
            return toy.f(q, q) + 10

    eager = torch.compiler.disable(lambda q: toy.f(q, q))

    def region_with_disabled(q):
        with on_error('fallback'):
            return eager(q) + 10

    assert torch.compile(region_with_disabled, backend='eager')(Q)[0, 0] == 12
    with pytest.raises(Broken):  # the code after a graph break is compiled again, and compiled code never falls back
        torch.compile(region, backend='eager')(Q)


def test_bound_functions_follow_and_forced_ones_have_nowhere_to_go():
    toy = failing_toy()
    with on_error('fallback'):
        assert toy.name_of(toy.f.bind(prefer='a')(Q, Q)) == 'b'
        with pytest.raises(Broken):
            toy.f.bind('a')(Q, Q)
        with use_backend('a', op=toy.op), pytest.raises(Broken):
            toy.ran()
        with use_backend('a', 'default', op=toy.op):
            assert toy.ran() == 'default'
    bound = toy.f.bind(on_error='fallback')
    assert toy.name_of(bound(Q, Q)) == 'b'
    with pytest.raises(Broken):
        toy.ran()


def test_resolve_gives_the_bare_callable():
    toy = failing_toy()
    with on_error('fallback'), pytest.raises(Broken):
        toy.f.resolve(Q, Q)(Q, Q)


def test_require_first_forbids_to_fall_back():
    toy = failing_toy()
    with policy_context(Policy(on_error='fallback', require_first=True)), pytest.raises(Broken):
        toy.ran()
    assert toy.runs == ['a']


def test_strict_preference_that_fails_raises_what_failed():
    toy = failing_toy()
    with on_error('fallback'), strict_mode(), prefer_backend('a', op=toy.op), pytest.raises(Broken):
        toy.ran()


def test_the_order_of_a_rule_is_fallen_through_like_any_other():
    toy = Toy()
    numbered(toy, 'a')
    toy.add('b')
    numbered(toy, 'c')
    rules = (Rule(toy.op, ('c', 'a'), 'q.shape[0] >= 4'),)
    with policy_context(Policy(rules=rules, on_error='fallback')), trace() as t:
        assert toy.ran(torch.zeros(4, 2), Q) == 'b'
        assert toy.ran(torch.zeros(2, 2), Q) == 'b'
        assert [record.backend for record in t] == ['c', 'a', 'b', 'a', 'b']
        breaker(toy.f, 'c').force_open()
        decision = explain(toy.f, torch.zeros(4, 2), Q)
        assert (decision['c'].verdict, decision.winner) == ('open', 'a')


def test_a_trace_shows_every_attempt():
    toy = failing_toy()
    with on_error('fallback'), trace() as t:
        assert toy.ran() == 'b'
    assert [record.backend for record in t] == ['a', 'b']
    assert t.last_backend(toy.op) == 'b'


def test_profiler_ranges_show_every_attempt():
    toy = failing_toy()
    with on_error('fallback'), torch.profiler.profile() as profile:
        assert toy.ran() == 'b'
    names = [event.name for event in profile.events() if event.name.startswith('fla::f')]
    assert names == ['fla::f[a]', 'fla::f[b]']


def test_nested_dispatched_functions_each_fall_back():
    inner = failing_toy()
    outer = Toy()
    outer.add('x', f=lambda self, q, k, scale=None, flag=False: q * 0 + inner.f(q, k) * 0 + 1)
    with on_error('fallback'):
        assert outer.ran() == 'x'
    assert inner.runs == ['a']


def test_threads_fall_back_independently():
    toy = Toy()

    def f(self, q, k, scale=None, flag=False):
        if flag:
            raise Broken
        return q * 0 + 1

    toy.add('a', f=f, retryable=(Broken,))
    toy.add('b')
    wrong = []

    def work(flag):
        for _ in range(300):
            if toy.ran(Q, Q, flag=flag) not in (('b',) if flag else ('a', 'b')):
                wrong.append(flag)

    with on_error('fallback'):
        threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_explain_shows_no_failure_before_it_happens():
    toy = failing_toy()
    with on_error('fallback'):
        assert explain(toy.f, Q, Q).winner == 'a'
        toy.ran()
        assert '1 failure' in ' '.join(explain(toy.f, Q, Q)['a'].notes)


def test_another_namespace_reads_its_own_variable(monkeypatch):
    mine = Dispatcher('failing.ops', 'FAILING')
    toy, other = failing_toy(dispatcher=mine), failing_toy()
    monkeypatch.setenv('FAILING_ON_ERROR', 'fallback')
    assert toy.ran() == 'b'
    with pytest.raises(Broken):
        other.ran()


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError('no words')


def test_an_exception_that_cannot_say_what_it_is_moves_on_like_any_other(caplog):
    toy = Toy()
    toy.add('a', f=raising(Speechless), retryable=(Speechless,))
    toy.add('b')
    with on_error('fallback'):
        assert toy.ran() == 'b'
    assert breaker(toy.f, 'a').health.last_error == 'Speechless'
    with pytest.raises(Speechless):
        toy.ran()


@pytest.mark.parametrize('parts', [None, 3, ['text']])
def test_an_exception_with_an_attribute_like_that_of_a_group(parts):
    class Odd(Exception):
        exceptions = parts

    toy = Toy()
    toy.add('a', f=raising(Odd), retryable=(Odd,))
    toy.add('b')
    with on_error('fallback'):
        assert toy.ran() == 'b'


@pytest.mark.skipif(sys.version_info < (3, 11), reason='exception groups are new in Python 3.11')
def test_a_group_that_holds_an_error_of_the_device_is_one():
    toy = Toy()
    group = ExceptionGroup('several', [OSError('a file'), ExceptionGroup('more', [torch.OutOfMemoryError('no room')])])  # noqa: F821
    toy.add('a', f=raising(lambda *_: group), retryable=(Exception,))
    toy.add('b')
    with on_error('fallback'), pytest.raises(ExceptionGroup):  # noqa: F821
        toy.ran()


# -- real operations ----------------------------------------------------------------------------------------------------


def kda_arguments():
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 16, 2, 8) for _ in range(4))
    return q, k, v, -g.abs(), torch.rand(1, 16, 2)


def test_chunk_kda_moves_on_to_the_reference_and_gives_its_numbers():
    from fla.ops.kda import chunk_kda

    class Cutlass(BaseBackend):
        backend_type = 'cutlass'
        retryable = (RuntimeError,)
        runs = 0

        def chunk_kda(self, q, k, v, g, beta, scale=None, output_final_state=False):
            Cutlass.runs += 1
            raise RuntimeError('no kernel of this tile size')

    call = kda_arguments()
    with use_backend('reference', op='kda'):
        wanted, _ = chunk_kda(*call)
    BackendRegistry('kda').register(Cutlass())
    assert explain(chunk_kda, *call).winner == 'cutlass'
    with pytest.raises(RuntimeError, match='tile size'):
        chunk_kda(*call)
    with on_error('fallback', op='kda'), trace() as t:
        for _ in range(6):
            o, _ = chunk_kda(*call)
            assert torch.equal(o, wanted)
    assert Cutlass.runs == 6  # one before, five until its circuit opened
    assert t.last_backend('kda') == 'reference'
    assert breaker('kda.chunk_kda', 'cutlass').state == 'open'
    assert breaker('kda.fused_recurrent_kda', 'default').state == 'closed'
    with on_error('fallback'), pytest.raises(ValueError, match='beta'):
        chunk_kda(*call[:4], call[4][:, :3])
    assert health()['kda.chunk_kda', 'reference'].total_failures == 0


def test_a_decode_step_writes_its_cache_once():
    from fla.modules.convolution import causal_conv1d_update

    class Vendor(BaseBackend):
        backend_type = 'conv_vendor'
        retryable = (RuntimeError,)

        def causal_conv1d_update(self, x, cache, residual=None, weight=None, bias=None, activation=None):
            cache.add_(1)
            raise RuntimeError('half way through')

    BackendRegistry('modules').register(Vendor())
    x, cache, weight = torch.ones(2, 4), torch.zeros(2, 4, 3), torch.ones(4, 3)
    with on_error('fallback'), pytest.raises(RuntimeError, match='half way'):
        causal_conv1d_update(x, cache, None, weight)
    assert torch.equal(cache, torch.ones(2, 4, 3))  # once, by the backend that failed


def test_tritons_own_errors_are_retryable_for_defaults_written_in_it(monkeypatch):
    triton_errors = pytest.importorskip('triton.errors')
    if not hasattr(triton_errors, 'TritonError'):
        pytest.skip('this Triton has no common class of errors')
    from triton.runtime.errors import OutOfResources

    from fla.backends import runs_on_triton

    monkeypatch.setenv('TRITON_INTERPRET', '1')
    registry = BackendRegistry('failing_triton')

    @dispatch('failing_triton', default_verifier=runs_on_triton)
    def f(x: torch.Tensor) -> torch.Tensor:
        raise OutOfResources(300_000, 200_000, 'shared memory')

    class Plain(BaseBackend):
        backend_type = 'plain'
        kind = 'reference'

        def f(self, x):
            return x + 1

    registry.register(Plain())
    x = torch.zeros(1)
    with pytest.raises(OutOfResources):
        f(x)
    with on_error('fallback'):
        assert f(x) == 1
    assert health()['failing_triton.f', 'default'].failures == 1
