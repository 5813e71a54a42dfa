"""Failures through the public door: who takes over, what is never retried, the breaker, explain. Every test says who ran."""

import json
import logging
import os
import threading

import pytest
import torch

from fla.ops.backends import (
    BreakerSettings,
    NoBackendError,
    Policy,
    add_breaker_listener,
    breaker,
    default_dispatcher,
    explain,
    health,
    on_error,
    policy_context,
    prefer_backend,
    refresh,
    reset_policy,
    set_policy,
    trace,
    use_backend,
)
from tests.backends.test_fork import in_child
from tests.backends.toy import Q, Toy


class Failing:
    """An implementation that raises what `error` makes, while there is one; counts its runs."""

    def __init__(self, number, error):
        self.number, self.error, self.runs = number, error, 0

    def method(self):
        def f(backend, q, k, scale=None, flag=False):
            self.runs += 1
            if self.error is not None:
                raise self.error()
            return q * 0 + self.number

        return f


class Kernel(RuntimeError):
    """What a vendor's package raises."""


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def failing(toy, name, error=Kernel, retryable=(Kernel,), **attributes):
    kernel = Failing(len(toy.names), error)
    toy.add(name, f=kernel.method(), retryable=retryable, **attributes)
    return kernel


@pytest.fixture
def toy():
    return Toy()


@pytest.fixture
def clock():
    default_dispatcher().breakers.clock = made = Clock()
    return made


def state(toy, name):
    return breaker(toy.f, name).state


# -- raise, or fall back ------------------------------------------------------------------------------------------------


def test_by_default_a_failure_raises_and_there_is_no_try(toy):
    kernel = failing(toy, 'a')
    with pytest.raises(Kernel):
        toy.ran()
    assert kernel.runs == 1
    source = next(iter(toy.f.__fla_entry__._plans.values())).source
    assert not any(word in source for word in ('try', 'breaker', 'failures', 'meter'))


def by_scope(toy, monkeypatch):
    return on_error('fallback')


def by_scope_of_operation(toy, monkeypatch):
    return on_error('fallback', op=toy.op)


def by_policy(toy, monkeypatch):
    return policy_context(Policy(on_error='fallback'))


def by_environment(toy, monkeypatch):
    monkeypatch.setenv('FLA_ON_ERROR', ' Fallback ')
    refresh()
    return trace()


@pytest.mark.parametrize('way', [by_scope, by_scope_of_operation, by_policy, by_environment])
def test_the_next_candidate_takes_over(toy, way, monkeypatch, caplog):
    first, second = failing(toy, 'a'), failing(toy, 'b')
    toy.add('c')
    with way(toy, monkeypatch):
        assert toy.ran() == 'c'
    assert (first.runs, second.runs) == (1, 1)
    assert "backend 'a' failed, and the next candidate" in caplog.text


def test_raise_in_an_inner_scope(toy):
    failing(toy, 'a')
    with on_error('fallback'):
        assert toy.ran() == 'default'
        with on_error('raise'), pytest.raises(Kernel):
            toy.ran()
        assert toy.ran() == 'default'


def test_a_bad_value_of_the_variable_counts_as_unset(toy, monkeypatch, caplog):
    failing(toy, 'a')
    monkeypatch.setenv('FLA_ON_ERROR', 'falback')
    refresh()
    with pytest.raises(Kernel):
        toy.ran()
    assert "FLA_ON_ERROR='falback' counts as unset: it must be raise or fallback. Did you mean 'fallback'?" in caplog.text


@pytest.mark.parametrize('bad', ['fall', True, ('fallback',)])
def test_a_bad_action_is_refused(bad):
    with pytest.raises(ValueError, match="'raise'"):
        Policy(on_error=bad)
    with pytest.raises(ValueError, match="'raise'"):
        on_error(bad)


def test_the_candidate_behind_is_asked_whether_it_takes_the_call(toy):
    failing(toy, 'a')
    toy.add('b', accepts=lambda self, flag: (not flag, 'flag'))
    with on_error('fallback'):
        assert toy.ran() == 'b'
        assert toy.ran(flag=True) == 'default'


