"""Recurrences in turns: every chunk of every head once and in order, and the same numbers as in one launch."""

import pytest
import torch

pytest.importorskip('triton')
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.kernels import launch, tuning
from fla.ops.gated_delta_rule.kernels.turns import MOST_TURNS, of_turn, programs_of, turns_of
from fla.ops.recurrence.arguments import Inputs, Options
from tests.ops.delta_rules import FLAGS, RAW, case
from tests.ops.kernels import call, check
from tests.triton_support.compile_only import compile_only


def test_turns_fit_and_save_time():
    shorter = 0
    for heads in range(1, 300):
        for blocks in (1, 2, 4):
            turns = turns_of(heads, blocks, 128, 132)
            if turns == 1:
                continue
            shorter += 1
            assert 3 <= turns <= MOST_TURNS
            assert heads * blocks > 132
            assert programs_of(heads, blocks, turns) <= 132
    assert shorter > 30
    # of two blocks: one round; 8/7, 5/4 and 3/2 of one instead of two; two are as quick
    assert [turns_of(heads, 2, 128, 132) for heads in (66, 67, 80, 99, 100)] == [1, 8, 5, 3, 1]
    assert [turns_of(67, 2, chunks, 132) for chunks in (31, 32, 47, 48)] == [1, 3, 3, 4]


@pytest.mark.parametrize(
    ('capability', 'dtype', 'K', 'V', 'turns'),
    [
        *[((9, 0), torch.bfloat16, 128, 128, (3, 3)), ((10, 0), torch.float16, 112, 128, (3, 3))],
        *[((9, 0), torch.bfloat16, 64, 128, (3, 1)), ((9, 0), torch.bfloat16, 128, 256, (1, 1))],
        *[((9, 0), torch.float32, 128, 128, (1, 1)), ((8, 0), torch.bfloat16, 128, 128, (1, 1))],
    ],
)
def test_who_takes_turns(monkeypatch, capability, dtype, K, V, turns):
    """With and without outputs; packed sequences never do."""
    monkeypatch.setattr(tuning, 'capability_of', lambda device: capability)
    monkeypatch.setattr(tuning, 'multiprocessors_of', lambda device: 132)
    q, v = (torch.empty(1, 8192, 96, dim, dtype=dtype, device='meta') for dim in (K, V))
    tuned = tuning.tuning_of(q, V)
    assert (tuned.turns(v, False), tuned.turns(v, False, outputs=False)) == turns
    assert tuned.turns(v, True) == tuned.turns(v, True, outputs=False) == 1


@pytest.mark.interpreted
@pytest.mark.parametrize(('heads', 'turns'), [(6, 3), (7, 3), (5, 4), (16, 8)])
@pytest.mark.parametrize('chunks', [112, 113, 127])
def test_every_chunk_once_and_in_order(heads, turns, chunks):
    import triton
    import triton.language as tl

    @triton.jit
    def ask(out, turn, chunks, TURNS: tl.constexpr):
        pid = tl.program_id(0)
        head, block, begin, stop = of_turn(pid, turn, chunks, 2, TURNS)
        tl.store(out + pid * 4, head)
        tl.store(out + pid * 4 + 1, block)
        tl.store(out + pid * 4 + 2, begin)
        tl.store(out + pid * 4 + 3, stop)

    reached = {(head, block): 0 for head in range(heads) for block in range(2)}
    for turn in range(turns):
        programs = programs_of(heads, 2, turns)
        out = torch.empty(programs, 4, dtype=torch.int32)
        ask[(programs,)](out, turn, chunks, TURNS=turns)
        for head, block, begin, stop in out.tolist():
            if head < heads:
                assert reached[head, block] == begin < stop
                reached[head, block] = stop
    assert set(reached.values()) == {chunks}


