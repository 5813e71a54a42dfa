"""Backends written for FLA's own dispatcher run unchanged in eager mode.

The classes below are written as FLA writes them (`fla/ops/*/backends/` of flash-linear-attention 0.5): full-signature
verifiers that return tuples, `*args, **kwargs`, overridden `is_available`, `is_enabled` and `verify`, class attributes only.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from functools import cache

import pytest
import torch

from fla.backends import BackendRegistry, BaseBackend, dispatch, explain, strict_mode
from fla.backends.backend.base import format_reason
from fla.backends.core.errors import BackendBugError

Q = torch.zeros(1, 4, 2, 8)
_numbers = itertools.count()


@pytest.fixture
def op():
    """`chunk(...)` dispatched for an operation of this test's own, and its registry."""
    name = f'contract_{next(_numbers)}'

    @dispatch(name)
    def chunk(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None = None,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_gate_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        lower_bound: float = -5.0,
        chunk_size: int = 64,
        mode: str = 'chunk',
        window: tuple[int, int] = (-1, 0),
        **kwargs,
    ):
        return 'default', kwargs

    return chunk, BackendRegistry(name)


class FullSignature(BaseBackend):
    """As FlashKDA: everything spelled out, the rest swallowed by **kwargs, `allow_neg_eigval` forgotten."""

    backend_type = 'full'
    package_name = 'torch'
    env_var = 'FLA_CONTRACT_FULL'
    default_enable = True
    priority = 3

    def chunk_verifier(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None = None,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_gate_in_kernel: bool = False,
        lower_bound: float = -5.0,
        **kwargs,
    ) -> tuple[bool, str | None]:
        if torch.is_grad_enabled() and q.requires_grad:
            return False, 'FlashKDA only supports inference'
        if q.shape[-1] != 8:
            return False, f'FlashKDA requires K=8, got K={q.shape[-1]}'
        return True, None

    def chunk(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None = None,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_gate_in_kernel: bool = False,
        lower_bound: float = -5.0,
        **kwargs,
    ):
        return 'full', {'scale': scale, 'flag': use_gate_in_kernel, 'lower_bound': lower_bound, 'kwargs': kwargs}


def test_register_and_call(op):
    chunk, registry = op
    registry.register(FullSignature())
    name, got = chunk(Q, Q, Q, scale=2.0, use_gate_in_kernel=True, lower_bound=-3.0)
    assert name == 'full'
    assert (got['scale'], got['flag'], got['lower_bound']) == (2.0, True, -3.0)
    assert chunk(Q[..., :4], Q, Q)[0] == 'default'
    assert explain(chunk, Q[..., :4], Q, Q)['full'].reason == 'FlashKDA requires K=8, got K=4'
    assert chunk(Q.clone().requires_grad_(), Q, Q)[0] == 'default'


def test_positional_calls_reach_the_right_parameters(op):
    """FLA passes positions on, so that a method whose order differs misreads them (its D3)."""
    chunk, registry = op
    registry.register(FullSignature())
    name, got = chunk(Q, Q, Q, None, 0.5, None, False, True, False, -2.0)
    assert name == 'full'
    assert (got['scale'], got['flag'], got['lower_bound']) == (0.5, True, -2.0)


@pytest.mark.parametrize('value', ['0', '1', None])
def test_class_attributes_toggle_and_default(op, monkeypatch, value):
    chunk, registry = op
    registry.register(FullSignature())
    if value is not None:
        monkeypatch.setenv('FLA_CONTRACT_FULL', value)
    assert chunk(Q, Q, Q)[0] == ('default' if value == '0' else 'full')
    monkeypatch.setattr(FullSignature, 'default_enable', False)
    assert chunk(Q, Q, Q)[0] == ('full' if value == '1' else 'default')


@pytest.mark.parametrize(
    ('argument', 'value'),
    [
        ('allow_neg_eigval', True),
        ('allow_neg_eigval', 1),
        ('allow_neg_eigval', None),
        ('chunk_size', 7),
        ('chunk_size', None),
        ('mode', 'fused'),
        ('window', (-1, 1)),
        ('window', None),
    ],
)
def test_an_argument_the_method_lacks_is_refused_instead_of_dropped(op, argument, value):
    chunk, registry = op
    registry.register(FullSignature())
    assert chunk(Q, Q, Q, **{argument: value})[0] == 'default'
    report = explain(chunk, Q, Q, Q, **{argument: value})['full']
    assert report.verdict == 'rejected'
    assert f'argument {argument} is not supported' in report.reason


def test_the_rest_of_the_public_function_reaches_the_rest_of_the_method(op):
    chunk, registry = op
    registry.register(FullSignature())
    assert chunk(Q, Q, Q, head_first=False)[1]['kwargs']['head_first'] is False


