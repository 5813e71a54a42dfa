"""Tests of compiling for GPUs that the machine does not have."""

import os

import pytest
import torch

pytest.importorskip('triton')
from torch._subclasses import FakeTensorMode
from triton.runtime import driver

from fla.utils import check_shared_mem, devices, is_nvidia_hopper
from tests.triton_support import kernels
from tests.triton_support.compile_only import compile_only

pytestmark = pytest.mark.triton


def matmul(block_k=32, device='cpu', kernel=kernels.matmul, **options):
    a = torch.empty(64, 256, dtype=torch.bfloat16, device=device)
    b = torch.empty(256, 64, dtype=torch.bfloat16, device=device)
    c = torch.empty(64, 64, dtype=torch.bfloat16, device=device)
    kernel[(1,)](a, b, c, 256, 64, 64, block_k, **options)


@pytest.mark.parametrize('capability', [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_every_architecture(capability):
    with compile_only(capability) as compiled:
        matmul()
        matmul()
        matmul(num_warps=8)
    assert [(one.name, one.capability, one.num_warps) for one in compiled] == [('matmul', capability, n) for n in (4, 8)]
    number = capability[0] * 10 + capability[1]
    for one in compiled:
        assert f'.target sm_{number}' in one.kernel.asm['ptx']
        assert one.kernel.asm['cubin'].startswith(b'\x7fELF')
        assert 8 * 1024 <= one.shared <= 64 * 1024
        assert 16 <= one.registers <= 255
        assert one.spilled == 0
        assert one.seconds > 0
        assert f'matmul sm_{number}' in str(one)


def test_too_much_shared_memory_is_reported():
    # An A100 holds six stages of 64 × 128 and 128 × 64 bf16, 32 KiB each, and an H100 seven.
    with compile_only((9, 0)) as compiled:
        matmul(128, num_stages=7)
    assert 163 * 1024 < compiled[0].shared <= 227 * 1024
    for capability, limit in (((8, 0), 163), ((8, 6), 99)):
        with pytest.raises(AssertionError, match=rf'^matmul \(sm_8\d\) takes 192.0 KiB of shared memory, of {limit}$'):
            compile_two(capability)


def compile_two(capability):
    with compile_only(capability):
        matmul(32, num_stages=2)
        matmul(128, num_stages=7)


@pytest.mark.parametrize('stages', [2, 3, 4])
def test_memory_refilled_while_products_read_it_is_reported(stages):
    """Nothing is reported for synchronous products, without loads ahead, and for a tile that only products read."""
    for capability, options in (((8, 0), {}), ((9, 0), {'num_stages': 1}), ((9, 0), {'kernel': kernels.matmul})):
        with compile_only(capability):
            matmul(**{'kernel': kernels.matmul_and_rows, 'num_stages': stages, **options})
    with pytest.raises(AssertionError, match=r'^matmul_and_rows \(sm_90\) refills %x\S* while products read it$'):
        with compile_only((9, 0)):
            matmul(kernel=kernels.matmul_and_rows, num_stages=stages)


def test_spills_are_counted():
    with compile_only((8, 0)) as compiled:
        matmul(128, num_warps=1)
    assert compiled[0].spilled > 0


@pytest.mark.parametrize(('every_config', 'blocks'), [(False, [16]), (True, [16, 32])])
def test_autotuned(every_config, blocks):
    x = torch.empty(40)
    with compile_only((9, 0), every_config) as compiled:
        kernels.tuned[lambda meta: (-(-40 // meta['S']),)](x, x, 40)
    assert [one.kernel.src.constants[3,] for one in compiled] == blocks
    assert not kernels.tuned.cache


def test_tensors_without_memory():
    with compile_only((9, 0)) as compiled:
        matmul(device='meta')
        matmul(device='cpu')
        with FakeTensorMode():
            matmul(device='cpu')
    assert len(compiled) == 1


def test_a_cached_kernel_is_not_launched():
    x = torch.ones(16)
    with compile_only((9, 0)):
        cached = kernels.unmasked_copy[(1,)](torch.zeros(16), x, 16)
        cached[(1, 1, 1)](torch.zeros(16), x)
        cached.run(1, 1, 1, 0, None, cached.packed_metadata, None, None, None, torch.zeros(16), x)
    assert (x == 1).all()


def test_the_capability_is_that_of_the_target_in_the_block():
    before = devices.capability_of(), is_nvidia_hopper(), driver._active, os.environ.get('TRITON_CACHE_DIR')
    with compile_only((9, 0)):
        assert devices.capability_of() == devices.capability_of(torch.device('cpu')) == (9, 0)
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.get_device_properties(0).multi_processor_count
        assert is_nvidia_hopper()
        assert check_shared_mem('hopper')
        matmul()
    with compile_only((8, 9)):
        assert not is_nvidia_hopper()
        assert check_shared_mem('ada')
        assert not check_shared_mem('ampere')
        matmul()
    assert before == (devices.capability_of(), is_nvidia_hopper(), driver._active, os.environ.get('TRITON_CACHE_DIR'))


def test_a_block_that_launches_nothing_fails():
    with pytest.raises(AssertionError, match='nothing was compiled'):
        with compile_only((9, 0)):
            pass


def test_errors_pass_through():
    with pytest.raises(ZeroDivisionError):
        with compile_only((9, 0)):
            raise ZeroDivisionError
    assert not kernels.matmul.device_caches
