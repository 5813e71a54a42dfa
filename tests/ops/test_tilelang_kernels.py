"""The TileLang kernels: what their source says, interpreted, against the definition in float64; they compile for Hopper."""

import importlib

import pytest
import torch

pytest.importorskip('triton')
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.backends.tilelang import GatedDeltaRuleTileLang
from fla.ops.kda import chunk_kda
from fla.ops.kda.backends.tilelang import KDATileLang
from tests import bounds
from tests.ops.delta_rules import apart, case, measure
from tests.tilelang_support.backends import interpreted, no_compiler
from tests.tilelang_support.interpreter import Buffer, Machine, load

BF16, FP16 = torch.bfloat16, torch.float16
EVERYTHING = {
    'use_gate_in_kernel': True,
    'use_qk_l2norm_in_kernel': True,
    'use_beta_sigmoid_in_kernel': True,
    'allow_neg_eigval': True,
    'state_v_first': True,
}
PACKED = {'lens': [0, 3, 65, 0, 64], 'H': 1, 'HV': 2}


def check(monkeypatch, function, **options):
    given = case(function, **{'dtype': BF16, 'T': 70, 'K': 64, 'V': 64, **options})
    op, backend = ('kda', KDATileLang) if function is chunk_kda else ('gated_delta_rule', GatedDeltaRuleTileLang)
    interpreted(monkeypatch, op)
    method = getattr(backend(), function.__name__)

    ends = None if given.cu_seqlens is None else apart(given.cu_seqlens)

    def run(tensors):
        return method(**tensors, **given.options, cu_seqlens=ends, output_final_state=True)

    wrong = []
    for name, (rms, row, _) in measure(given, run).items():
        most_rms, most_row = bounds.of_kernel(name, given.tensors['q'].dtype)
        if not (rms <= most_rms and row <= most_row):
            wrong.append(f'{name}: RMS {rms:.1e} (bound {most_rms:.1e}), worst row {row:.1e} (bound {most_row:.1e})')
    assert not wrong, '; '.join(wrong)


@pytest.mark.pairwise
@pytest.mark.interpreted
@pytest.mark.parametrize('function', [chunk_gated_delta_rule, chunk_kda], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    'options',
    [
        {'T': 1, 'B': 2},
        {'T': 64, 'initial': False},
        {'T': 130, 'H': 1, 'HV': 2},
        {'K': 128, 'V': 64},
        {'K': 64, 'V': 128, 'use_qk_l2norm_in_kernel': True},
        {'dtype': FP16},
        {'gate_dtype': BF16, 'scale': 0.3},
        {'strength': -20.0},
        {'strength': 'spread'},
        {**PACKED, **EVERYTHING},
        {**PACKED, 'use_gate_in_kernel': True, 'dt_bias': False, 'index': torch.int64},
    ],
    ids=str,
)
def test_numbers(monkeypatch, function, options):
    check(monkeypatch, function, **options)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    'options', [{'A_log': True}, {'A_log': False, 'dt_bias': False}, {'disable_recompute': True}], ids=str
)
def test_bounded_gates_of_kda(monkeypatch, options):
    # the gradient of A_log is one sum, which at some lengths nearly cancels, in the Triton kernels as well
    check(monkeypatch, chunk_kda, T=130, use_gate_in_kernel=True, lower_bound=-5.0, **options)


@pytest.mark.interpreted
def test_gates_that_forget_everything(monkeypatch):
    check(monkeypatch, chunk_gated_delta_rule, strength='reset')


@pytest.mark.interpreted
@pytest.mark.parametrize('bad', [torch.nan, torch.inf])
def test_the_next_sequence_does_not_matter(monkeypatch, bad):
    """The last chunk of a sequence reads its steps, be they numbers or not."""
    interpreted(monkeypatch, 'gated_delta_rule')
    given = case(chunk_gated_delta_rule, dtype=BF16, lens=[70, 20], K=64, V=64)
    found = []
    for spoiled in (False, True):
        tensors = {name: x.clone() for name, x in given.tensors.items()}
        if spoiled:
            for name in ('q', 'k', 'v', 'g', 'beta'):
                tensors[name][:, 70:] = bad
        with torch.no_grad():
            o, final = GatedDeltaRuleTileLang().chunk_gated_delta_rule(
                **tensors, cu_seqlens=given.cu_seqlens, output_final_state=True
            )
        found.append((o[:, :70], final[:1]))
    assert found[0][0].isfinite().all()
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


# -- the interpreter itself -------------------------------------------------------------------------------------------------


def test_the_interpreter_sees_what_is_wrong():
    buffer = Buffer((4,), 'float32')
    assert buffer[0] != buffer[0]  # nothing was written: NaN
    buffer[1] = 1.0
    assert buffer[1] == 1.0
    assert buffer[4] != buffer[4]  # out of bounds
    with pytest.raises(AssertionError, match='out of the bounds'):
        buffer[4] = 1.0
    half = Buffer((1,), 'bfloat16')
    half[0] = 1.001
    assert half[0] == 1.0


def test_the_interpreter_masks_and_rewrites(tmp_path, monkeypatch):
    (tmp_path / 'somewhere').mkdir()
    (tmp_path / 'somewhere' / '__init__.py').write_text('')
    (tmp_path / 'somewhere' / 'kernels.py').write_text(
        'import tilelang.language as T\n'
        'def add(size):\n'
        "    n = T.dynamic('n')\n"
        '    @T.prim_func\n'
        "    def main(x: T.Tensor((n,), 'float32'), y: T.Tensor((n,), 'float32'), count: T.int32):\n"
        '        with T.Kernel(2, threads=32) as (block,):\n'
        '            tx = T.get_thread_binding()\n'
        '            total = 0.0\n'
        '            kept = total\n'
        '            total += 1.0 * tx\n'
        '            if tx > 3 and tx < 6:\n'
        '                total += 10.0\n'
        '            for i in T.Parallel(size):\n'
        '                if i < count:\n'
        '                    y[block * size + i] = x[block * size + i] + total[i] + kept\n'
        '    return main\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    x, y = torch.ones(12), torch.zeros(12)
    load('somewhere.kernels').add(6)(x, y, 5)
    assert y.tolist() == [1, 2, 3, 4, 15, 0] * 2
    assert Machine.mask is None


# -- compiled ---------------------------------------------------------------------------------------------------------------


KERNELS = {
    'gated_delta_rule.prepare': (128, 'bfloat16', 'float32', 'bfloat16', 'int64', *[True] * 5),
    'gated_delta_rule.scan': (128, 128, 'bfloat16', 'float32', 'int32', True, True, True, True),
    'kda.intra_chunk_bwd': (128, 128, 'bfloat16', 'bfloat16', 'float32', 'int64', *[True] * 6),
}


@pytest.mark.tilelang
@pytest.mark.slow
@pytest.mark.parametrize('name', KERNELS)
def test_compiles_for_hopper(name):
    if why := no_compiler():
        pytest.skip(why)
    from fla.ops.launch.tilelang_call import compiled_for_hopper

    op, kernel = name.split('.')
    make = getattr(importlib.import_module(f'fla.ops.{op}.backends.tilelang.kernels'), kernel)
    assert 'wgmma' in compiled_for_hopper(make(*KERNELS[name])).get_kernel_source()