@pytest.mark.parametrize(
    ('argument', 'value'), [('allow_neg_eigval', False), ('chunk_size', 64), ('mode', 'ch' + 'unk'), ('window', (-1, 0))]
)
def test_an_argument_the_method_lacks_may_be_given_its_default(op, argument, value):
    chunk, registry = op
    registry.register(FullSignature())
    assert chunk(Q, Q, Q, **{argument: value})[0] == 'full'


class Narrow(BaseBackend):
    """A method that names a few parameters and takes no rest."""

    backend_type = 'narrow'

    def chunk_verifier(self, q, *, chunk_size):
        return chunk_size == 64, 'only 64'

    def chunk(self, v, q, k):
        return 'narrow', (q, k, v)


def test_methods_that_name_a_few_parameters_in_their_own_order(op):
    chunk, registry = op
    registry.register(Narrow())
    q, k, v = Q, Q + 1, Q + 2
    name, got = chunk(q, k, v)
    assert name == 'narrow'
    assert got == (q, k, v) or all(a is b for a, b in zip(got, (q, k, v), strict=True))
    assert chunk(k=k, v=v, q=q)[0] == 'narrow'
    for extra in ({'g': Q}, {'scale': 1.0}, {'initial_state': Q}, {'output_final_state': True}, {'unheard_of': 1}):
        assert chunk(q, k, v, **extra)[0] == 'default'


class Ascend(BaseBackend):
    """As the Triton-Ascend backends: everything is `*args, **kwargs`, looked up by hand."""

    backend_type = 'ascend'
    priority = 0

    def chunk_verifier(self, *args, **kwargs):
        if kwargs.get('chunk_size', 64) != 64:
            return False, 'chunk_size'
        if len(args) != 3:
            return False, f'expected q, k, v by position, got {len(args)}'
        return True, None

    def chunk(self, *args, **kwargs):
        return 'ascend', (args, kwargs)


def test_star_arguments(op):
    chunk, registry = op
    registry.register(Ascend())
    name, (args, kwargs) = chunk(Q, k=Q, v=Q)
    assert name == 'ascend'
    assert len(args) == 3
    assert all(a is Q for a in args)
    assert kwargs['chunk_size'] == 64
    assert kwargs['mode'] == 'chunk'
    assert chunk(Q, Q, Q, chunk_size=128)[0] == 'default'
    assert chunk(Q, Q, Q, None, 0.1)[0] == 'default', '**kwargs does not count as honouring'
    assert chunk(Q, Q, Q, mode='fused')[0] == 'default'


class Wrapping(BaseBackend):
    """`functools.wraps` says which parameters a method honours, although it takes `*args, **kwargs`."""

    backend_type = 'wrapping'

    @functools.wraps(FullSignature.chunk)
    def chunk(self, *args, **kwargs):
        return 'wrapping', kwargs


def test_a_wrapped_method_honours_what_it_wraps(op):
    chunk, registry = op
    registry.register(Wrapping())
    assert chunk(Q, Q, Q, scale=0.1)[0] == 'wrapping'
    assert chunk(Q, Q, Q, allow_neg_eigval=True)[0] == 'default'


@pytest.mark.parametrize('answer', [True, False])
@pytest.mark.parametrize('form', ['class', 'cached', 'cache outside', 'static', 'instance', 'verdict'])
def test_is_available_overrides(op, form, answer):
    chunk, registry = op
    asked = []

    def is_available(*_):
        asked.append(1)
        return answer if form != 'verdict' else (answer, 'no nvcc')

    forms = {
        'class': classmethod(is_available),
        'cached': classmethod(cache(is_available)),
        'static': staticmethod(is_available),
        'instance': is_available,
        'verdict': classmethod(is_available),
    }
    if form == 'cache outside':
        forms[form] = staticmethod(cache(is_available))
    cls = type('Overriding', (FullSignature,), {'backend_type': 'over', 'is_available': forms[form]})
    backend = cls()
    registry.register(backend)
    for _ in range(3):
        assert chunk(Q, Q, Q)[0] == ('full' if answer else 'default')
    assert len(asked) == 1
    if form != 'instance':
        assert backend.can_use() is answer
        assert cls.can_use() is answer
    if form == 'verdict' and not answer:
        assert explain(chunk, Q, Q, Q)['over'].reason == 'no nvcc'


def test_an_is_available_that_raises_is_a_reason(op, caplog):
    chunk, registry = op

    def is_available(cls):
        raise OSError('libcuda.so.1: cannot open shared object file')

    registry.register(type('Broken', (FullSignature,), {'is_available': classmethod(is_available)})())
    for _ in range(3):
        assert chunk(Q, Q, Q)[0] == 'default'
    assert 'libcuda.so.1' in explain(chunk, Q, Q, Q)['full'].reason
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


