"""Keys and values grow in place without changing those of another cache."""

import copy
import pickle

import pytest
import torch

from fla.layers import Cache, attn, keys
from tests import bounds
from tests.layers.test_layers import LAYERS, bound, error, hidden, make, oracle

ATTENTION = [name for name in LAYERS if name.startswith('attn')]


def places(cache):
    return [x.data_ptr() for x in cache[0].keys_values]


@pytest.mark.parametrize('name', ATTENTION)
def test_steps_are_added_in_place(monkeypatch, name):
    """With four spare steps, so that copies are made after 5 and 10 steps."""
    monkeypatch.setattr(keys, 'MAX_SPARE', 4)
    layer, x, cache, pieces, found = make(name), hidden(2, 14), Cache(), [], []
    with torch.no_grad():
        for part in x.split([5, *[1] * 9], 1):
            pieces.append(layer(part, past_key_values=cache)[0])
            found.append(places(cache))
    assert error(oracle(name, layer, x), torch.cat(pieces, 1)) < bound(name)
    assert [found[i] == found[i - 1] for i in range(1, 10)] == [False, True, True, True, True, False, True, True, True]
    assert [x.shape[1] for x in cache[0].keys_values] == [14, 14]


@pytest.mark.parametrize('fork', [copy.copy, copy.deepcopy], ids=['shallow', 'deep'])
@pytest.mark.parametrize('name', ATTENTION)
def test_forks_continue_independently(name, fork):
    """In turns. A shallow copy of a layer's state shares the memory of its keys and values."""
    layer, x, ends = make(name), hidden(2, 4), [hidden(2, 5, seed=seed) for seed in (2, 3)]
    with torch.no_grad():
        cache = Cache()
        for part in x.split([3, 1], 1):
            layer(part, past_key_values=cache)
        caches = [cache, Cache()]
        caches[1].layers[0] = fork(cache[0])
        pieces = [[], []]
        for step in range(5):
            for one, end, found in zip(caches, ends, pieces, strict=True):
                found.append(layer(end[:, step : step + 1], past_key_values=one)[0])
        for end, found in zip(ends, pieces, strict=True):
            assert error(oracle(name, layer, torch.cat([x, end], 1))[:, 4:], torch.cat(found, 1)) < bound(name)


@pytest.mark.parametrize('name', ATTENTION)
def test_buffer_across_grad_modes(name):
    """No gradients, inference mode and gradients, in turns."""
    layer, x, cache, pieces = make(name), hidden(2, 9).requires_grad_(), Cache(), []
    modes = [torch.no_grad, torch.inference_mode, torch.inference_mode, torch.no_grad, torch.no_grad, torch.enable_grad]
    for mode, part in zip(modes, x.split([3, 1, 1, 1, 1, 2], 1), strict=True):
        with mode():
            pieces.append(layer(part, past_key_values=cache)[0])
    whole = layer(x)[0]
    assert error(whole, torch.cat([piece.detach().clone() for piece in pieces], 1)) < bound(name)
    # the last piece has a gradient for its own steps
    weights = hidden(2, 2, seed=5)
    (got,) = torch.autograd.grad((pieces[-1] * weights).sum(), x)
    before, last = x[:, :7].detach(), x[:, 7:].detach().requires_grad_()
    again = layer(torch.cat([before, last], 1))[0]
    # cached keys and values have none
    assert got[:, :7].count_nonzero() == 0
    (wanted,) = torch.autograd.grad((again[:, 7:] * weights).sum(), last)
    assert error(wanted, got[:, 7:]) < bounds.of_gradient(bound(name))


def test_a_step_that_fails_leaves_keys_and_values(monkeypatch):
    layer, x = make('attn'), hidden(2, 8)
    with torch.no_grad():
        cache = Cache()
        for part in x[:, :6].split([5, 1], 1):
            layer(part, past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(attn, 'parallel_attn', lambda *args, **options: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                layer(hidden(2, 1, seed=9), past_key_values=cache)
        pieces = [layer(part, past_key_values=cache)[0] for part in x[:, 6:].split(1, 1)]
    assert error(oracle('attn', layer, x)[:, 6:], torch.cat(pieces, 1)) < bound('attn')


def test_graphs_of_earlier_views_remain_valid():
    """Steps are written behind what the graph saved."""
    layer, cache, x = make('attn'), Cache(), hidden(2, 5)
    with torch.no_grad():
        for part in x[:, :4].split([3, 1], 1):
            layer(part, past_key_values=cache)
    found, factor = cache[0].keys_values[0], torch.ones((), dtype=x.dtype, requires_grad=True)
    loss = (found * factor).sum()
    with torch.no_grad():
        layer(x[:, 4:], past_key_values=cache)
    assert cache[0].keys_values[0].data_ptr() == found.data_ptr()
    (got,) = torch.autograd.grad(loss, factor)
    torch.testing.assert_close(got, found.sum())


@pytest.mark.parametrize(('length', 'more'), [(1, 16), (100, 16), (1000, 125), (5000, 256)])
def test_spare_steps(length, more):
    old = (torch.zeros(2, length - 1, 1, 1),) * 2
    assert keys.GrowingBuffer(old, 1).keys_values[0].shape[1] == length + more


def test_pickles_have_no_spare_memory():
    """Nor what that memory held before."""
    layer, cache, x = make('attn'), Cache(), hidden(2, 7)
    with torch.no_grad():
        for part in x[:, :6].split([5, 1], 1):
            layer(part, past_key_values=cache)
        again = pickle.loads(pickle.dumps(cache))
        for one, other in zip(cache[0].keys_values, again[0].keys_values, strict=True):
            assert torch.equal(one, other)
            assert other.untyped_storage().nbytes() == other.nbytes < one.untyped_storage().nbytes()
        first, second = (layer(x[:, 6:], past_key_values=one)[0] for one in (cache, again))
    assert torch.equal(first, second)


def test_reordering_frees_the_buffer():
    """The new tensors do not hold the memory of the old ones."""
    layer, cache = make('attn'), Cache()
    with torch.no_grad():
        for part in hidden(3, 6).split([5, 1], 1):
            layer(part, past_key_values=cache)
        assert cache[0].buffer is not None
        cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert cache[0].buffer is None