def gradients_of(given):
    """o, the final state, and every gradient."""
    found = [x for x in call(chunk_gated_delta_rule, given) if x is not None]
    leaves = [x for x in given.tensors.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    return *found, *torch.autograd.grad(found, leaves, [torch.ones_like(x) for x in found])


def watch(monkeypatch, turns):
    """Sets the number of turns; returns the names of kernels that are launched in turns."""
    turned = []
    real = launch.launch

    def watched(kernel, grid, **more):
        inner = real(kernel, grid, **more)

        def run(*args, **options):
            if options.get('TURNS', 1) > 1:
                turned.append(kernel.fn.__name__)
            return inner(*args, **options)

        return run

    monkeypatch.setattr(launch, 'launch', watched)
    monkeypatch.setattr(tuning.Tuning, 'turns', lambda *asked: turns)
    return turned


FORMS = [{**RAW, **FLAGS}, {**RAW, **FLAGS, 'state_v_first': True, 'H': 1}, {'initial': False}]


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize('form', FORMS, ids=['everything', 'V first, grouped', 'stateless'])
def test_same_numbers(monkeypatch, form):
    """Bit by bit: states pass between turns in float32."""
    given = case(chunk_gated_delta_rule, B=2, T=64 * 5 - 3, K=20, V=40, **{'H': 2, 'HV': 2, **form})
    for tensor in given.tensors.values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.requires_grad_()

    def with_outputs(*asked):
        tuned = tuning.Tuning(*asked)
        tuned.outputs_with_states = True
        return tuned

    monkeypatch.setattr(tuning, '_cached', with_outputs)
    plain = gradients_of(given)
    turned = watch(monkeypatch, 3)
    found = gradients_of(given)
    assert sorted(turned) == 3 * ['states_backward'] + 6 * ['states_forward']
    assert len(plain) > 5
    assert all(map(torch.equal, plain, found))


@pytest.mark.triton
@pytest.mark.slow
def test_one_of_the_launches_is_compiled(monkeypatch):
    """All turns of a recurrence share a compiled kernel; that of the states differs in forward and backward."""
    turned = watch(monkeypatch, 3)
    given = case(chunk_gated_delta_rule, dtype=torch.bfloat16, K=128, V=128, device='meta', **RAW, **FLAGS)
    inputs, options = Inputs(**given.tensors), Options(128**-0.5, output_final_state=True, **RAW, **FLAGS)
    with compile_only((9, 0)) as compiled:
        o, final, G, inverse = launch.chunk_forward(inputs, options)
        launch.chunk_backward(inputs, options, G, inverse, o, final)
    print(*compiled, sep='\n')
    assert {'states_forward', 'states_backward'} <= set(turned)
    names = [one.name for one in compiled]
    assert (names.count('states_forward'), names.count('states_backward')) == (2, 1)


@pytest.mark.gpu
@pytest.mark.parametrize('turns', [3, 8])
def test_same_numbers_on_a_gpu(monkeypatch, turns):
    """Where turns are chosen: results are within the bounds, and equal those of one launch bit by bit."""
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip('nowhere else does a program of the recurrences fill a multiprocessor')
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    heads = 3 * multiprocessors // 4 if turns == 3 else multiprocessors // 2 + 1
    steps = 64 * 16 * (turns - 1) + 70
    size = {'K': 128, 'V': 128, 'H': heads, 'HV': heads, 'T': steps, 'dtype': torch.bfloat16, 'device': 'cuda'}
    given = case(chunk_gated_delta_rule, **RAW, **FLAGS, **size)
    for tensor in given.tensors.values():
        tensor.requires_grad_()
    tuned = tuning.tuning_of(given.tensors['q'], 128)
    assert tuned.turns(given.tensors['v'], False) == turns
    found = gradients_of(given)
    if turns == 3:
        check(chunk_gated_delta_rule, given)
    turned = watch(monkeypatch, 1)
    plain = gradients_of(given)
    assert not turned
    assert all(map(torch.equal, plain, found))
