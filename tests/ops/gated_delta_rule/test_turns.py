"""Recurrences in turns: every chunk of every head once and in order, and the same numbers as in one launch."""

import pytest
import torch

pytest.importorskip('triton')
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.kernels import launch
from fla.ops.gated_delta_rule.kernels.turns import LEAST_CHUNKS, MOST_TURNS, of_turn, programs_of, turns_of
from tests.ops.delta_rules import FLAGS, RAW, case
from tests.ops.kernels import call


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
    # one launch would take two rounds; this takes 8/7 to 3/2
    assert shorter > 30
    assert turns_of(96, 2, 128, 132) == 3
    assert turns_of(96, 2, 2 * LEAST_CHUNKS - 1, 132) == turns_of(66, 2, 128, 132) == turns_of(100, 2, 128, 132) == 1


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


@pytest.mark.interpreted
@pytest.mark.parametrize('state', [True, False], ids=['states', 'stateless'])
def test_same_numbers(monkeypatch, state):
    """Bit by bit: a state goes through memory in float32."""
    given = case(chunk_gated_delta_rule, B=2, T=64 * 5 - 3, HV=2, K=20, V=40, **RAW, **FLAGS)
    if not state:
        given = given.with_tensors(initial_state=None)
    for tensor in given.tensors.values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.requires_grad_()

    build = launch._Rule.__init__

    def alone(self, *args):
        build(self, *args)
        self.alone = self.outputs_with_states = True

    monkeypatch.setattr(launch._Rule, '__init__', alone)

    def results(turns):
        asked = []
        monkeypatch.setattr(launch, '_turns', lambda v, blocks: asked.append(blocks) or turns)
        found = [x for x in call(chunk_gated_delta_rule, given) if x is not None]
        leaves = [x for x in given.tensors.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        gradients = torch.autograd.grad(found, leaves, [torch.ones_like(x) for x in found])
        assert len(asked) >= 2
        return *found, *gradients

    plain, turned = results(1), results(3)
    assert len(plain) > 5
    assert all(map(torch.equal, plain, turned))
