"""The Triton defaults of both delta rules apart from their numbers: gradients of `fused_recurrent_*`, refused calls, NaN,
and the GPUs for which decoding compiles."""

import pytest
import torch

from fla.backends import default_dispatcher, explain, trace
from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
from fla.ops.kda import fused_recurrent_kda
from fla.ops.recurrence.arguments import Options
from tests import bounds
from tests.ops import gpu
from tests.ops.delta_rules import CHUNKED, FUNCTIONS, KDA, case, measure, name_of
from tests.ops.kernels import BF16, EVERYTHING, FP32, call, operation
from tests.ops.vendors import B200, H100, fakes, pretend

RECURRENT = [fused_recurrent_gated_delta_rule, fused_recurrent_kda]
every_recurrent = pytest.mark.parametrize('function', RECURRENT, ids=name_of)
every_chunked = pytest.mark.parametrize('function', CHUNKED, ids=name_of)
interpreted = pytest.mark.interpreted


@pytest.mark.pairwise
@interpreted
@pytest.mark.parametrize('options', [{'T': 5, 'B': 2}, {'lens': [2, 0, 3], **EVERYTHING}], ids=['equal', 'everything'])
@every_recurrent
def test_gradients_of_steps(function, options):
    given = case(function, K=16, V=16, HV=2, **options)
    found = measure(given, lambda tensors: call(function, given.with_tensors(**tensors)))
    assert set(found) == {'o', 'final', *(f'd{name}' for name in given.tensors)}
    wrong = {name: (rms, row) for name, (rms, row, dtype) in found.items() if not rms <= bounds.of_kernel(name, FP32)[0]}
    assert not wrong


@interpreted
@every_recurrent
def test_steps_with_gradients_are_seen_to_be_chunks(function):
    given = case(function, K=16, V=16, T=3)
    key = f'{operation(function)}.{function.__name__}'
    chunked = key.replace('fused_recurrent', 'chunk')
    seen = []
    for wanted in (False, True):
        given.tensors['v'].requires_grad_(wanted)
        with trace() as recorded:
            given.call(function)
        seen.append({(one.function, one.backend) for one in recorded})
        assert explain(function, **given.tensors)['default'].notes == (
            (f'with gradients it calls {chunked.partition(".")[2]}: the recurrent kernel has none',) if wanted else ()
        )
    assert seen == [{(key, 'default')}, {(key, 'default'), (chunked, 'default')}]


@every_recurrent
def test_explain_says_that_the_reference_computes_steps_in_chunks(function):
    note = f'computes in chunks, as {function.__name__.replace("fused_recurrent", "chunk")} does'
    for options, notes in (({'T': 3}, (note,)), ({'lens': [1, 1]}, (note,)), ({'T': 1}, ())):
        given = case(function, **options)
        assert explain(function, **given.tensors, cu_seqlens=given.cu_seqlens)['reference'].notes == notes


@pytest.mark.parametrize(
    ('device', 'version', 'usable'), [(B200, '3.6.0', False), (B200, '3.9.0', True), (H100, '3.6.0', True)]
)
@pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
def test_gradients_need_the_chunked_kernels(monkeypatch, function, device, version, usable):
    """Where Triton cannot compile those, steps without a gradient are still served."""
    triton = pytest.importorskip('triton')
    monkeypatch.setattr(triton, '__version__', version)
    monkeypatch.setattr('fla.ops.recurrence.on_triton.capability_of', lambda _: device.capability)
    default_dispatcher().reset()
    pretend(monkeypatch, device)
    arguments = fakes({**case(function, T=2, K=16, V=16, dtype=BF16).tensors})
    steps = explain(function, **arguments)['default']
    arguments['v'].requires_grad_()
    trained = explain(function, **arguments)['default']
    default_dispatcher().reset()
    refused = ('rejected', 'unavailable')
    assert (trained.verdict in refused, 'needs Triton 3.9' in str(trained.reason)) == (not usable, not usable)
    assert (steps.verdict in refused) is not (usable or function in RECURRENT)


