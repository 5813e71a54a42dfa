"""Where Hopper's assembler miscompiles, kernels that no card has verified are compiled without wgmma."""

import contextlib
import os
import signal
import threading
from typing import ClassVar

import pytest
import torch

from fla.ops.common import assembler
from tests.ops.delta_rules import CHUNKED, KDA, case, name_of

VARIABLE = 'DISABLE_MMA_V3'


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv('TRITON_PTXAS_PATH', raising=False)
    assembler._is_sound.cache_clear()
    yield
    assembler._is_sound.cache_clear()


@pytest.mark.parametrize(
    ('version', 'sound'), [('3.3.1', False), ('3.6.0', False), ('3.8.0', False), ('3.9.0', True), ('3.10.0', True)]
)
def test_the_assembler_of_a_triton(monkeypatch, version, sound):
    triton = pytest.importorskip('triton')
    monkeypatch.setattr(triton, '__version__', version)
    assert assembler.is_sound() is sound


@pytest.mark.parametrize(
    ('text', 'sound'),
    [
        ('Cuda compilation tools, release 12.8, V12.8.93', False),
        ('Cuda compilation tools, release 13.0, V13.0.88', False),
        ('Cuda compilation tools, release 13.3, V13.3.20', True),
        ('Cuda compilation tools, release 14.0, V14.0.1', True),
        ('no such words', False),
    ],
)
def test_an_assembler_of_the_users_own(monkeypatch, tmp_path, text, sound):
    path = tmp_path / 'ptxas'
    path.write_text(f'#!/bin/sh\necho "{text}"\n')
    path.chmod(0o755)
    monkeypatch.setenv('TRITON_PTXAS_PATH', str(path))
    assert assembler.is_sound() is sound


def test_an_assembler_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv('TRITON_PTXAS_PATH', str(tmp_path / 'none'))
    assert not assembler.is_sound()


def tensors(dtype=torch.bfloat16, dims=(128, 128)):
    return tuple(torch.empty(1, 4, 1, dim, dtype=dtype) for dim in dims)


@pytest.mark.parametrize(
    ('capability', 'sound', 'given', 'shown', 'kept'),
    [
        ((9, 0), False, {}, True, True),
        ((9, 0), False, {}, False, False),
        ((9, 0), False, {'dims': (64, 64)}, True, False),
        ((9, 0), False, {'dims': (128, 64)}, True, False),
        ((9, 0), False, {'dtype': torch.float16}, True, False),
        ((9, 0), False, {'dtype': torch.float32}, True, False),
        ((9, 0), True, {'dims': (64, 64)}, False, True),
        ((8, 0), False, {'dims': (64, 64)}, False, True),
        ((10, 0), False, {'dims': (64, 64)}, False, True),
        (None, False, {'dims': (64, 64)}, False, True),
    ],
)
def test_what_keeps_wgmma(monkeypatch, capability, sound, given, shown, kept):
    monkeypatch.setattr(assembler, 'capability_of', lambda device=None: capability)
    monkeypatch.setattr(assembler, 'is_sound', lambda: sound)
    monkeypatch.setattr(assembler, 'triton_version', lambda: (3, 6))
    assert assembler.keeps_wgmma(*tensors(**given), shown) is kept
    with assembler.sound_products(*tensors(**given), shown):
        assert (os.environ.get(VARIABLE) == '1') is not kept
    assert os.environ.get(VARIABLE, '0') == '0'


@pytest.fixture
def unsound_hopper(monkeypatch):
    monkeypatch.setattr(assembler, 'capability_of', lambda device=None: (9, 0))
    monkeypatch.setattr(assembler, 'is_sound', lambda: False)


@pytest.mark.usefixtures('unsound_hopper')
@pytest.mark.parametrize('before', [None, '0', '1'])
def test_the_variable_is_put_back(monkeypatch, before):
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)

    def fails():
        with assembler.sound_products(*tensors(), False):
            with assembler.sound_products(*tensors(), False):
                pass
            assert os.environ[VARIABLE] == '1'
            raise ValueError('deliberate')

    with pytest.raises(ValueError, match='deliberate'):
        fails()
    assert os.environ.get(VARIABLE) == (before or '0')


@pytest.mark.usefixtures('unsound_hopper')
def test_threads():
    """Nobody takes the variable away from another thread."""
    errors = []

    def work():
        for _ in range(2000):
            with assembler.sound_products(*given, False):
                if os.environ.get(VARIABLE) != '1':
                    errors.append(1)

    given = tensors()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert os.environ[VARIABLE] == '0'


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize(('dim', 'lens'), [(128, None), (128, [5, 3]), (64, None)])
@pytest.mark.parametrize('function', CHUNKED, ids=name_of)
def test_what_is_compiled(monkeypatch, function, dim, lens):
    pytest.importorskip('triton')
    monkeypatch.setattr(assembler, 'is_sound', lambda: False)
    monkeypatch.setattr(assembler, 'triton_version', lambda: (3, 6))
    from fla.ops.gated_delta_rule import autograd as gdn
    from fla.ops.kda import autograd as kda
    from tests.triton_support.compile_only import compile_only

    given = case(function, dtype=torch.bfloat16, T=8, K=dim, V=dim, lens=lens)
    q, k, v, g, beta, state = given.tensors.values()
    flags = (dim**-0.5, True, False, False, False, False, False)
    with compile_only((9, 0)) as compiled:
        if function in KDA:
            flags = (dim**-0.5, True, False, False, None, False, False, False, False, False)
            kda._forward(q, k, v, g, beta, None, None, state, given.cu_seqlens, *flags)
        else:
            gdn._forward(q, k, v, g, beta, None, None, state, given.cu_seqlens, *flags)
    products = {one.name: one.kernel.asm['ttgir'].count('warp_group_dot ') for one in compiled}
    may = dim == 128 and lens is None
    assert (sum(products.values()) > 0) is may, products