class TileLang(FullSignature):
    """As FLA's TileLang backends: `is_enabled` reads the toggle itself and has a default of its own."""

    backend_type = 'tilelang'
    env_var = 'FLA_CONTRACT_TILELANG'

    @classmethod
    def is_enabled(cls) -> bool:
        if cls.env_var in os.environ:
            return os.environ.get(cls.env_var) != '0'
        return False


class Literal(FullSignature):
    backend_type = 'literal'
    env_var = None

    @classmethod
    def is_enabled(cls) -> bool:
        return os.environ.get('FLA_CONTRACT_LITERAL', '0') == '1'


class Elsewhere(FullSignature):
    backend_type = 'elsewhere'
    env_var = None
    switch = False

    @classmethod
    def is_enabled(cls) -> bool:
        return Elsewhere.switch


def test_an_overridden_is_enabled_is_live(op, monkeypatch):
    chunk, registry = op
    registry.register(TileLang())
    assert chunk(Q, Q, Q)[0] == 'default'
    monkeypatch.setenv('FLA_CONTRACT_TILELANG', '1')
    assert chunk(Q, Q, Q)[0] == 'full'
    monkeypatch.setenv('FLA_CONTRACT_TILELANG', '0')
    assert chunk(Q, Q, Q)[0] == 'default'
    monkeypatch.delenv('FLA_CONTRACT_TILELANG')
    assert chunk(Q, Q, Q)[0] == 'default'


def test_an_overridden_is_enabled_with_a_literal_name_is_live(op, monkeypatch):
    chunk, registry = op
    registry.register(Literal())
    for value, runs in [('1', 'full'), ('0', 'default'), ('true', 'default'), ('1', 'full')]:
        monkeypatch.setenv('FLA_CONTRACT_LITERAL', value)
        assert chunk(Q, Q, Q)[0] == runs


def test_an_overridden_is_enabled_that_reads_something_else_is_asked_per_call(op, monkeypatch):
    chunk, registry = op
    registry.register(Elsewhere())
    assert chunk(Q, Q, Q)[0] == 'default'
    type.__setattr__(Elsewhere, 'switch', True)
    try:
        assert chunk(Q, Q, Q)[0] == 'full'
    finally:
        type.__setattr__(Elsewhere, 'switch', False)
    assert chunk(Q, Q, Q)[0] == 'default'


@pytest.mark.parametrize('form', ['class', 'cached', 'static', 'instance'])
def test_is_enabled_forms(op, form):
    chunk, registry = op

    def no(*_):
        return False

    forms = {'class': classmethod(no), 'cached': classmethod(cache(no)), 'static': staticmethod(no), 'instance': no}
    registry.register(type('Off', (FullSignature,), {'is_enabled': forms[form]})())
    assert chunk(Q, Q, Q)[0] == 'default'
    assert explain(chunk, Q, Q, Q)['full'].verdict == 'disabled'


def test_can_use_is_a_class_method_as_in_fla(monkeypatch):
    assert FullSignature.can_use() is True
    assert FullSignature().can_use() is True
    monkeypatch.setenv('FLA_CONTRACT_FULL', '0')
    assert FullSignature.can_use() is False
    assert type('Missing', (FullSignature,), {'package_name': 'surely_not_installed_zz'}).can_use() is False


def test_verify_is_a_convenience():
    backend = FullSignature()
    assert backend.verify('chunk', Q, Q, Q) == (True, None)
    assert backend.verify('chunk', Q[..., :4], Q, Q)[0] is False
    assert backend.verify('unheard_of', Q) == (True, None)


class Verifying(FullSignature):
    """Overrides `verify`, which FLA's dispatcher calls for every function."""

    backend_type = 'verifying'
    seen: list = []

    def verify(self, func_name, *args, **kwargs):
        Verifying.seen.append((func_name, len(args), sorted(kwargs)))
        if kwargs.get('scale') == 3.0:
            return False, 'not three'
        return super().verify(func_name, *args, **kwargs)


def test_an_overridden_verify_is_asked(op):
    chunk, registry = op
    registry.register(Verifying())
    assert chunk(Q, Q, Q)[0] == 'full'
    assert Verifying.seen[-1][:2] == ('chunk', 3)
    assert chunk(Q, Q, Q, scale=3.0)[0] == 'default'
    assert explain(chunk, Q, Q, Q, scale=3.0)['verifying'].reason == 'not three'
    assert chunk(Q[..., :4], Q, Q)[0] == 'default'
    assert chunk.resolve(Q, Q, Q)(Q, Q, Q)[0] == 'full'