@interpreted
@pytest.mark.parametrize('transform', ['grad', 'vmap', 'jvp'])
@every_recurrent
def test_steps_under_torch_func(function, transform):
    """A Triton kernel has no rules for them; the reference consists of functions that have."""
    given = case(function, K=16, V=16, T=3)
    v = given.tensors['v']

    def run(v):
        return given.with_tensors(v=v).call(function)[0]

    with trace() as recorded:
        if transform == 'grad':
            found = torch.func.grad(lambda v: run(v).square().sum())(v)
        elif transform == 'vmap':
            found = torch.vmap(run)(torch.stack((v, 2 * v)))
        else:
            found = torch.func.jvp(run, (v,), (v.flip(1),))[1]
    assert {one.backend for one in recorded} == {'reference'}
    reference = case(function, K=16, V=16, T=3, dtype=torch.float64)
    reference = reference.with_tensors(**{name: x.double() for name, x in given.tensors.items()})

    def exactly(v):
        return reference.with_tensors(v=v).call(function)[0]

    v = v.double()
    if transform == 'grad':
        leaf = v.clone().requires_grad_()
        (right,) = torch.autograd.grad(exactly(leaf).square().sum(), leaf)
    elif transform == 'vmap':
        right = torch.stack((exactly(v), exactly(2 * v)))
    else:  # o is linear in v up to what the initial state adds
        right = exactly(v.flip(1)) - exactly(torch.zeros_like(v))
    assert bounds.relative_rms(right, found) <= bounds.EXACT[FP32]


@pytest.mark.pairwise(pairs=False)
@interpreted
@gpu.every_place_of_nan
@pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
def test_nan_passes_through(function, lens, name):
    gpu.nan_passes_through(function, lens, name, 'cpu')


@interpreted
@every_chunked
def test_other_sizes_of_chunks(function):
    given = case(function, T=70)
    said = explain(function, **given.tensors, chunk_size=32)
    assert said.winner == 'reference'
    assert said['default'].reason == 'the Triton kernels work in chunks of 64'


@pytest.mark.parametrize('options', [{'B': 3, 'T': 1}, {'B': 1, 'T': 1, **EVERYTHING}], ids=['one step', 'everything'])
@pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
def test_a_step_on_a_cpu_is_not_chunked(monkeypatch, function, options):
    def chunked(*args, **more):
        raise AssertionError('a chunk of one step')

    monkeypatch.setattr('fla.ops.recurrence.reference.chunked_delta_rule', chunked)
    with trace() as recorded:
        case(function, **options).call(function)
    assert recorded.last_backend(f'{operation(function)}.{function.__name__}') == 'reference'
    with pytest.raises(AssertionError, match='a chunk of one step'):
        case(function, T=2).call(function)


@pytest.mark.pairwise
@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize(('dtype', 'dim'), [(BF16, 128), (FP32, 256)], ids=str)
@pytest.mark.parametrize('capability', [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
@every_recurrent
def test_decoding_compiles(function, capability, dtype, dim):
    pytest.importorskip('triton')
    from fla.ops.recurrence.kernels.decode import decode
    from tests.triton_support.compile_only import compile_only

    given = case(function, dtype=dtype, T=1, B=2, H=2, HV=4, K=dim, V=dim, **EVERYTHING).tensors
    names = ('q', 'k', 'v', 'g', 'gk', 'gv', 'beta', 'A_log', 'dt_bias', 'initial_state')
    tensors = {name: given.get(name) for name in names}
    if function in KDA:
        tensors['gk'], tensors['g'] = tensors['g'], None
    with compile_only(capability) as compiled, torch.no_grad():
        decode(*tensors.values(), None, Options(output_final_state=True, **EVERYTHING))
    assert [one.spilled for one in compiled] == [0]
