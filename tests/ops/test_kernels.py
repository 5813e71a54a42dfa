"""The Triton kernels of the gated delta rule and of Kimi delta attention, interpreted, against the definition in float64."""

from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip('triton')
from fla.backends import explain
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.kernels import launch as gdn_launch
from fla.ops.gated_delta_rule.kernels import tuning as gdn_tuning
from fla.ops.kda import chunk_kda
from fla.ops.kda.kernels import launch as kda_launch
from fla.ops.kda.kernels import tuning as kda_tuning
from fla.ops.recurrence.arguments import Inputs, Options
from tests import bounds
from tests.ops.delta_rules import CHUNKED, FUNCTIONS, GDN, case, definition, grid, name_of, strided
from tests.ops.kernels import BF16, EVERYTHING, FP16, FP32, assert_same, beyond, call, check, check_on_grid, everything

pytestmark = pytest.mark.interpreted
RECURRENT = [function for function in FUNCTIONS if function not in CHUNKED]
every_chunked = pytest.mark.parametrize('function', CHUNKED, ids=name_of)
NARROW = [
    *(
        'one step',
        'beyond a chunk',
        'weak gates',
        'strong gates',
        'medium gates',
        'spread gates',
        'switching gates',
        'everything',
        'packed',
    ),
    'packed int64',
]
# steps know of no chunks, and many take long
SHORT = [
    *('one step', 'two steps', 'below a block', 'a block', 'beyond a block', 'wide', 'states turned, one step'),
    *('raw gates, no bias', 'packed singles', 'packed int64', 'lower bound alone'),
]


def cases(functions, names, *dtypes):
    """(function, name, dtype) of cases on the grid."""
    return [
        pytest.param(function, name, dtype, id=f'{function.__name__}-{name}-{str(dtype).removeprefix("torch.")}')
        for function, name in grid(functions)
        for dtype in dtypes
        if name in names
    ]


on_the_grid = partial(pytest.mark.parametrize, ('function', 'name', 'dtype'))


@pytest.mark.pairwise
@on_the_grid(cases(CHUNKED, {name for _, name in grid(CHUNKED)}, FP32))
def test_grid(function, name, dtype):
    check_on_grid(function, name, dtype=dtype)


@pytest.mark.pairwise(pairs=False)
@on_the_grid([*cases(CHUNKED, NARROW, BF16), *cases(CHUNKED, ['beyond a chunk', 'everything'], FP16)])
def test_grid_of_halves(function, name, dtype):
    check_on_grid(function, name, dtype=dtype)