@pytest.mark.parametrize(
    'answer', [True, None, 'yes', 1, (1, None), (), ('yes', None), (None, 'no'), [True], (torch.tensor(True), None)]
)
def test_only_true_first_accepts_and_anything_else_is_reported(op, caplog, answer):
    chunk, registry = op
    registry.register(type('Odd', (FullSignature,), {'chunk_verifier': lambda self, q: answer})())
    accepts = isinstance(answer, list)
    for _ in range(3):
        assert chunk(Q, Q, Q)[0] == ('full' if accepts else 'default')
    said = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(said) == (0 if accepts else 1)
    if not accepts:
        assert explain(chunk, Q, Q, Q)['full'].verdict == 'bug'
        with strict_mode():
            with pytest.raises(BackendBugError):
                chunk(Q, Q, Q)


@pytest.mark.parametrize('answer', [(False, 'reason'), (False, None), (False, ''), (False,), (False, 'a', 'b')])
def test_a_false_first_rejects_quietly(op, caplog, answer):
    chunk, registry = op
    registry.register(type('No', (FullSignature,), {'chunk_verifier': lambda self, q: answer})())
    assert chunk(Q, Q, Q)[0] == 'default'
    assert explain(chunk, Q, Q, Q)['full'].verdict == 'rejected'
    assert not caplog.records


def test_a_verifier_that_raises_is_reported_once(op, caplog):
    chunk, registry = op

    def chunk_verifier(self, q):
        return q.no_such_attribute, None

    registry.register(type('Buggy', (FullSignature,), {'chunk_verifier': chunk_verifier})())
    for _ in range(3):
        assert chunk(Q, Q, Q)[0] == 'default'
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert record.exc_info
    assert 'no_such_attribute' in caplog.text


def test_a_lazy_reason_is_formatted_by_those_who_read_it(op):
    chunk, registry = op
    lazy = ('K must be 128, got %s', 4)
    registry.register(type('Lazy', (FullSignature,), {'chunk_verifier': lambda self, q: (False, lazy)})())
    assert chunk(Q, Q, Q)[0] == 'default'
    assert explain(chunk, Q, Q, Q)['full'].reason == 'K must be 128, got 4' == format_reason(lazy)


def test_a_base_class_of_ones_own_and_helpers(op):
    """FLA's backends of one vendor share a base class with helpers and constructor arguments."""
    chunk, registry = op

    class Vendor(BaseBackend):
        backend_type = 'base'
        package_name = 'torch'

        def __init__(self, answer):
            super().__init__()
            self.answer = answer

        @staticmethod
        def fits(q):
            return q.shape[-1] == 8

    class Mine(Vendor):
        backend_type = 'mine'

        def chunk_verifier(self, q, **kwargs):
            return (True, None) if self.fits(q) else (False, 'K')

        def chunk(self, q, k, v, **kwargs):
            return self.answer, None

    registry.register(Mine('one'))
    assert chunk(Q, Q, Q)[0] == 'one'
    assert chunk(Q[..., :4], Q, Q)[0] == 'default'


def test_a_backend_implements_only_what_it_has(op):
    chunk, registry = op
    registry.register(type('Other', (BaseBackend,), {'backend_type': 'other', 'recurrent': lambda self, q: 'no'})())
    assert chunk(Q, Q, Q)[0] == 'default'
    assert list(chunk.backends) == ['default']


def test_an_exception_of_the_implementation_is_the_callers(op):
    chunk, registry = op

    def fails(self, q, k, v):
        raise RuntimeError('kernel launch failed')

    registry.register(type('Failing', (BaseBackend,), {'backend_type': 'failing', 'chunk': fails})())
    with pytest.raises(RuntimeError, match='kernel launch failed'):
        chunk(Q, Q, Q)


def test_two_functions_of_one_operation_choose_independently():
    @dispatch('contract_stages')
    def forward_stage(q):
        return 'default'

    @dispatch('contract_stages')
    def backward_stage(q):
        return 'default'

    class Forward(BaseBackend):
        backend_type = 'stages'

        def forward_stage(self, q):
            return 'stages'

    BackendRegistry('contract_stages').register(Forward())
    assert (forward_stage(Q), backward_stage(Q)) == ('stages', 'default')


def test_the_decorator_keeps_what_decorators_below_it_made():
    def guard(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*(a.contiguous() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)

        return wrapper

    @dispatch('contract_guard')
    @guard
    def f(q: torch.Tensor, flag: bool = False):
        """Documented."""
        return 'default', q.is_contiguous()

    class Bare(BaseBackend):
        backend_type = 'bare'

        def f_verifier(self, q, flag):
            return flag, 'flag'

        def f(self, q, flag=False):
            return 'bare', q.is_contiguous()

    BackendRegistry('contract_guard').register(Bare())
    assert f(Q.mT) == ('default', True)
    assert f(Q.mT, flag=True) == ('bare', False)
    assert f.__doc__ == 'Documented.'
