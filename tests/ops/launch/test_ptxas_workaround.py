"""Where Hopper's assembler may miscompile, unverified kernels are compiled without wgmma."""

import threading

import pytest
import torch

from fla.ops.launch import precompile as compile_ahead
from fla.ops.launch import ptxas_workaround as assembler
from fla.ops.recurrence.arguments import Inputs, Options
from fla.utils import devices
from tests.ops.delta_rules import CHUNKED, KDA, case, name_of

AS_FOR_AN_A100 = {'arch': 'sm80'}


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch):
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
def test_an_assembler_of_the_user(monkeypatch, tmp_path, text, sound):
    path = tmp_path / 'ptxas'
    path.write_text(f'#!/bin/sh\necho "{text}"\n')
    path.chmod(0o755)
    monkeypatch.setenv('TRITON_PTXAS_PATH', str(path))
    assert assembler.is_sound() is sound


def test_a_missing_assembler(monkeypatch, tmp_path):
    monkeypatch.setenv('TRITON_PTXAS_PATH', str(tmp_path / 'none'))
    assert not assembler.is_sound()


def tensors(dtype=torch.bfloat16, dims=(128, 128)):
    return tuple(torch.empty(1, 4, 1, dim, dtype=dtype) for dim in dims)


@pytest.mark.parametrize(
    ('capability', 'sound', 'given', 'kept'),
    [
        ((9, 0), False, {}, True),
        ((9, 0), False, {'dims': (64, 64)}, False),
        ((9, 0), False, {'dims': (128, 64)}, False),
        ((9, 0), False, {'dtype': torch.float16}, False),
        ((9, 0), False, {'dtype': torch.float32}, False),
        ((9, 0), True, {'dims': (64, 64)}, True),
        ((8, 0), False, {'dims': (64, 64)}, True),
        ((10, 0), False, {'dims': (64, 64)}, True),
        (None, False, {'dims': (64, 64)}, True),
    ],
)
def test_what_keeps_wgmma(monkeypatch, capability, sound, given, kept):
    monkeypatch.setattr(devices, 'capability_of', lambda device=None: capability)
    monkeypatch.setattr(assembler, 'is_sound', lambda: sound)
    monkeypatch.setattr(assembler, 'triton_version', lambda: (3, 6))
    assert assembler.keeps_wgmma(*tensors(**given)) is kept
    with assembler.avoid_wgmma_if_unsafe(*tensors(**given)):
        assert assembler.launch_options() == ({} if kept else AS_FOR_AN_A100)
    assert assembler.launch_options() == {}


@pytest.mark.parametrize(
    ('version', 'path', 'kept'), [((3, 6), None, True), ((3, 7), None, False), ((3, 6), 'ptxas', False)]
)
def test_wgmma_needs_a_verified_assembler(monkeypatch, version, path, kept):
    monkeypatch.setattr(devices, 'capability_of', lambda device=None: (9, 0))
    monkeypatch.setattr(assembler, 'is_sound', lambda: False)
    monkeypatch.setattr(assembler, 'triton_version', lambda: version)
    if path:
        monkeypatch.setenv('TRITON_PTXAS_PATH', path)
    assert assembler.keeps_wgmma(*tensors()) is kept


@pytest.fixture
def unsound_hopper(monkeypatch):
    monkeypatch.setattr(devices, 'capability_of', lambda device=None: (9, 0))
    monkeypatch.setattr(assembler, 'is_sound', lambda: False)
    monkeypatch.setattr(assembler, 'triton_version', lambda: (3, 6))


@pytest.mark.usefixtures('unsound_hopper')
def test_nested_calls():
    def fails():
        with assembler.avoid_wgmma_if_unsafe(*tensors()):
            assert assembler.launch_options() == {}
            raise ValueError('deliberate')

    with assembler.avoid_wgmma_if_unsafe(*tensors(dims=(64, 64))):
        with pytest.raises(ValueError, match='deliberate'):
            fails()
        assert assembler.launch_options() == AS_FOR_AN_A100
    assert assembler.launch_options() == {}


