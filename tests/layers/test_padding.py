"""Padded batches as packed sequences."""

import pytest
import torch

from fla.layers.padding import Packing

MASKS = {
    'left': [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]],
    'right': [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    'between': [[1, 0, 1, 0, 1], [0, 1, 0, 1, 0], [0, 0, 1, 0, 0]],
    'all padding': [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]],
}


@pytest.mark.parametrize('mask', MASKS.values(), ids=MASKS)
def test_each_row_is_a_sequence_and_so_is_its_padding(padded, mask):
    """No sequence is longer than a row: attention's work is quadratic in its length."""
    mask = torch.tensor(mask)
    packing = Packing.from_mask(mask)
    x = torch.arange(15.0).view(3, 5, 1)
    lens = packing.cu_seqlens.diff().tolist()
    steps = mask.sum(1).tolist()
    assert lens == (steps if padded == 'syncs' else [*steps, *(5 - n for n in steps)])
    packed = packing.pack(x)
    for row, sequence in enumerate(packed[0].split(lens)[:3]):
        assert torch.equal(sequence, x[row][mask[row].bool()])
    assert not packed[0, sum(steps) :].any()
    assert torch.equal(packing.unpack(packed + 1), (x + 1) * mask[..., None])
    states = torch.rand(3, 2)
    assert packing.pack_states(states).shape[0] == len(lens)
    assert torch.equal(packing.unpack_states(packing.pack_states(states)), states)
