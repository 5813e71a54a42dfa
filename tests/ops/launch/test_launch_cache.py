"""Launches by the cache: its key has every fact that Triton looks at, and the launcher gets the same arguments."""

import itertools

import pytest
import torch

pytest.importorskip('triton')
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from fla.ops.launch import launch_cache
from fla.ops.launch.launch_cache import launch_kernel
from tests.triton_support.compile_only import _StubDriver

pytestmark = pytest.mark.triton


@triton.jit(do_not_specialize=['n'])
def _scale(x, y, bias, n, stride, factor, exact, FLAG: tl.constexpr, BLOCK: tl.constexpr, MORE: tl.constexpr = 3):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at * stride, mask=at < n, other=0.0) * factor
    if bias is not None:
        value += tl.load(bias + at, mask=at < n, other=0.0)
    if FLAG and exact:
        value += MORE
    tl.store(y + at, value, mask=at < n)


@pytest.fixture
def launched(monkeypatch):
    """(kernel, grid, stream, arguments, hook) of every launch on a pretended Hopper; tensors are on the CPU."""
    found = []

    def run(self):
        return lambda x, y, z, stream, function, packed, metadata, enter, leave, *args: found.append(
            (self, (x, y, z), stream, args, enter)
        )

    monkeypatch.setattr(driver, '_active', _StubDriver(GPUTarget('cuda', 90, 32)))
    monkeypatch.setattr(CompiledKernel, 'run', property(run))
    monkeypatch.setattr(CompiledKernel, '_init_handles', lambda self: None)
    monkeypatch.setattr(torch.Tensor, 'is_cuda', True, raising=False)
    monkeypatch.setattr(launch_cache, '_device', lambda: 0)
    monkeypatch.setattr(launch_cache, '_stream', lambda device: 7 + device)
    for known in ('_cache', '_kernels'):
        monkeypatch.setattr(launch_cache, known, {})
    yield found
    _scale.device_caches.clear()


def tensor(offset=0, dtype=torch.float32):
    """Memory aligned to 16 bytes, shifted by so many numbers."""
    room = torch.zeros(64, dtype=dtype)
    assert room.data_ptr() % 16 == 0
    return room[offset : offset + 32]


def bypassed(monkeypatch):
    """From now on only cached kernels can be launched."""

    def refuse(*args, **options):
        raise AssertionError('looked for by Triton')

    monkeypatch.setattr(type(_scale), 'run', refuse)


def test_a_cached_launch_equals_the_first(monkeypatch, launched):
    x, y = torch.nn.Parameter(tensor()), tensor()
    arguments, options = (x, y, None, 20, 1, 0.5, True), {'FLAG': True, 'BLOCK': 16, 'num_warps': 1}
    launch_kernel(_scale, (2,), *arguments, **options)
    bypassed(monkeypatch)
    other = tensor()
    launch_kernel(_scale, (3, 4), other, y, None, 30, 1, 0.25, True, **options)
    (kernel, grid, _, first, _), (again, other_grid, stream, second, _) = launched
    assert again is kernel
    assert (grid, other_grid, stream) == ((2, 1, 1), (3, 4, 1), 7)
    assert first == (*arguments, True, 16, 3)
    assert second == (other.data_ptr(), y.data_ptr(), None, 30, 1, 0.25, True, True, 16, 3)


def test_constants_by_position(monkeypatch, launched):
    arguments = (tensor(), tensor(), tensor(), 20, 1, 0.5, True, True, 16)
    launch_kernel(_scale, (2,), *arguments, num_warps=1)
    bypassed(monkeypatch)
    launch_kernel(_scale, (2,), *arguments, num_warps=1)
    assert launched[0][0] is launched[1][0]
    assert launched[1][3][3:] == launched[0][3][3:] == (20, 1, 0.5, True, True, 16, 3)
    with pytest.raises(AssertionError, match='looked for by Triton'):
        launch_kernel(_scale, (2,), *arguments[:-1], 32, num_warps=1)
    with pytest.raises(AssertionError, match='looked for by Triton'):
        launch_kernel(_scale, (2,), *arguments, num_warps=2)


NUMBERS = [0, 1, 2, 16, 17, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40 + 16]
OPTIONS = [
    {'FLAG': flag, 'BLOCK': block, 'num_warps': warps} for flag in (True, False) for block in (16, 32) for warps in (1, 2)
]