@pytest.mark.usefixtures('unsound_hopper')
def test_threads():
    """The options of one thread do not affect others."""
    inside, over, seen = threading.Event(), threading.Event(), []

    def hold():
        with assembler.avoid_wgmma_if_unsafe(*tensors(dims=(64, 64))):
            inside.set()
            over.wait(20)
            seen.append(assembler.launch_options())

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(20)
    assert assembler.launch_options() == {}
    with assembler.avoid_wgmma_if_unsafe(*tensors()):
        over.set()
        thread.join()
    assert seen == [AS_FOR_AN_A100]


@pytest.mark.usefixtures('unsound_hopper')
def test_options_reach_the_kernel(monkeypatch):
    """For launches, and for compilation on other threads."""
    monkeypatch.setattr(compile_ahead, '_INTERPRETED', False)
    seen = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: seen.append((args, options))

        def warmup(self, *args, **options):
            seen.append((args, options))

    @compile_ahead.precompile_parallel(lambda: None)
    def call():
        compile_ahead.launch(Kernel(), (1,))(2, num_warps=4)
        with assembler.avoid_wgmma_if_unsafe(*tensors(dims=(64, 64))):
            compile_ahead.launch(Kernel(), (1,))(2, num_warps=4)

    call()
    launched = [((2,), {'num_warps': 4}), ((2,), {**AS_FOR_AN_A100, 'num_warps': 4})]
    collected = [(args, {'grid': (1,), **options}) for args, options in launched]
    by_options = sorted(seen[:2], key=lambda one: len(one[1]))
    assert (by_options, seen[2:]) == (collected, launched)
    # a kernel compiled ahead is found again by its options in their order
    orders = [[name for name in options if name != 'grid'] for _, options in by_options + seen[2:]]
    assert orders[:2] == orders[2:]


@pytest.mark.pairwise
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
    inputs = Inputs(**given.tensors, cu_seqlens=given.cu_seqlens)
    with compile_only((9, 0)) as compiled:
        (kda if function in KDA else gdn)._forward(*inputs, *Options(dim**-0.5, output_final_state=True))
    products = {one.name: one.kernel.asm['ttgir'].count('warp_group_dot ') for one in compiled}
    assert (sum(products.values()) > 0) is (dim == 128), products
    assert len({one.kernel.hash for one in compiled}) == len(compiled)
    # still code for a Hopper
    assert all('.target sm_90a' in one.kernel.asm['ptx'] for one in compiled)


@pytest.mark.triton
@pytest.mark.slow
def test_which_kernels_of_kda_use_wgmma(monkeypatch):
    """Kernels with products of 64 rows do; those of blocks of 16, and those of two warps, do not."""
    pytest.importorskip('triton')
    monkeypatch.setattr(assembler, 'is_sound', lambda: False)
    monkeypatch.setattr(assembler, 'triton_version', lambda: (3, 6))
    from fla.ops.kda.kernels.launch import chunk_backward, chunk_forward
    from tests.triton_support.compile_only import compile_only

    q, k, v, g, beta, _ = case(KDA[0], dtype=torch.bfloat16, T=8, K=128, V=128).tensors.values()
    inputs, options = Inputs(q, k, v, g, beta), Options(1.0)
    with compile_only((9, 0)) as compiled:
        o, _, saved, _ = chunk_forward(inputs, options)
        chunk_backward(inputs, options, saved, o)
    assert len({one.kernel.hash for one in compiled}) == len(compiled)  # those compiled ahead are what is launched
    asynchronous = {}
    for one in compiled:
        asynchronous.setdefault(one.name, set()).add('warp_group_dot ' in one.kernel.asm['ttgir'])
    for name in ('prepare', 'products_with_states', 'pairs_backward', 'states_backward', 'channels_backward'):
        assert asynchronous[name] == {True}, name
    for name in ('scores', 'updates', 'blocks_backward'):
        assert asynchronous[name] == {False}, name
