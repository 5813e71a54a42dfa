"""Stand-ins for vendors' packages of attention: each takes what is assumed of the package, checks what its kernels rely on,
and computes the formula."""

import sys
import types

import torch

from fla.ops.attn.backends.flash_attn import FlashAttention2Backend, FlashAttention3Backend
from fla.ops.attn.backends.flashinfer import FlashInferBackend
from fla.ops.attn.backends.varlen import TorchVarlenBackend
from fla.ops.attn.backends.xformers import XFormersBackend
from fla.ops.attn.naive import naive_parallel_attn
from tests.ops.vendors import H100, metadata, on_16, pretend, takes


def attention(q, k, v, scale, window, cu_seqlens=None):
    assert on_16(q, k, v)
    assert scale is None or scale > 0  # other scales turn masked scores into NaN
    return naive_parallel_attn(q, k, v, None, scale, window, cu_seqlens)


def packed(q, k, v, scale, window, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    # a kernel does not check them
    assert cu_seqlens_q[0] >= 0
    assert cu_seqlens_q[-1] <= q.shape[0]
    assert (cu_seqlens_q.diff() >= 0).all()
    assert max_seqlen_q == max_seqlen_k
    assert cu_seqlens_q.diff().max() <= max_seqlen_q
    return attention(q[None], k[None], v[None], scale, window, cu_seqlens_q)[0]


def steps(window_size):
    """The number of steps that a query sees, from a window that does not count the query."""
    left, right = window_size
    assert right == 0
    return None if left == -1 else left + 1


def untouched(*values):
    """Asserts that arguments which backends never pass have their defaults."""
    assert set(values) <= {None, 0.0, 1}


@takes('flash_attn.flash_attn_func')
def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
):
    assert causal
    assert deterministic
    untouched(dropout_p, softcap, alibi_slopes)
    return attention(q, k, v, softmax_scale, steps(window_size))


@takes('flash_attn.flash_attn_varlen_func')
def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
):
    assert causal
    assert deterministic
    untouched(dropout_p, softcap, alibi_slopes)
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return packed(q, k, v, softmax_scale, steps(window_size), *ends)


@takes('flash_attn_interface.flash_attn_func')
def flash_attn_3_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
):
    assert causal
    assert deterministic
    untouched(qv, q_descale, k_descale, v_descale, attention_chunk, softcap, num_splits, pack_gqa)
    o = attention(q, k, v, softmax_scale, steps(window_size))
    return o, o[..., 0]


@takes('flash_attn_interface.flash_attn_varlen_func')
def flash_attn_3_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
):
    assert causal
    assert deterministic
    untouched(seqused_q, seqused_k, qv, q_descale, k_descale, v_descale, attention_chunk, softcap, num_splits, pack_gqa)
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    o = packed(q, k, v, softmax_scale, steps(window_size), *ends)
    return o, o[..., 0]


@takes('flashinfer.single_prefill_with_kv_cache')
def single_prefill_with_kv_cache(
    q,
    k,
    v,
    scale_q=None,
    scale_k=None,
    scale_v=None,
    o_dtype=None,
    custom_mask=None,
    packed_custom_mask=None,
    causal=False,
    kv_layout='NHD',
    pos_encoding_mode='NONE',
    use_fp16_qk_reduction=False,
    sm_scale=None,
    window_left=-1,
):
    assert causal
    assert (kv_layout, pos_encoding_mode, use_fp16_qk_reduction) == ('NHD', 'NONE', False)
    untouched(scale_q, scale_k, scale_v, o_dtype, custom_mask, packed_custom_mask)
    assert all(x.is_contiguous() for x in (q, k, v))
    return attention(q[None], k[None], v[None], sm_scale, steps((window_left, 0)))[0]


class LowerTriangularMask:
    window = None


class LowerTriangularFromBottomRightMask:
    window = None

    @takes('xformers.ops.fmha.attn_bias.LowerTriangularFromBottomRightMask.make_local_attention')
    def make_local_attention(self, window_size):
        made = type(self)()
        made.window = window_size
        return made


@takes('xformers.ops.memory_efficient_attention')
def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None):
    untouched(p)
    if query.dim() == 5:  # [B, T, groups, heads of a group, K]
        shape = query.shape[2:4]
        assert key.shape[2:4] == value.shape[2:4] == shape
        q, k, v = (x.flatten(2, 3) for x in (query, key, value))
        return memory_efficient_attention(q, k, v, attn_bias, p, scale).unflatten(2, shape)
    assert key.shape[2] == query.shape[2]
    if type(attn_bias) is LowerTriangularMask:
        assert key.shape[1] == query.shape[1]
    return attention(query, key, value, scale, attn_bias.window)


@takes('torch.nn.attention.varlen.varlen_attn')
def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return packed(query, key, value, scale, steps(window_size), cu_seq_q, cu_seq_k, max_q, max_k)


BACKENDS = {
    'flash_attn': FlashAttention2Backend,
    'flash_attn_3': FlashAttention3Backend,
    'flashinfer': FlashInferBackend,
    'xformers': XFormersBackend,
    'torch_varlen': TorchVarlenBackend,
}
PACKS = ('flash_attn', 'flash_attn_3', 'torch_varlen')
# distribution and version
DISTRIBUTIONS = {
    'flash_attn': ('flash-attn', '2.8.3'),
    'flash_attn_3': ('flash-attn-3', '3.0.0'),
    'flashinfer': ('flashinfer-python', '0.7.4'),
    'xformers': ('xformers', '0.0.35'),
}
MODULES = {
    'flash_attn': {
        'flash_attn': {'flash_attn_func': flash_attn_func, 'flash_attn_varlen_func': flash_attn_varlen_func},
    },
    'flash_attn_3': {
        'flash_attn_interface': {
            'flash_attn_func': flash_attn_3_func,
            'flash_attn_varlen_func': flash_attn_3_varlen_func,
        },
    },
    'flashinfer': {'flashinfer': {'single_prefill_with_kv_cache': single_prefill_with_kv_cache}},
    'xformers': {
        'xformers': {},
        'xformers.ops': {'memory_efficient_attention': memory_efficient_attention},
        'xformers.ops.fmha': {},
        'xformers.ops.fmha.attn_bias': {
            'LowerTriangularMask': LowerTriangularMask,
            'LowerTriangularFromBottomRightMask': LowerTriangularFromBottomRightMask,
        },
    },
    'torch_varlen': {'torch.nn.attention.varlen': {'varlen_attn': varlen_attn}},
}


def installed(monkeypatch, folder, name, device=H100, version=None):
    """Installs the stand-in, enables the backend, and emulates the GPU."""
    backend = BACKENDS[name]
    for path, contents in MODULES[name].items():
        part = types.ModuleType(path)
        part.__path__ = []
        vars(part).update(contents)
        monkeypatch.setitem(sys.modules, path, part)
    if name in DISTRIBUTIONS:
        distribution, newest = DISTRIBUTIONS[name]
        metadata(monkeypatch, folder, backend.package_name, distribution, version or newest)
    else:
        monkeypatch.setattr(backend, 'is_available', classmethod(lambda cls: (True, None)))
    monkeypatch.setenv(backend.env_var, '1')
    pretend(monkeypatch, device)
    return backend()
