"""Caches: rows that are reordered, padded rows, calls that fail, caches of another layer."""

import copy

import pytest
import torch
import torch.nn.functional as F

from fla.backends import trace
from fla.layers import Cache, attn
from tests import bounds
from tests.layers.test_layers import LAYERS, RECURRENT, bound, error, hidden, make


def tensors(cache):
    state = cache[0]
    return [x for x in (state.recurrent, *(state.conv or ()), *(state.keys_values or ())) if x is not None]


@pytest.mark.parametrize('name', LAYERS)
def test_reordering_rows(name):
    layer, x, more = make(name), hidden(3, 6), hidden(4, 2, seed=2)
    rows = torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        cache = layer(x, use_cache=True)[2]
        before = copy.deepcopy(cache)
        cache.reorder_cache(rows)
        o = layer(more, past_key_values=cache)[0]
        expected = layer(torch.cat([x[rows], more], 1))[0][:, 6:]
        assert error(expected, o) < bound(name)

        before.batch_select_indices(torch.tensor([2, 0]))
        before.batch_repeat_interleave(2)
        o = layer(more, past_key_values=before)[0]
        assert error(layer(torch.cat([x[[2, 2, 0, 0]], more], 1))[0][:, 6:], o) < bound(name)


@pytest.mark.parametrize('name', LAYERS)
def test_a_deep_copy_stays_in_the_graph(name):
    """The original and its copy continue differently, each with the gradient of its whole sequence."""
    layer, x, ends = make(name), hidden(2, 6).requires_grad_(), (hidden(2, 1, seed=2), hidden(2, 1, seed=3))
    cache = layer(x, use_cache=True)[2]
    for end, one in zip(ends, (copy.deepcopy(cache), cache), strict=True):
        o = layer(end, past_key_values=one)[0]
        expected = layer(torch.cat([x, end], 1))[0][:, 6:]
        assert error(expected, o) < bound(name)
        weights = hidden(2, 1, seed=4)
        (got,) = torch.autograd.grad((o * weights).sum(), x, retain_graph=True)
        (wanted,) = torch.autograd.grad((expected * weights).sum(), x)
        assert error(wanted, got) < bounds.of_gradient(bound(name))


@pytest.mark.parametrize(
    ('rows', 'kind', 'message'),
    [
        ([1, 0], TypeError, "'beam_idx' must be a tensor, got list"),
        (None, TypeError, "'beam_idx' must be a tensor, got None"),
        (torch.tensor([True, False]), TypeError, 'beam_idx must be int32 or int64, got torch.bool'),
        (torch.tensor([1, 0], device='meta'), ValueError, 'beam_idx must have values, got a tensor on meta'),
        (torch.tensor([[1, 0]]), ValueError, r'beam_idx must be \[M\], got shape \[1, 2\]'),
        (torch.tensor([0, 2]), ValueError, r'beam_idx must be in \[0, 2\), the number of sequences, got 0 to 2'),
        (torch.tensor([-1]), ValueError, r'beam_idx must be in \[0, 2\), the number of sequences, got -1 to -1'),
    ],
)
def test_bad_row_indices(rows, kind, message):
    layer = make('gdn')
    cache = layer(hidden(2, 3), use_cache=True)[2]
    with pytest.raises(kind, match=message):
        cache.reorder_cache(rows)
    with pytest.raises(kind, match=message.replace('beam_idx', 'indices')):
        cache.batch_select_indices(rows)


@pytest.mark.parametrize(
    ('repeats', 'kind', 'message'),
    [(-1, ValueError, 'repeats must be at least 0, got -1'), (1.0, TypeError, 'repeats must be an int, got float')],
)
def test_bad_repeats(repeats, kind, message):
    with pytest.raises(kind, match=message):
        Cache().batch_repeat_interleave(repeats)


def test_which_layers_have_a_state():
    cache, layers = Cache(), [make('gdn'), make('attn'), make('attn')]
    layers[1].layer_idx, layers[2].layer_idx = 3, 2
    assert cache[7].length == 0
    assert (list(cache), 0 in cache) == ([], False)
    for layer in layers[1:]:
        layer(hidden(2, 3), past_key_values=cache)
    assert (list(cache), 3 in cache, 0 in cache, 'x' in cache) == ([2, 3], True, False, False)