def test_a_demoted_candidate_takes_over_and_is_taken_over(toy):
    late = failing(toy, 'a', f_prefers=lambda self: (False, 'slow'))
    failing(toy, 'b')
    with on_error('fallback'), pytest.raises(Kernel):
        # the default, which stands before what is demoted, takes it: nothing more is asked
        with use_backend('a', 'b', op=toy.op):
            toy.ran()
    with on_error('fallback'):
        assert toy.ran() == 'default'
    assert late.runs == 1


# -- what is never retried ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'error',
    [
        lambda: TypeError('q must be a tensor'),
        lambda: ValueError('K must be 128'),
        lambda: NoBackendError('an inner operation'),
        lambda: OSError('not declared'),
        lambda: MemoryError(),
        lambda: torch.OutOfMemoryError('CUDA out of memory'),
        lambda: RuntimeError('CUDA error: an illegal memory access was encountered'),
        lambda: RuntimeError('CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx'),
        lambda: RuntimeError('cuDNN error: CUDNN_STATUS_NOT_SUPPORTED'),
        lambda: RuntimeError('Triton Error [CUDA]: device kernel image is invalid'),
        lambda: torch.AcceleratorError('device-side assert') if hasattr(torch, 'AcceleratorError') else MemoryError(),
        lambda: KeyboardInterrupt(),
    ],
)
def test_errors_that_raise_and_do_not_count(toy, error):
    kernel = failing(toy, 'a', error, retryable=(RuntimeError, UnicodeError))
    kind = type(error())
    with on_error('fallback', breaker=BreakerSettings(threshold=1)), pytest.raises(kind):
        toy.ran()
    assert kernel.runs == 1
    assert state(toy, 'a') == 'closed'
    assert breaker(toy.f, 'a').health.total_failures == 0


def test_an_error_caused_by_the_device_is_one_of_the_device(toy):
    def error():
        made = Kernel('launch')
        made.__cause__ = torch.OutOfMemoryError('CUDA out of memory')
        return made

    failing(toy, 'a', error)
    with on_error('fallback'), pytest.raises(Kernel):
        toy.ran()


def test_a_declared_subclass_of_value_error_is_the_backends(toy):
    class Unsupported(ValueError):
        pass

    failing(toy, 'a', Unsupported, retryable=(Unsupported,))
    with on_error('fallback'):
        assert toy.ran() == 'default'


def test_a_function_that_mutates_never_runs_twice():
    toy = Toy(mutates=('q',))
    kernel = failing(toy, 'a')
    with on_error('fallback', breaker=BreakerSettings(threshold=2)):
        for _ in range(2):
            with pytest.raises(Kernel):
                toy.ran()
        assert kernel.runs == 2
        # the breaker counts, and acts before anything ran
        assert toy.ran() == 'default'
    assert kernel.runs == 2


def test_a_bad_call_is_refused_by_check_and_counts_for_nobody():
    def check(q):
        if q.dim() != 2:
            raise ValueError('q must have 2 dimensions')

    toy = Toy(check=check)
    kernel = failing(toy, 'a', None)
    with on_error('fallback'), pytest.raises(ValueError, match='2 dimensions'):
        toy.f(torch.zeros(3), Q)
    assert kernel.runs == 0
    assert all(one.total_failures == 0 for one in health().values())


def test_a_forced_choice_runs_or_raises(toy):
    kernel = failing(toy, 'a')
    toy.add('b')
    with on_error('fallback', breaker=BreakerSettings(threshold=1)):
        assert toy.ran() == 'b'
        assert state(toy, 'a') == 'open'
        with use_backend('a', op=toy.op), pytest.raises(Kernel):
            toy.ran()
        with pytest.raises(Kernel):
            toy.f.bind(backend='a')(Q, Q)
    assert kernel.runs == 3


def test_require_first_does_not_fall_back(toy):
    failing(toy, 'a')
    with policy_context(Policy(on_error='fallback', require_first=True)), pytest.raises(Kernel):
        toy.ran()


