"""Tests on a GPU that both delta rules share. A test holds together what the same compiled kernels serve, because another
process would compile them again."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest
import torch

from tests import bounds
from tests.markdown import ROOT
from tests.ops.delta_rules import FLAGS, RAW, case, measure, name_of, strided
from tests.ops.kernels import (
    BF16,
    EVERYTHING,
    FP16,
    FP32,
    assert_same,
    call,
    check,
    check_each,
    everything,
)

HEADS = {'H': 2, 'HV': 4, 'device': 'cuda'}
LARGE = {**HEADS, 'K': 128, 'V': 128}
MEDIUM = {**HEADS, 'K': 64, 'V': 64}
LENS = {
    'some empty, some of one step': [0, 1, 130, 64, 0, 65, 3, 0],
    'one': [333],
    'all of one step': [1] * 70,
    'all but one empty': [0, 0, 100, 0],
}
# Before Triton 3.9 only LARGE in bfloat16 has wgmma on a Hopper (see `assembler`), and each flag makes other kernels.
SIZES = {BF16: (MEDIUM, LARGE), FP16: (MEDIUM,), FP32: (MEDIUM,)}
FLAG_SETS = [
    FLAGS,
    {'state_v_first': True},
    {'initial': False},
    {**FLAGS, 'allow_neg_eigval': True},
    EVERYTHING,
]


def every_place_of_nan(test):
    test = pytest.mark.parametrize('lens', [None, [30, 70, 0, 20]], ids=['equal', 'packed'])(test)
    return pytest.mark.parametrize('name', ['q', 'k', 'v', 'g', 'beta', 'initial_state'])(test)


every_dtype = pytest.mark.parametrize('dtype', [BF16, FP16, FP32], ids=['bf16', 'fp16', 'fp32'])
every_size = pytest.mark.parametrize(
    'sizes', [(128, 128), (64, 64), (256, 256), (100, 72), (64, 128), (16, 16), (1, 5)], ids=lambda s: f'{s[0]}x{s[1]}'
)


def name_of_flags(flags: dict) -> str:
    return ' '.join(f'{name}={value}' for name, value in flags.items()) or 'none'


def sizes(function, dtype, dims) -> None:
    K, V = dims
    check(function, case(function, dtype=dtype, **HEADS, B=2, T=333, K=K, V=V))


def gates(function, dtype) -> None:
    strengths = (None, 0.0, -1e-4, -1.0, -3.0, -5.0, -20.0, -1000.0, 'spread', 'switch')
    check_each(function, {str(s): {'strength': s} for s in strengths}, dtype=dtype, **LARGE, T=200)


def lengths(function, dtype) -> None:
    """Against the steps, not the reference, and once a length that takes many chunks."""
    short = (1, 2, 15, 16, 17, 63, 64, 65, 129)
    check_each(function, {str(T): {'T': T} for T in short}, dtype=dtype, **{**MEDIUM, 'HV': 2})
    check_each(function, {str(T): {'T': T} for T in (1024, 4099)}, dtype=dtype, **MEDIUM)


def packed(function, dtype) -> None:
    for size in SIZES[dtype]:
        common = {'dtype': dtype, **size, **FLAGS}
        check_each(function, {name: {'lens': lens} for name, lens in LENS.items()}, **common)
        check_each(function, {name: {'lens': lens, 'index': torch.int64} for name, lens in LENS.items()}, **common)


def flags(function, dtype, options) -> None:
    for size in SIZES[dtype]:
        check(function, case(function, dtype=dtype, **size, B=2, T=200, **options))
        check(function, case(function, dtype=dtype, **size, lens=LENS['some empty, some of one step'], **options))


def decoding(function, dtype, options) -> None:
    """One step, some, and packed; few heads and, for other blocks, many; gates as wide as q or in float32."""
    shapes = {
        'one step': {'T': 1, 'B': 3},
        'some steps': {'T': 7, 'B': 2},
        'packed': {'lens': [0, 1, 5, 0, 1]},
        'packed int64': {'lens': [0, 1, 5, 0, 1], 'index': torch.int64},
        'many heads': {'T': 1, 'B': 40},
        'other sizes': {'T': 3, 'K': 100, 'V': 72},
        'wide': {'T': 2, 'K': 256, 'V': 256},
    }
    check_each(function, shapes, **{**LARGE, 'dtype': dtype, **options})
    if dtype != FP32 and options.get('use_gate_in_kernel'):
        check(function, case(function, dtype=dtype, gate_dtype=dtype, T=2, **LARGE, **options))


def strided_inputs(function) -> None:
    for options in ({'T': 100, 'B': 2}, {'lens': [3, 0, 97]}, {'T': 1, 'B': 4}):
        given = case(function, dtype=BF16, **MEDIUM, **options)
        check(function, strided(given))
        assert_same(everything(function, given), everything(function, strided(given)))


def nan_passes_through(function, lens, name, device) -> None:
    """To all that depends on it, and not to another sequence."""
    given = case(function, K=16, V=16, H=2, HV=2, B=1 if lens else 2, T=100, lens=lens, device=device)
    tensors = {one: x.clone() for one, x in given.tensors.items()}
    row, start, end, hit = (0, 30, 100, 50) if lens else (1, 0, 100, 20)  # of the second sequence
    tensors[name][(1, 0, 0) if name == 'initial_state' else (row, hit, 0)] = torch.nan
    with torch.no_grad():
        o, final = call(function, given.with_tensors(**tensors))
    first, last = (start, end) if name == 'initial_state' else (hit, hit + 1 if name == 'q' else end)
    nan = o.isnan()
    assert nan[row, first:last, 0].all()
    nan[row, start:end, 0] = False  # a chunk may spread it to what is before
    assert not nan.any()
    assert final[1, 0].isnan().any() == (name != 'q')
    final[1, 0] = 0.0
    assert not final.isnan().any()


def same_bits_of_other_kernels(function) -> None:
    """Of other dtypes, of wide heads, and of steps."""
    for options in ({'dtype': FP32, **MEDIUM, 'T': 200}, {'dtype': FP16, **LARGE, 'K': 256, 'V': 256, 'lens': [70, 0, 130]}):
        given = case(function, **options, **EVERYTHING)
        assert_same(everything(function, given), everything(function, given))


def reference_on_a_gpu(function, dtype) -> None:
    """The backend that a CPU gets, also under autocast."""
    given = case(function, dtype=dtype, **MEDIUM, lens=[3, 0, 130], **EVERYTHING)
    for autocast in (False, True):
        with torch.autocast('cuda', BF16, enabled=autocast):
            found = measure(given, lambda tensors: call(function, given.with_tensors(**tensors), 'reference'))
        wrong = {name: rms for name, (rms, _, result) in found.items() if not rms <= bounds.of_reference(result)[0]}
        assert not wrong, autocast


def same_bits_twice(function, but=(), **more) -> None:
    for options in ({'T': 333, 'B': 2}, {'lens': LENS['some empty, some of one step']}):
        given = case(function, dtype=BF16, **LARGE, **options, **EVERYTHING)
        first, second = everything(function, given), everything(function, given, **more)
        assert_same(*({name: x for name, x in found.items() if name not in but} for found in (first, second)))


def same_bits_on_a_full_gpu(function) -> None:
    """With every multiprocessor at work, and recurrences in turns: some races show in a few numbers of millions there, and
    in none of a small call. It cannot show that there is none: see `triton_support.refills`."""
    for options in (
        {'T': 2100},
        {'T': 2100, 'strength': -3.0},
        {'T': 2100, **EVERYTHING},
        {'lens': [1500, 1, 0, 600, 64], **EVERYTHING},
    ):
        given = case(function, dtype=BF16, H=96, HV=96, K=128, V=128, device='cuda', **options)
        first = everything(function, given)
        for _ in range(4):
            assert_same(first, everything(function, given))


_BASELINE = """
import sys, torch
from tests.ops import delta_rules, gpu
function = next(f for f in delta_rules.FUNCTIONS if f.__name__ == sys.argv[1])
assert not hasattr(function, '__wrapped__'), 'dispatched'
given = gpu.baseline_case(function)
leaves = {name: x.requires_grad_() for name, x in given.tensors.items()}
o, final = given.call(function)
got = torch.autograd.grad(o.float().sum() + final.sum(), list(leaves.values()))
torch.save([x.cpu() for x in (o.detach(), final.detach(), *got)], sys.argv[2])
"""


def baseline_case(function):
    return case(function, dtype=BF16, **MEDIUM, T=100, **RAW)


def without_dispatch(function) -> None:
    """`FLA_DISABLE_BACKEND_DISPATCH=1` leaves the default alone, to the bit."""
    given = baseline_case(function)
    leaves = {name: x.requires_grad_() for name, x in given.tensors.items()}
    o, final = call(function, given)
    got = torch.autograd.grad(o.float().sum() + final.sum(), list(leaves.values()))
    environment = {**os.environ, 'FLA_DISABLE_BACKEND_DISPATCH': '1', 'PYTHONPATH': str(ROOT)}
    with tempfile.NamedTemporaryFile(suffix='.pt') as out:
        command = [sys.executable, '-c', _BASELINE, name_of(function), out.name]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        found = torch.load(out.name)
    for ours, theirs in zip((o, final, *got), found, strict=True):
        assert torch.equal(ours.detach().cpu(), theirs)