@pytest.mark.parametrize('name', [name for name in RECURRENT if 'plain' not in name])
def test_a_step_that_fails_half_way_tears_the_cache(monkeypatch, name):
    """The convolutions have taken the step, in place; the recurrence has not."""
    layer, x = make(name), hidden(2, 5)

    def fail(*args, **options):
        raise torch.OutOfMemoryError('no memory')

    with torch.no_grad():
        cache = layer(x[:, :4], use_cache=True)[2]
        before = copy.deepcopy(cache)
        with monkeypatch.context() as patch:
            patch.setattr(type(layer), 'fused_recurrent', fail)
            with pytest.raises(torch.OutOfMemoryError):
                layer(x[:, 4:], past_key_values=cache)
        for one in (cache, copy.deepcopy(cache)):
            with pytest.raises(ValueError, match=r'past_key_values\[0\] was partly changed by a step that failed'):
                layer(x[:, 4:], past_key_values=one)
        assert error(layer(x)[0][:, 4:], layer(x[:, 4:], past_key_values=before)[0]) < bound(name)


def test_a_hook_that_raises_leaves_a_torn_cache():
    """The hook of the first convolution, which has taken the step."""
    layer, x = make('gdn'), hidden(1, 5)
    with torch.no_grad():
        cache = layer(x[:, :4], use_cache=True)[2]
        hook = layer.q_conv1d.register_forward_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            layer(x[:, 4:], past_key_values=cache)
        hook.remove()
        with pytest.raises(ValueError, match='was partly changed by a step that failed'):
            layer(x[:, 4:], past_key_values=cache)


def test_a_failed_step_that_changed_nothing_can_be_retried(monkeypatch):
    """A packed step, which makes new tensors; a step that fails before its convolutions; a step that PyTorch refuses because
    it would write into a tensor captured by a transform."""
    layer, x = make('gdn'), hidden(1, 5)

    def fail(*args, **options):
        raise torch.OutOfMemoryError('no memory')

    with torch.no_grad():
        cache = layer(x[:, :4], use_cache=True)[2]
        before = copy.deepcopy(cache)
        for thing, name, options in (
            (type(layer), 'fused_recurrent', {'cu_seqlens': torch.tensor([0, 1])}),
            (layer.v_proj, 'forward', {}),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(thing, name, fail)
                with pytest.raises(torch.OutOfMemoryError):
                    layer(x[:, 4:], past_key_values=cache, **options)
    with pytest.raises(RuntimeError, match='mutate a captured Tensor'):
        torch.func.jvp(lambda y: layer(y, past_key_values=cache)[0], (x[:, 4:],), (x[:, 4:],))
    for one, other in zip(tensors(cache), tensors(before), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert error(layer(x)[0][:, 4:], layer(x[:, 4:], past_key_values=cache)[0]) < bound('gdn')


def test_a_first_step_that_fails_leaves_an_empty_cache(monkeypatch):
    layer, x, cache = make('gdn'), hidden(2, 1), Cache()
    with monkeypatch.context() as patch:
        patch.setattr(layer.o_proj, 'forward', lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            layer(x, past_key_values=cache)
    assert error(layer(x)[0], layer(x, past_key_values=cache)[0]) < bound('gdn')


def test_an_empty_cache_has_no_rows_to_change():
    cache = Cache()
    cache[0].length = 3
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    assert (tensors(cache), cache.get_seq_length()) == ([], 3)


@pytest.mark.parametrize('pieces', [[5], [1, 4], [4, 1], [1, 1, 1, 1, 1], [2, 3]], ids=str)
@pytest.mark.parametrize('name', LAYERS)
def test_padded_prefill_in_pieces(padded, name, pieces):
    """Padding, here NaN, changes nothing, also if a piece is a single step."""
    layer, x = make(name), hidden(4, 5)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0]])
    x[mask == 0] = torch.nan
    more = hidden(4, 1, seed=2)
    with torch.no_grad():
        cache, outputs, done = Cache(), [], 0
        for length in pieces:
            piece = slice(done, done + length)
            outputs.append(layer(x[:, piece], attention_mask=mask[:, : piece.stop], past_key_values=cache)[0])
            done += length
        o = torch.cat(outputs, 1)
        last = layer(more, attention_mask=torch.cat([mask, torch.ones(4, 1)], 1), past_key_values=cache)[0]
        assert not o[mask == 0].any()
        for b, is_step in enumerate(mask.bool()):
            whole = layer(torch.cat([x[b : b + 1, is_step], more[b : b + 1]], 1))[0][0]
            assert error(whole, torch.cat([o[b, is_step], last[b]])) < bound(name)