def test_backward_does_not_fall_back(toy):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            return q * 1

        @staticmethod
        def backward(ctx, grad):
            return toy.f(grad, grad)

    kernel = failing(toy, 'a')
    x = torch.ones(2, requires_grad=True)
    with on_error('fallback'), pytest.raises(Kernel):
        Function.apply(x).sum().backward()
    assert kernel.runs == 1


# -- what was raised -----------------------------------------------------------------------------------------------------


def test_when_all_fail_the_last_raises_with_the_earlier_in_order(toy):
    failing(toy, 'a', lambda: Kernel('first'))
    failing(toy, 'b', lambda: Kernel('second'))
    with (
        policy_context(Policy(on_error='fallback', deny=('default',))),
        pytest.raises(Kernel, match='second') as caught,
    ):
        toy.ran()
    assert str(caught.value.__context__) == 'first'
    assert caught.value.__context__.__context__ is None
    if hasattr(caught.value, '__notes__'):
        assert caught.value.__notes__ == [f'{toy.op}.f: tried a, b, in this order']


def test_when_the_others_do_not_take_the_call_the_failure_raises(toy):
    failing(toy, 'a', lambda: Kernel('only'))
    toy.add('b', accepts=lambda self: (False, 'no'))
    with policy_context(Policy(on_error='fallback', deny=('default',))), pytest.raises(Kernel, match='only'):
        toy.ran()


def test_what_the_caller_was_handling_stays_the_context(toy):
    failing(toy, 'a', lambda: Kernel('first'))
    failing(toy, 'b', lambda: Kernel('second'))
    with policy_context(Policy(on_error='fallback', deny=('default',))):
        try:
            raise KeyError('outside')
        except KeyError:
            with pytest.raises(Kernel) as caught:
                toy.ran()
    chain, one = [], caught.value
    while one is not None:
        chain.append(one)
        one = one.__context__
    assert [str(one) for one in chain] == ['second', 'first', "'outside'"]


# -- the breaker -----------------------------------------------------------------------------------------------------------


def test_it_opens_and_probes_and_closes(toy, clock):
    kernel = failing(toy, 'a')
    heard = []
    add_breaker_listener(lambda event: heard.append((event.function, event.backend, event.old, event.new)))
    with on_error('fallback', breaker=BreakerSettings(threshold=3, cooldown=10)):
        for _ in range(5):
            assert toy.ran() == 'default'
        assert kernel.runs == 3
        clock.now += 11
        assert toy.ran() == 'default'
        assert kernel.runs == 4
        kernel.error = None
        assert toy.ran() == 'default'
        clock.now += 11
        assert toy.ran() == 'a'
        assert toy.ran() == 'a'
    key = f'{toy.op}.f', 'a'
    assert heard == [
        (*key, 'closed', 'open'),
        (*key, 'open', 'half_open'),
        (*key, 'half_open', 'open'),
        (*key, 'open', 'half_open'),
        (*key, 'half_open', 'closed'),
    ]
    assert health()[key].opened == 2


def test_a_success_between_failures_keeps_it_closed(toy):
    kernel = failing(toy, 'a')
    with on_error('fallback', breaker=BreakerSettings(threshold=2)):
        for _ in range(4):
            kernel.error = Kernel
            assert toy.ran() == 'default'
            kernel.error = None
            assert toy.ran() == 'a'
    assert state(toy, 'a') == 'closed'


def test_one_probe_under_many_threads(toy, clock):
    entered, let_go = threading.Event(), threading.Event()
    kernel = failing(toy, 'a')

    def wait():
        entered.set()
        assert let_go.wait(30)
        return Kernel('still')

    results = []
    with on_error('fallback', breaker=BreakerSettings(threshold=1, cooldown=10)):
        toy.ran()
        clock.now += 11
        kernel.error, kernel.runs = wait, 0
        threads = [threading.Thread(target=lambda: results.append(toy.ran())) for _ in range(8)]
        for thread in threads:
            thread.start()
        assert entered.wait(30)
        while len(results) < 7:  # all others are served meanwhile
            threads[0].join(0.01)
        let_go.set()
        for thread in threads:
            thread.join()
    assert results == ['default'] * 8
    assert kernel.runs == 1