def test_equal_keys_mean_equal_kernels(launched):
    """What differs for Triton differs in the key: for all pairs of values of one argument, the others fixed or drawn."""
    *_, binder = _scale.device_caches[driver.active.get_current_device()]
    tensors = [
        tensor(),
        tensor(1),
        tensor(2),
        tensor(dtype=torch.float16),
        tensor(8, torch.bfloat16),
        tensor(1, torch.int32),
    ]
    values = [tensors, tensors, [None, *tensors], NUMBERS, NUMBERS, [0.5, 1.0, -2.0], [True, False]]
    first = [tensors[0], tensors[0], None, 20, 5, 0.5, True]
    calls = []
    for place, of_place in enumerate(values):
        calls += [([*first[:place], value, *first[place + 1 :]], OPTIONS[0]) for value in of_place]
    calls += [(first, options) for options in OPTIONS]
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        draw = [of_place[int(torch.randint(len(of_place), (), generator=generator))] for of_place in values]
        calls.append((draw, OPTIONS[int(torch.randint(len(OPTIONS), (), generator=generator))]))
    by_key: dict = {}
    for arguments, options in calls:
        key, _ = launch_cache._key(_scale, tuple(arguments), options)
        _, specialization, of_options = binder(*arguments, **options, debug=False)
        by_key.setdefault(key, set()).add((str(specialization), str(sorted(of_options.items()))))
    assert len(by_key) > 100
    assert [found for found in by_key.values() if len(found) > 1] == []


def test_triton_launches_the_rest(monkeypatch, launched):
    class Other(torch.Tensor):
        pass

    arguments, options = [tensor(), tensor(), None, 20, 1, 0.5, True], {'FLAG': True, 'BLOCK': 16, 'num_warps': 1}
    assert launch_cache._key(_scale, tuple(arguments), options) is not None
    for place, value in ((0, tensor().as_subclass(Other)), (1, 3), (5, torch.tensor(0.5)), (3, None)):
        given = [*arguments[:place], value, *arguments[place + 1 :]]
        assert launch_cache._key(_scale, tuple(given), options) is None
    assert launch_cache._key(lambda *args: None, tuple(arguments), options) is None
    monkeypatch.setattr(_scale, 'pre_run_hooks', [print])
    assert launch_cache._key(_scale, tuple(arguments), options) is None
    monkeypatch.setattr(_scale, 'pre_run_hooks', [])
    # one of them on the CPU
    elsewhere = arguments[1]
    monkeypatch.setattr(torch.Tensor, 'is_cuda', property(lambda tensor: tensor is not elsewhere))
    assert launch_cache._key(_scale, tuple(arguments), options) is None
    assert launch_cache._key(_scale, (arguments[0], arguments[0], *arguments[2:]), options) is not None
    monkeypatch.setattr(torch.Tensor, 'is_cuda', False)
    for _ in range(2):
        launch_kernel(_scale, (2,), *arguments, **options)
    assert launch_cache._cache == {}
    assert all(torch.is_tensor(one[3][0]) for one in launched)


def test_no_tensor_is_cached(launched):
    """A tensor given by name would be part of the key."""
    for _ in range(2):
        launch_kernel(
            _scale, (2,), x=tensor(), y=tensor(), bias=None, n=3, stride=1, factor=0.5, exact=True, FLAG=True, BLOCK=16
        )
    assert launch_cache._cache == {}
    assert len(launched) == 2


def test_hooks_of_triton(monkeypatch, launched):
    arguments, options = (tensor(), tensor(), None, 20, 1, 0.5, True), {'FLAG': True, 'BLOCK': 16}
    launch_kernel(_scale, (2,), *arguments, **options)

    def hook(metadata):
        pass

    monkeypatch.setattr(triton.knobs.runtime, 'launch_enter_hook', hook)
    bypassed(monkeypatch)
    launch_kernel(_scale, (2,), *arguments, **options)
    assert [one[4] is hook for one in launched] == [False, True]


def test_devices_do_not_share(monkeypatch, launched):
    arguments, options = (tensor(), tensor(), None, 20, 1, 0.5, True), {'FLAG': True, 'BLOCK': 16}
    for device, _ in itertools.product((0, 1), range(2)):
        monkeypatch.setattr(launch_cache, '_device', lambda device=device: device)
        launch_kernel(_scale, (2,), *arguments, **options)
    assert len(launch_cache._cache) == 2
    assert len(launched) == 4