@pytest.mark.parametrize('name', LAYERS)
@pytest.mark.parametrize('step', [True, 1, 1.0, 0.25, 3], ids=str)
def test_padding_is_zero_and_a_step_is_not(padded, name, step):
    """In masks of any dtype, whatever the nonzero number: positions do not count in it."""
    layer, x, mask = make(name), hidden(2, 6), torch.tensor([[0, 1, 1, 0, 1, 1], [1] * 6])
    given = torch.where(mask.bool(), torch.tensor(step), torch.zeros((), dtype=torch.tensor(step).dtype))
    with torch.no_grad():
        caches, found = (Cache(), Cache()), []
        for piece in (slice(0, 4), slice(4, 5), slice(5, 6)):
            found.append(
                [
                    layer(x[:, piece], attention_mask=one[:, : piece.stop], past_key_values=cache)[0]
                    for one, cache in zip((mask, given), caches, strict=True)
                ]
            )
    assert all(torch.equal(expected, o) for expected, o in found)


@pytest.mark.parametrize('name', RECURRENT)
def test_a_step_of_padding_keeps_the_bits_of_the_state(name):
    layer = make(name, torch.float32)
    with torch.no_grad():
        cache = layer(hidden(2, 6, dtype=torch.float32), use_cache=True)[2]
        before = copy.deepcopy(cache)
        mask = torch.tensor([[1] * 6 + [0], [1] * 7])
        layer(hidden(2, 1, dtype=torch.float32), attention_mask=mask, past_key_values=cache)
    for old, new in zip(tensors(before), tensors(cache), strict=True):
        assert torch.equal(old[0], new[0])
        assert not torch.equal(old[1], new[1])


@pytest.mark.parametrize('name', LAYERS)
@pytest.mark.parametrize('length', [1, 2])
def test_a_call_that_fails_leaves_the_cache_as_it_was(name, length):
    layer = make(name)
    with torch.no_grad():
        cache = layer(hidden(2, 6), use_cache=True)[2]
        before = copy.deepcopy(cache)
        with pytest.raises(ValueError, match='past_key_values holds 2 sequences, got 3'):
            layer(hidden(3, length), past_key_values=cache)
    assert cache.get_seq_length() == 6
    assert all(torch.equal(old, new) for old, new in zip(tensors(before), tensors(cache), strict=True))


@pytest.mark.parametrize(
    ('name', 'options', 'other', 'message'),
    [
        (
            'gdn',
            {},
            'attn',
            r'past_key_values\[0\].recurrent belongs to another layer: .*, this layer needs none; give each layer',
        ),
        ('attn', {}, 'gdn', r'past_key_values\[0\].keys_values belongs to another layer'),
        (
            'attn',
            {},
            'attn window',
            r'keys_values belongs to another layer: its sizes are .*, this layer needs \[\[3, 4\], \[3, 4\]\]',
        ),
        # without the check, q and k would take their steps before v fails
        (
            'gdn',
            {'expand_v': 1},
            'gdn',
            r'recurrent belongs to another layer: its sizes are \[\[4, 4, 4\]\], this layer needs \[\[4, 4, 8\]\]',
        ),
        ('gdn', {'conv_size': 3}, 'gdn', r'conv belongs to another layer: its sizes are \[\[8, 3\], \[8, 3\], \[32, 3\]\]'),
        ('kda', {}, 'gdn', 'recurrent belongs to another layer'),
        ('kda', {'use_short_conv': True}, 'gdn plain', 'belongs to another layer'),
    ],
)
@pytest.mark.parametrize('length', [1, 2])
def test_the_cache_of_another_layer(name, options, other, message, length):
    with torch.no_grad():
        cache = make(name, **options)(hidden(2, 6), use_cache=True)[2]
        before = copy.deepcopy(cache)
        with pytest.raises(ValueError, match=message):
            make(other)(hidden(2, length), past_key_values=cache)
    assert cache.get_seq_length() == 6
    assert all(torch.equal(old, new) for old, new in zip(tensors(before), tensors(cache), strict=True))


@pytest.mark.parametrize('name', LAYERS)
def test_the_cache_of_another_device(name):
    cache = make(name)(hidden(2, 6), use_cache=True)[2]
    with pytest.raises(ValueError, match='past_key_values is on cpu and hidden_states on meta'):
        make(name).to('meta')(hidden(2, 1).to('meta'), past_key_values=cache)


@pytest.mark.parametrize('length', [1, 3])
@pytest.mark.parametrize('name', LAYERS)
def test_a_layer_narrower_than_float64_goes_on_from_its_cache(name, length):
    x, more = hidden(2, 6), hidden(2, length, seed=2)
    expected = make(name)(torch.cat([x, more], 1))[0][:, 6:]
    with torch.no_grad():
        layer = make(name)
        cache = layer(x, use_cache=True)[2]
        o = layer.float()(more.float(), past_key_values=cache)[0]
    assert o.dtype == torch.float32
    assert error(expected, o) < bounds.of_layer(torch.float32)