def test_an_undecided_probe_does_not_lock_it_out(toy, clock):
    kernel = failing(toy, 'a')
    with on_error('fallback', breaker=BreakerSettings(threshold=1, cooldown=10)):
        toy.ran()
        clock.now += 11
        kernel.error = lambda: ValueError('an argument')
        with pytest.raises(ValueError, match='an argument'):
            toy.ran()
        kernel.error = None
        assert toy.ran() == 'a'


def test_by_hand(toy):
    kernel = failing(toy, 'a', None)
    with on_error('fallback'):
        assert toy.ran() == 'a'
        breaker(toy.f, 'a').force_open()
        assert toy.ran() == 'default'
        breaker(f'{toy.op}.f', 'A').force_close()
        kernel.error = Kernel
        for _ in range(9):
            assert toy.ran() == 'default'
        assert kernel.runs == 10
        breaker(toy.f, 'a').reset()
        assert health()[f'{toy.op}.f', 'a'].total_failures == 0


def test_a_backend_that_declares_nothing_can_be_kept_out(toy):
    toy.add('a')
    with on_error('fallback'):
        breaker(toy.f, 'a').force_open()
        assert toy.ran() == 'default'


def test_an_unknown_backend_is_named(toy):
    toy.add('tilelang')
    with pytest.raises(LookupError, match="Did you mean 'tilelang'"):
        breaker(toy.f, 'tilelnag')


def test_when_nothing_is_left_the_error_says_why(toy):
    failing(toy, 'a')
    with policy_context(Policy(on_error='fallback', deny=('default',), breaker={'threshold': 1})):
        with pytest.raises(Kernel):
            toy.ran()
        with pytest.raises(NoBackendError, match=r'a .*failing .*circuit is open for .* the last Kernel'):
            toy.ran()


@pytest.mark.parametrize('change', [lambda: set_policy(Policy(on_error='fallback')), reset_policy, refresh])
def test_a_policy_change_clears_it(toy, change):
    failing(toy, 'a')
    with on_error('fallback', breaker=BreakerSettings(threshold=1)):
        toy.ran()
        assert state(toy, 'a') == 'open'
        change()
        assert state(toy, 'a') == 'closed'


def test_a_scope_does_not_clear_it(toy):
    kernel = failing(toy, 'a')
    for _ in range(3):
        with on_error('fallback', breaker=BreakerSettings(threshold=1)):
            assert toy.ran() == 'default'
    assert kernel.runs == 1


def test_a_wish_that_is_kept_out_is_warned_about(toy, caplog):
    failing(toy, 'a')
    with on_error('fallback', breaker=BreakerSettings(threshold=1)), prefer_backend('a', op=toy.op):
        toy.ran()
        assert toy.ran() == 'default'
    assert "backend 'a' was asked for" in caplog.text


def test_after_fork(toy, clock):
    kernel = failing(toy, 'a')
    with on_error('fallback', breaker=BreakerSettings(threshold=1, cooldown=10)):
        toy.ran()
        clock.now += 11
        hold, held = threading.Event(), threading.Event()

        def wait():
            held.set()
            hold.wait(30)
            return Kernel()

        kernel.error = wait
        prober = threading.Thread(target=toy.ran)
        prober.start()
        assert held.wait(30)
        assert state(toy, 'a') == 'half_open'

        def child():
            kernel.error = None
            return toy.ran()  # the thread of the probe does not exist here

        ran = in_child(child)
        hold.set()
        prober.join()
    assert ran == 'a'
    assert state(toy, 'a') == 'open'


# -- explain, trace, compile ---------------------------------------------------------------------------------------------