@on_the_grid([*cases(RECURRENT, SHORT, FP32), *cases(RECURRENT, ['one step', 'packed int64'], BF16)])
def test_grid_of_decoding(function, name, dtype):
    check_on_grid(function, name, dtype=dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize('dtype', [FP16, BF16], ids=['fp16', 'bf16'])
@pytest.mark.parametrize('sizes', [{'K': 64, 'V': 128}, {'K': 20, 'V': 80}], ids=str)
@every_chunked
def test_halves_of_other_sizes(function, sizes, dtype):
    check(function, case(function, dtype=dtype, T=130, **sizes))


@pytest.mark.pairwise
@pytest.mark.parametrize('sizes', [{'K': 256, 'V': 16}, {'K': 16, 'V': 256}, {'K': 100, 'V': 5}], ids=str)
@every_chunked
def test_sizes(function, sizes):
    check(function, case(function, T=66, use_qk_l2norm_in_kernel=True, **sizes))


@pytest.mark.parametrize('gate_dtype', [BF16, FP32], ids=['gates bf16', 'gates fp32'])
@every_chunked
def test_gates_in_half_precision(function, gate_dtype):
    """Raw ones are computed with in float32, and their gradient is rounded once."""
    check(function, case(function, dtype=BF16, gate_dtype=gate_dtype, T=80, HV=2, **EVERYTHING))


@pytest.mark.pairwise
@pytest.mark.parametrize('sizes', [{'T': 5, 'B': 2, 'HV': 2}, {'T': 3, 'K': 1, 'V': 1}, {'T': 1, 'K': 1, 'V': 1}], ids=str)
@pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
def test_negated_inputs(function, sizes):
    """Tensors whose memory holds the other sign, of which PyTorch has taken a note; single numbers are contiguous, whatever
    their stride."""
    given = case(function, **sizes)
    turned = {name: torch.complex(x, -x).conj().imag for name, x in given.tensors.items()}
    single = {name: x[..., 0].unsqueeze(-1) if x.shape[-1] == 1 else x for name, x in turned.items()}
    for tensors in (turned, single):
        assert all(x.is_neg() and torch.equal(x, given.tensors[name]) for name, x in tensors.items())
        assert_same(everything(function, given), everything(function, given.with_tensors(**tensors)))


@pytest.mark.parametrize('options', [{'T': 33, 'B': 2, 'H': 2, 'HV': 2}, {'lens': [3, 0, 30]}], ids=str)
@pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
def test_strided_inputs(function, options):
    check(function, strided(case(function, K=16, V=16, **options)))


@pytest.mark.pairwise
@pytest.mark.parametrize('initial', [False, True])
@every_chunked
def test_without_a_final_state(function, initial):
    """And with the gradient of a sum, which is one number, expanded."""
    given = case(function, initial=initial, T=70, B=2, H=2, HV=4, K=16, V=16)
    leaves = {name: x.requires_grad_() for name, x in given.tensors.items()}
    o, final = call(function, given, output_final_state=False)
    assert final is None
    got = torch.autograd.grad(o.sum(), list(leaves.values()))
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    wanted = torch.autograd.grad(definition(given, exact)[0].sum(), list(exact.values()))
    for name, right, gradient in zip(leaves, wanted, got, strict=True):
        assert bounds.relative_rms(right, gradient) <= bounds.of_kernel(f'd{name}', FP32)[0], name


@pytest.fixture
def much_shared_memory(monkeypatch):
    """As on an H100, where one kernel runs over the chunks and writes the outputs: gives how often it did."""
    times = []

    def counted(original, kernel, grid, **more):
        def run(*args, **options):
            times.extend([kernel] * (options.get('OUTPUTS') is True))
            return original(kernel, grid, **more)(*args, **options)

        return run

    for tuning in (gdn_tuning, kda_tuning):
        monkeypatch.setattr(tuning, 'capability_of', lambda device: (9, 0))
    for module in (gdn_launch, kda_launch):
        monkeypatch.setattr(module, 'launch', partial(counted, module.launch))
    return times


@pytest.mark.pairwise
@pytest.mark.parametrize('dtype', [FP16, BF16], ids=['fp16', 'bf16'])
@pytest.mark.parametrize(
    'options',
    [{}, {'T': 70, 'B': 2, 'H': 2, **EVERYTHING}, {'lens': [3, 0, 65, 30], **EVERYTHING}, {'T': 65, 'strength': -20.0}],
    ids=['plain', 'everything', 'packed', 'strong gates'],
)
@every_chunked
def test_outputs_with_the_states(much_shared_memory, function, options, dtype):
    check(function, case(function, dtype=dtype, HV=2, K=32, V=48, **options))
    assert much_shared_memory


@every_chunked
def test_beta_of_zero(function):
    """What would divide by beta fails here."""
    given = case(function, T=20)
    given.tensors['beta'][:, ::3] = 0
    check(function, given)


@every_chunked
def test_equal_keys(function):
    """The inverse of the worst condition: beta = 1, no decay and every key the same."""
    given = case(function, T=64, K=16, V=16, strength=0.0)
    given.tensors['k'][:] = given.tensors['k'][:, :1].clone()
    given.tensors['beta'].fill_(1.0)
    check(function, given)


@every_chunked
def test_gates_that_forget_everything(function):
    check(function, case(function, strength=-1000.0))


@every_chunked
def test_same_bits_twice(function):
    given = case(function, dtype=BF16, HV=2, **EVERYTHING)
    assert_same(everything(function, given), everything(function, given))


def test_the_bounds_can_be_exceeded():
    """By a case whose inputs the kernels see rounded."""
    function = GDN[0]
    given = case(function, T=20)
    spoilt = given.with_tensors(k=given.tensors['k'].bfloat16().float())
    right, _, _ = definition(given, {name: x.double() for name, x in given.tensors.items()})
    assert bounds.relative_rms(right, call(function, spoilt)[0]) > 10 * bounds.of_kernel('o', FP32)[0]
    assert beyond(function, given) == []


@every_chunked
def test_a_gate_of_minus_infinity(function):
    """Its step forgets everything, and nothing is NaN."""
    check(function, case(function, strength='reset', T=70, K=16, V=16))


@pytest.mark.pairwise
@pytest.mark.parametrize('shape', [(1, 1, -1, 1), (-1,)], ids=str)
@pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
def test_gate_parameters_of_any_shape_and_strides(function, shape):
    given = case(function, T=5, H=1, HV=4, K=16, V=16, **EVERYTHING)
    for name in ('A_log', 'dt_bias'):
        x = given.tensors[name]
        given.tensors[name] = torch.stack((x, torch.full_like(x, 9.0)), 1)[:, 0].view(shape if name == 'A_log' else -1)
    assert given.tensors['A_log'].stride(-2 if len(shape) > 1 else -1) == 2
    check(function, given)


@pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
def test_float64_is_for_the_reference(function):
    given = case(function, T=2, dtype=torch.float64)
    decision = explain(function, **given.tensors)
    assert decision['default'].verdict == 'rejected'
    assert "dtype of 'q'" in decision['default'].reason
    assert decision.winner == 'reference'


@every_chunked
def test_no_steps_stay_in_the_graph(function):
    given = case(function, T=0, K=16, V=16)
    leaves = {name: x.requires_grad_() for name, x in given.tensors.items()}
    o, _ = call(function, given)
    (gradient,) = torch.autograd.grad(o.sum(), [leaves['v']])
    assert gradient.shape == leaves['v'].shape


@pytest.mark.slow
@pytest.mark.parametrize('which', ['gated delta rule', 'kda', 'kda, kept'])
def test_operators_keep_the_rules(which):
    """PyTorch's own test of operators. Not of packed sequences, which leave rows of the intermediates unwritten: it compares
    those, too."""
    from fla.ops.gated_delta_rule import autograd as gdn
    from fla.ops.kda import autograd as kda

    function, chunk, keep = chunk_gated_delta_rule, gdn._chunk, False
    if which != 'gated delta rule':
        function, chunk, keep = chunk_kda, kda._chunk, which == 'kda, kept'
    options = Options(0.25, output_final_state=True, disable_recompute=keep, return_intermediate_states=keep)
    given = case(function, T=70, B=2, HV=2, K=16, V=16)
    inputs = Inputs(**{name: x.requires_grad_() for name, x in given.tensors.items()})
    torch.library.opcheck(chunk.op, (*inputs, *options))


@pytest.mark.parametrize('kind', [int, np.int64, np.float32, np.float16], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
def test_numbers_of_any_type(function, kind):
    """Kernels get a Python float: Triton takes no other, and a decode step keeps what it compiled for it."""
    raw = {} if function in GDN else {'use_gate_in_kernel': True, 'lower_bound': -3.0}
    given = case(function, T=3, **raw)
    wanted = call(function, given, scale=2.0)
    if raw:
        given.options['lower_bound'] = kind(-3)
    found = call(function, given, scale=kind(2))
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b)