@pytest.mark.parametrize('name', LAYERS)
@pytest.mark.parametrize('shape', [(2, 0), (0, 3), (0, 1), (0, 0)], ids=str)
@pytest.mark.parametrize('masked', [False, True])
def test_empty_batches(padded, name, shape, masked):
    layer, x = make(name), hidden(*shape)
    mask = torch.ones(shape) if masked else None
    o, _, cache = layer(x, attention_mask=mask, use_cache=True)
    assert o.shape == x.shape
    assert layer(x, past_key_values=cache)[0].shape == x.shape
    batch, past = x.shape[0], cache.get_seq_length()
    more = hidden(batch, 2)
    for length in (2, 0):
        past += length
        mask = torch.ones(batch, past)
        assert layer(more[:, :length], attention_mask=mask, past_key_values=cache)[0].shape == (batch, length, x.shape[2])


def test_padded_attention_is_packed_attention():
    """With nothing cached; neither in compiled code, which cannot wait for lengths, nor after cached steps."""
    layer, x = make('attn window', torch.float32), hidden(2, 6, dtype=torch.float32)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]])
    with trace() as recorded:
        o = layer(x, attention_mask=mask)[0]
    assert recorded.last_backend('attn.parallel_attn') == 'sdpa'
    with trace() as recorded:
        compiled = torch.compile(layer, fullgraph=True, backend='aot_eager')(x, attention_mask=mask)[0]
    assert not any(record.function == 'attn.parallel_attn' for record in recorded)
    torch.testing.assert_close(compiled, o)
    cache = layer(x[:, :4], attention_mask=mask[:, :4], use_cache=True)[2]
    with trace() as recorded:
        rest = layer(x[:, 4:], attention_mask=mask, past_key_values=cache)[0]
    assert not any(record.function == 'attn.parallel_attn' for record in recorded)
    torch.testing.assert_close(rest, o[:, 4:])


def test_a_refused_call_leaves_no_state():
    cache = Cache()
    with pytest.raises(ValueError, match='attention_mask'):
        make('attn')(hidden(1, 4), attention_mask=torch.ones(1, 6), past_key_values=cache)
    assert (len(cache), cache.get_seq_length()) == (0, 0)
    assert cache[5].length == 0
    assert len(cache) == 0


@pytest.mark.parametrize(('cudnn', 'numbers'), [(True, [8, 8, 12, 12]), (False, [7, 8, 9, 10])])
def test_masked_keys_are_padded_for_cudnn(monkeypatch, cudnn, numbers):
    """cuDNN would make a plan for each number of keys."""
    monkeypatch.setattr(attn, 'takes_cudnn', lambda *asked: cudnn)
    monkeypatch.setattr(attn, 'KEYS_MULTIPLE', 4)
    layer, mask, found, attend = make('attn'), torch.tensor([[0] * 2 + [1] * 4]), [], F.scaled_dot_product_attention

    def spy(q, k, v, *, attn_mask, **options):
        assert attn_mask.shape[-1] == v.shape[2] == k.shape[2]
        found.append(k.shape[2])
        return attend(q, k, v, attn_mask=attn_mask, **options)

    with torch.no_grad():
        cache = layer(hidden(1, 6), attention_mask=mask, use_cache=True)[2]
        monkeypatch.setattr(F, 'scaled_dot_product_attention', spy)
        for _ in numbers:
            mask = torch.cat([mask, torch.ones(1, 1, dtype=torch.long)], 1)
            layer(hidden(1, 1), attention_mask=mask, past_key_values=cache)
    assert found == numbers


@pytest.mark.parametrize('name', ['attn', 'attn window', 'attn nope'])
def test_gradients_of_masked_attention_in_compiled_code(name):
    """Those of the packed path, for the input and every parameter."""
    layer = make(name, torch.float32)
    x = hidden(2, 6, dtype=torch.float32).requires_grad_()
    mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]])
    weights, leaves = hidden(2, 6, dtype=torch.float32, seed=5), [x, *layer.parameters()]
    compiled = torch.compile(layer, fullgraph=True, backend='aot_eager')
    packed, masked = (
        torch.autograd.grad((mixer(x, attention_mask=mask)[0] * weights).sum(), leaves) for mixer in (layer, compiled)
    )
    limit = bounds.of_compiled(bounds.of_gradient(bounds.of_layer(torch.float32)))
    assert all(error(one, other) < limit for one, other in zip(packed, masked, strict=True))