def test_explain_shows_it(toy, clock):
    failing(toy, 'a')
    with on_error('fallback', breaker=BreakerSettings(threshold=2, cooldown=10)):
        assert explain(toy.f, Q, Q)['a'].notes == ()
        toy.ran()
        decision = explain(toy.f, Q, Q)
        assert decision.winner == 'a'
        assert 'its circuit is closed, 1 failures in a row' in decision['a'].notes
        toy.ran()
        decision = explain(toy.f, Q, Q)
        assert (decision.winner, decision['a'].verdict, decision['a'].source) == ('default', 'failing', 'circuit breaker')
        assert 'open for 10.0 s more: 2 failures in a row, the last Kernel' in decision['a'].reason
        assert toy.f.resolve(Q, Q)(Q, Q).sum() == 0
        clock.now += 11
        decision = explain(toy.f, Q, Q)
        assert decision.winner == 'a'
        assert 'its circuit is open; this call would be the probe' in decision['a'].notes
        assert state(toy, 'a') == 'open'  # asking changes nothing
    assert explain(toy.f, Q, Q).winner == 'a'  # without 'fallback' nobody asks the breaker
    json.dumps({f'{f} {b}': one.to_dict() for (f, b), one in health().items()})


def test_every_attempt_is_traced(toy):
    failing(toy, 'a')
    with on_error('fallback'), trace() as t:
        toy.ran()
    assert [record.backend for record in t] == ['a', 'default']


def test_a_compiled_caller_never_falls_back_and_never_compiles_again(toy):
    """No state of a breaker is read in compiled code: opening, forcing and probing cost it nothing."""
    toy.add('a', retryable=(Kernel,))
    frames = []

    def count(graph, inputs):
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(toy.f, backend=count, fullgraph=True)
    with on_error('fallback'):
        assert toy.name_of(compiled(Q, Q)) == 'a'
        assert len(frames) == 1
        one = breaker(toy.f, 'a')
        for change in (one.force_open, one.force_close, one.reset):
            change()
            assert toy.name_of(compiled(Q, Q)) == 'a'
        for _ in range(9):
            one.failed(0, 'Kernel', BreakerSettings())
        assert one.state == 'open'
        assert toy.ran() == 'default'
        assert toy.name_of(compiled(Q, Q)) == 'a'
    assert len(frames) == 1


def test_a_scope_inside_a_compiled_region(toy):
    toy.add('a', retryable=(Kernel,))

    @torch.compile(backend='eager', fullgraph=True)
    def compiled(q):
        with on_error('fallback', breaker=BreakerSettings(threshold=2)):
            return toy.f(q, q)

    assert toy.name_of(compiled(Q)) == 'a'


def test_fake_tensors_do_not_count(toy):
    from torch._subclasses.fake_tensor import FakeTensorMode

    failing(toy, 'a')
    with on_error('fallback', breaker=BreakerSettings(threshold=1)):
        with FakeTensorMode() as mode, pytest.raises(Kernel):
            toy.f(mode.from_tensor(Q), mode.from_tensor(Q))
        assert state(toy, 'a') == 'closed'


def test_nothing_of_a_failed_attempt_is_kept(toy):
    import gc
    import weakref

    class Big:
        pass

    made = []

    def error():
        made.append(weakref.ref(big := Big()))
        failure = Kernel()
        failure.big = big
        return failure

    failing(toy, 'a', error)
    gc.disable()
    try:
        with on_error('fallback'):
            assert toy.ran() == 'default'
        assert made[0]() is None
    finally:
        gc.enable()


def test_it_is_said_once(toy, caplog):
    failing(toy, 'a')
    caplog.set_level(logging.WARNING)
    with on_error('fallback'):
        for _ in range(3):
            toy.ran()
    assert caplog.text.count('failed, and the next candidate') == 1


def test_threads_that_fail_at_random_get_right_results(toy):
    """Nothing is lost or run twice: each call is served once, by whoever did not fail."""
    calls = [0]
    guard = threading.Lock()

    def implementation(self, q, k, scale=None, flag=False):
        with guard:
            calls[0] += 1
            if calls[0] % 3 == 0:
                raise Kernel
        return q * 0 + 1

    toy.add('a', f=implementation, retryable=(Kernel,))
    results = []

    def work():
        results.extend(toy.ran() for _ in range(200))

    with on_error('fallback', breaker=BreakerSettings(threshold=10)):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 800
    assert calls[0] >= results.count('a')
    assert set(results) == {'a', 'default'}
    failed = health()[f'{toy.op}.f', 'a'].total_failures
    assert results.count('default') >= failed == calls[0] - results.count('a')


pytestmark = pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs os.fork')