@pytest.mark.triton
@pytest.mark.slow
def test_kernels_of_strong_decays_keep_from_wgmma(monkeypatch):
    """The others of the same call, which are compiled beside them, do not lose it."""
    pytest.importorskip('triton')
    monkeypatch.setattr(assembler, 'is_sound', lambda: False)
    monkeypatch.setattr(assembler, 'triton_version', lambda: (3, 6))
    from fla.ops.kda.kernels.launch import Settings, chunk_backward, chunk_forward
    from tests.triton_support.compile_only import compile_only

    q, k, v, g, beta, _ = case(KDA[0], dtype=torch.bfloat16, T=8, K=128, V=128).tensors.values()
    settings = Settings(1.0)
    with compile_only((9, 0)) as compiled:
        o, _, saved, _ = chunk_forward(q, k, v, g, beta, settings)
        chunk_backward(saved, settings, o)
    asynchronous = {}
    for one in compiled:
        key = (one.name, one.num_warps)
        asynchronous.setdefault(key, set()).add('warp_group_dot ' in one.kernel.asm['ttgir'])
    for name in ('prepare', 'pairs_backward', 'states_backward', 'channels_backward'):
        assert asynchronous[name, 4] == {True}, name
    assert asynchronous['prepare_by_halves', 4] == {False}
    assert asynchronous['channels_backward', 8] == {False}  # by halves
    assert os.environ.get(VARIABLE, '0') == '0'


def test_a_sound_assembler_gets_every_kernel(monkeypatch):
    class Kernel:
        seen: ClassVar = []

        def _do_compile(self, *args, **options):
            self.seen.append((os.environ.get(VARIABLE, '0'), args, options))
            return 'compiled'

    kernel = assembler.without_wgmma(Kernel())
    for capability, sound, kept in (
        ((9, 0), True, True),
        ((8, 0), False, True),
        (None, False, True),
        ((9, 0), False, False),
    ):
        monkeypatch.setattr(assembler, 'capability_of', lambda device=None, capability=capability: capability)
        monkeypatch.setattr(assembler, 'is_sound', lambda sound=sound: sound)
        Kernel.seen.clear()
        assert kernel._do_compile(1, warmup=True) == 'compiled'
        assert Kernel.seen == [('0' if kept else '1', (1,), {'warmup': True})]
        assert assembler.is_without_wgmma(kernel) is not kept
        assert not assembler.is_without_wgmma(Kernel())
    with assembler.products_of_an_a100():
        # nothing is left that it could disturb
        assert not assembler.is_without_wgmma(kernel)


def test_a_kernel_of_the_interpreter_is_left_alone():
    kernel = object()
    assert assembler.without_wgmma(kernel) is kernel
    assert not assembler.is_without_wgmma(kernel)


@pytest.mark.parametrize('count', [0, 1])
def test_a_fork_while_the_variable_is_being_set(monkeypatch, count):
    """Whoever has set it, or has put it back, is counted at that moment."""
    seen = []

    class Environment(dict):
        def __setitem__(self, name, value):
            seen.append((value, assembler._asking.times.total()))
            super().__setitem__(name, value)

    monkeypatch.setattr(assembler.os, 'environ', Environment())
    with contextlib.ExitStack() as stack:
        for _ in range(count + 1):
            stack.enter_context(assembler.products_of_an_a100())
    assert seen == [('1', n + 1) for n in range(count + 1)] + [('0', 1)]


@pytest.mark.usefixtures('unsound_hopper')
def test_a_fork_while_another_thread_has_the_variable_set():
    inside, over = threading.Event(), threading.Event()

    def hold():
        with assembler.products_of_an_a100():
            inside.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    child = os.fork()
    if not child:
        signal.alarm(20)
        with assembler.products_of_an_a100():
            within = os.environ[VARIABLE]
        os._exit(0 if (within, os.environ[VARIABLE]) == ('1', '0') else 1)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_fork_within():
    """The child is still inside, and leaves although another thread, which is gone there, held the lock."""
    held, over = threading.Event(), threading.Event()

    def hold():
        with assembler._asking.lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    with contextlib.ExitStack() as stack:
        stack.enter_context(assembler.products_of_an_a100())
        thread.start()
        held.wait()
        child = os.fork()
        if not child:
            signal.alarm(20)
            within = os.environ[VARIABLE]
            stack.close()
            os._exit(0 if (within, os.environ[VARIABLE]) == ('1', '0') else 1)
        over.set()
        thread.join()
    assert os.environ[VARIABLE] == '0'
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.usefixtures('unsound_hopper')
def test_copies_of_the_environment_meanwhile():
    """A name that vanishes while a thread copies the environment would be a KeyError there."""
    given, over = tensors(), threading.Event()

    def toggle():
        while not over.is_set():
            with assembler.sound_products(*given, False):
                pass

    with assembler.sound_products(*given, False):
        pass
    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        for _ in range(3000):
            assert VARIABLE in {**os.environ}
    finally:
        over.set()
        thread.join()
