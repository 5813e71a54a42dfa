"""Signatures of vendors' functions that backends rely on: import path -> the leading parameters, in order.

Further parameters must have defaults. Parameters after `*` are passed by name. `tests/test_vendor_signatures.py` compares
with the installed packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect

SIGNATURES: dict[str, tuple[str, ...]] = {
    # Liger-Kernel, 0.6.0 to 0.8.5
    'liger_kernel.ops.rms_norm.rms_norm_forward': ('X', 'W', 'eps', 'offset', 'casting_mode', 'row_mode'),
    'liger_kernel.ops.rms_norm.rms_norm_backward': (
        *('dY', 'X', 'W', 'RSTD', 'offset', 'casting_mode', 'BLOCK_SIZE', 'num_warps', 'in_place', 'row_mode'),
    ),
    'liger_kernel.ops.layer_norm.layer_norm_forward': ('X', 'W', 'B', 'eps'),
    'liger_kernel.ops.layer_norm.layer_norm_backward': ('dY', 'X', 'W', 'B', 'Mean', 'RSTD'),
    'liger_kernel.ops.utils.calculate_settings': ('n',),
    'liger_kernel.ops.swiglu.swiglu_forward': ('a', 'b'),
    'liger_kernel.ops.swiglu.swiglu_backward': ('a', 'b', 'dc'),
    'liger_kernel.ops.rope.rope_forward': ('q', 'k', 'cos', 'sin'),
    'liger_kernel.ops.rope.rope_backward': ('dq', 'dk', 'cos', 'sin'),
    'liger_kernel.ops.cross_entropy.cross_entropy_forward': (
        *('_input', 'target', 'weight', 'ignore_index', 'lse_square_scale', 'label_smoothing', 'reduction', 'softcap'),
        'return_z_loss',
    ),
    'liger_kernel.ops.fused_linear_cross_entropy.fused_linear_cross_entropy_forward': (
        *('_input', 'weight', 'target', 'ce_weight', 'bias', 'ignore_index', 'lse_square_scale', 'label_smoothing'),
        *('reduction', 'softcap'),
    ),
    # causal-conv1d, 1.4 and later
    'causal_conv1d.causal_conv1d_fn': (
        *('x', 'weight', 'bias', 'seq_idx', 'initial_states', 'return_final_states', 'final_states_out', 'activation'),
    ),
    'causal_conv1d.causal_conv1d_update': ('x', 'conv_state', 'weight', 'bias', 'activation'),
    # FlashInfer, 0.6.14 to 0.7.4
    'flashinfer.activation.silu_and_mul': ('input',),
    'flashinfer.rope.apply_rope_with_cos_sin_cache_inplace': (
        *('positions', 'query', 'key', 'head_size', 'cos_sin_cache', 'is_neox'),
    ),
    'flashinfer.norm.rmsnorm': ('input', 'weight', 'eps'),
    'flashinfer.norm.layernorm': ('input', 'gemma', 'beta', 'eps'),
    'flashinfer.single_prefill_with_kv_cache': (
        *('q', 'k', 'v', 'scale_q', 'scale_k', 'scale_v', 'o_dtype', 'custom_mask', 'packed_custom_mask', 'causal'),
        *('kv_layout', 'pos_encoding_mode', 'use_fp16_qk_reduction', 'sm_scale', 'window_left'),
    ),
    # FlashAttention 2, 2.7.0 and 2.8.3; 3, as built from its folder `hopper`
    'flash_attn.flash_attn_func': (
        *('q', 'k', 'v', 'dropout_p', 'softmax_scale', 'causal', 'window_size', 'softcap', 'alibi_slopes', 'deterministic'),
    ),
    'flash_attn.flash_attn_varlen_func': (
        *('q', 'k', 'v', 'cu_seqlens_q', 'cu_seqlens_k', 'max_seqlen_q', 'max_seqlen_k', 'dropout_p', 'softmax_scale'),
        *('causal', 'window_size', 'softcap', 'alibi_slopes', 'deterministic'),
    ),
    'flash_attn_interface.flash_attn_func': (
        *('q', 'k', 'v', 'softmax_scale', 'causal', 'qv', 'q_descale', 'k_descale', 'v_descale', 'window_size'),
        *('attention_chunk', 'softcap', 'num_splits', 'pack_gqa', 'deterministic'),
    ),
    'flash_attn_interface.flash_attn_varlen_func': (
        *('q', 'k', 'v', 'cu_seqlens_q', 'cu_seqlens_k', 'max_seqlen_q', 'max_seqlen_k', 'seqused_q', 'seqused_k'),
        *('softmax_scale', 'causal', 'qv', 'q_descale', 'k_descale', 'v_descale', 'window_size', 'attention_chunk'),
        *('softcap', 'num_splits', 'pack_gqa', 'deterministic'),
    ),
    # xFormers, 0.0.30 and 0.0.35
    'xformers.ops.memory_efficient_attention': ('query', 'key', 'value', 'attn_bias', 'p', 'scale'),
    'xformers.ops.fmha.attn_bias.LowerTriangularFromBottomRightMask.make_local_attention': ('self', 'window_size'),
    # FlagGems, 5.0.0 and 5.0.2
    'flag_gems.ops.rms_norm': ('x', 'normalized_shape', 'weight', 'eps'),
    'flag_gems.ops.layer_norm': ('input', 'normalized_shape', 'weight', 'bias', 'eps'),
    # PyTorch 2.13; 2.11 lacks enable_gqa
    'torch.nn.attention.varlen.varlen_attn': (
        *('query', 'key', 'value', 'cu_seq_q', 'cu_seq_k', 'max_q', 'max_k', '*', 'scale', 'window_size', 'enable_gqa'),
    ),
}

# constants whose values backends pass in calls
CONSTANTS: dict[str, object] = {'liger_kernel.ops.rms_norm._CASTING_MODE_GEMMA': 1}


def installed(path: str) -> bool:
    """Whether the package is installed; for PyTorch, whether this version has the module."""
    try:
        return (
            importlib.util.find_spec(path.rpartition('.')[0] if path.startswith('torch.') else path.partition('.')[0])
            is not None
        )
    except ModuleNotFoundError:
        return False


def found(path: str) -> object:
    """Imports the object at a path: a function, a constant or a method."""
    module, _, name = path.rpartition('.')
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        if '.' not in module:
            raise
    return getattr(found(module), name)  # a method of a class


def difference(path: str) -> str | None:
    """Returns how the installed signature differs from the expected one, or None."""
    parameters = list(inspect.signature(found(path)).parameters.values())
    names = tuple(one.name for one in parameters)
    expected, by_name = SIGNATURES[path], ()
    if '*' in expected:
        place = expected.index('*')
        expected, by_name = expected[:place], expected[place + 1 :]
    if names[: len(expected)] != expected or not set(by_name) <= set(names):
        return f'{path} takes {names}, not {SIGNATURES[path]}'
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    given = {*expected, *by_name}
    more = [
        one.name
        for one in parameters
        if one.name not in given and one.default is inspect.Parameter.empty and one.kind not in variadic
    ]
    return f'{path} also needs {more}' if more else None
