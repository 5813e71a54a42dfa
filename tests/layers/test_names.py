"""Parameters have the names and shapes of docs/layers.md, in every variant of each layer. Arguments are those that callers
of flash-linear-attention's layers pass."""

import inspect
import itertools
import re

import pytest

from fla.layers import Attention, GatedDeltaNet, KimiDeltaAttention
from tests.markdown import ROOT

RECURRENT = {'hidden_size': 12, 'head_dim': 6, 'num_heads': 2, 'num_v_heads': 4, 'conv_size': 3}
LETTERS = {'D': 12, 'H': 2, 'HV': 4, 'K': 6, 'W': 3}
CASES = {
    'GatedDeltaNet': (GatedDeltaNet, {**RECURRENT, 'expand_v': 1.5}, {**LETTERS, 'V': 9}),
    'KimiDeltaAttention': (KimiDeltaAttention, {**RECURRENT, 'expand_v': 0.5}, {**LETTERS, 'V': 3}),
    'Attention': (
        Attention,
        {'hidden_size': 12, 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 6},
        {'D': 12, 'HQ': 4, 'H': 2, 'K': 6},
    ),
}


def table_of(name):
    """Rows of the layer's table in the docs: names, shape, arguments."""
    text = (ROOT / 'docs/layers.md').read_text(encoding='utf-8').split('## Names in checkpoints')[1]
    lines = text[text.index(f'\n`{name}`, with ') :].split('\n\n')[1].splitlines()[2:]
    return [[re.findall('`([^`]+)`', cell) for cell in line.strip('|').split(' | ')] for line in lines]


def size(text, letters):
    """The size of one dimension, given as a number, a letter or a product of two letters."""
    made = 1
    for factor in text.split(' * '):
        made *= letters[factor] if factor in letters else int(factor)
    return made


def documented(name, options, letters):
    found = {}
    for names, (shape,), needed in table_of(name):
        if all(options[argument] for argument in needed):
            found.update(dict.fromkeys(names, tuple(size(part, letters) for part in shape.strip('[]').split(', '))))
    return found


@pytest.mark.parametrize('name', CASES)
def test_names_in_checkpoints(name):
    layer, sizes, letters = CASES[name]
    arguments = sorted({argument for _, _, needed in table_of(name) for argument in needed})
    assert arguments
    for values in itertools.product([False, True], repeat=len(arguments)):
        options = dict(zip(arguments, values, strict=True))
        state = layer(**sizes, **options).state_dict()
        assert {key: tuple(x.shape) for key, x in state.items()} == documented(name, options, letters), options


DELTA = 'hidden_size expand_v head_dim num_heads num_v_heads mode'
REST = 'use_short_conv allow_neg_eigval conv_size conv_bias layer_idx norm_eps'
SIGNATURES = {
    GatedDeltaNet: f'{DELTA} use_gate {REST}',
    KimiDeltaAttention: f'{DELTA} {REST}',
    Attention: (
        'hidden_size num_heads num_kv_heads qkv_bias qk_norm window_size rope_theta max_position_embeddings layer_idx '
        'head_dim norm_eps'
    ),
    GatedDeltaNet.forward: ('self hidden_states attention_mask past_key_values use_cache output_attentions cu_seqlens'),
    Attention.forward: 'self hidden_states attention_mask past_key_values output_attentions use_cache cu_seqlens',
}


@pytest.mark.parametrize('function', SIGNATURES, ids=lambda function: function.__qualname__)
def test_arguments(function):
    parameters = inspect.signature(function).parameters.values()
    assert ' '.join(one.name for one in parameters) == SIGNATURES[function]
    assert all(one.default is not inspect.Parameter.empty for one in parameters if one.name not in ('self', 'hidden_states'))
    assert not any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters)
