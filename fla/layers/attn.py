"""The softmax attention layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from fla.layers.cache import Cache
from fla.layers.checks import StateSizes, cache_and_state, check_call, check_state
from fla.layers.keys import append_steps
from fla.layers.padding import Packing, packs_for_attention
from fla.modules.checks import check_eps, check_finite, check_int, check_sizes
from fla.modules.layernorm import RMSNorm
from fla.modules.rotary import RotaryEmbedding
from fla.ops.attn import parallel_attn
from fla.ops.attn.cudnn import takes_cudnn
from fla.ops.attn.naive import visible
from fla.ops.checks import MAX_HEAD_DIM

# cuDNN makes a plan for each number of masked keys, so that is padded to a multiple.
KEYS_MULTIPLE = 256


class Attention(nn.Module):
    """Causal multi-head attention with grouped heads and rotary positions; optionally a window and norms of q and k.

    Args:
        hidden_size: size of the input and output.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, a divisor of `num_heads`. Default: `num_heads`.
        qkv_bias: whether the projections of q, k and v have a bias.
        qk_norm: whether each head of q and k has an RMS norm, before the rotation.
        window_size: number of steps that a query sees, itself the last. Default: all.
        rope_theta: base of the rotary frequencies, or None for no positions.
        max_position_embeddings: ignored, as there is no table of positions; accepted as in flash-linear-attention's class.
        layer_idx: the layer's index in the cache.
        head_dim: size of a head. Default: hidden_size / num_heads.
        norm_eps: eps of the norms.

    Raises:
        TypeError, ValueError: for sizes that do not fit together.

    Source: Vaswani et al. 2017, arXiv 1706.03762; Ainslie et al. 2023, "GQA", arXiv 2305.13245.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        window_size: int | None = None,
        rope_theta: float | None = 10000.0,
        max_position_embeddings: int | None = None,
        layer_idx: int | None = None,
        *,
        head_dim: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.hidden_size, self.window_size, self.layer_idx = hidden_size, window_size, layer_idx
        self.num_heads, self.num_kv_heads = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        check_sizes(hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=self.num_kv_heads)
        if window_size is not None:
            check_sizes(window_size=window_size)
        if layer_idx is not None:
            check_int('layer_idx', layer_idx)
        if num_heads % self.num_kv_heads:
            raise ValueError(f'num_heads = {num_heads} must be a multiple of num_kv_heads, got {num_kv_heads}')
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f'hidden_size = {hidden_size} must be a multiple of num_heads, got {num_heads}: pass head_dim')
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        check_sizes(head_dim=self.head_dim)
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f'head_dim must be at most {MAX_HEAD_DIM}, got {self.head_dim}: use more num_heads')
        check_eps(norm_eps, 'norm_eps')
        if rope_theta is not None:
            check_finite('rope_theta', rope_theta)
            if not rope_theta > 0:
                raise ValueError(f'rope_theta must be above 0, or None for no positions, got {rope_theta}')
            if self.head_dim % 2:
                raise ValueError(
                    f'head_dim must be even for rotary positions, got {self.head_dim}: pass another, or rope_theta=None'
                )

        self._state_sizes: StateSizes = {'keys_values': ((self.num_kv_heads, self.head_dim),) * 2}
        kv_dim = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, kv_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, kv_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else None
        self.rotary = None if rope_theta is None else RotaryEmbedding(self.head_dim, base=rope_theta)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None, Cache | None]:
        """Mix the steps of each sequence. The flags have another order than in the recurrent layers.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            attention_mask: `[B, S]`, 1 for steps and 0 for padding anywhere, not negative; S counts all steps up to now,
                cached ones included. Padding is not seen, has no position, and its output is zero. A batch with nothing
                cached is packed, for which the host waits for the device; compiled code and CUDA graph captures compute the
                padding instead. After cached steps, and in compiled code on a CPU, the call is served by PyTorch's attention
                with a mask `[B, T, S]` instead of `parallel_attn`.
            past_key_values: the keys and values to continue from, updated in place; not with `cu_seqlens`.
            output_attentions: must be False; the attention weights are not stored.
            use_cache: whether to make a new cache if `past_key_values` is None.
            cu_seqlens: `[N + 1]`, int32 or int64: packed sequences, with B == 1.

        Returns:
            The output `[B, T, hidden_size]`, None, and the cache or None.

        Raises:
            TypeError, ValueError: for arguments that do not fit.
        """
        check_call(hidden_states, self.hidden_size, attention_mask, cu_seqlens, output_attentions)
        cache, state = cache_and_state(past_key_values, use_cache, self.layer_idx)
        if cache is not None and cu_seqlens is not None:
            raise ValueError('past_key_values holds a row for each sequence: with cu_seqlens, pass none and no use_cache')
        batch, length = hidden_states.shape[:2]
        past = 0 if state is None else state.length
        if state is not None:
            check_state(state, self.layer_idx, batch, hidden_states.device, self._state_sizes)
        if attention_mask is not None and attention_mask.shape[1] != past + length:
            raise ValueError(
                f'attention_mask must have S = {past + length} columns ({past} cached and T = {length} new steps), '
                f'got {attention_mask.shape[1]}'
            )

        packing = position_ids = is_step = None
        if attention_mask is not None and past == 0 and packs_for_attention(hidden_states):
            packing = Packing.from_mask(attention_mask)
            hidden_states, cu_seqlens = packing.pack(hidden_states), packing.cu_seqlens
        elif attention_mask is not None:
            is_step = attention_mask.bool()
            hidden_states = hidden_states.masked_fill(~is_step[:, past:, None], 0.0)
            position_ids = (is_step.cumsum(1) - 1)[:, past:]
        q, k, v = self._project(hidden_states)
        if self.rotary is not None:
            offset = past if position_ids is None else 0
            q, k = self.rotary(q, k, offset, cu_seqlens, position_ids=position_ids)
        buffer = None
        if state is not None and state.keys_values is not None and past:
            (k, v), buffer = append_steps(state.keys_values, (k, v), state.buffer)
        keys_values = k, v
        # keys cached outside autocast are wider than q, and stay so in the cache
        k, v = k.to(q.dtype), v.to(q.dtype)
        if is_step is None:
            o = parallel_attn(q, k, v, window_size=self.window_size, cu_seqlens=cu_seqlens)
        else:
            o = self._attend_masked(q, k, v, is_step)
        out = self.o_proj(o.flatten(2))
        if state is not None:
            keys_values = keys_values if packing is None else (packing.unpack(k), packing.unpack(v))
            state.set_keys_values(*keys_values, buffer)
            state.length = past + length
        return out if packing is None else packing.unpack(out), None, cache

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[B, T, HQ, K]`, k and v `[B, T, H, K]`."""
        q = self.q_proj(x).view(*x.shape[:2], self.num_heads, self.head_dim)
        k = self.k_proj(x).view(*x.shape[:2], self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(*x.shape[:2], self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _attend_masked(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_step: torch.Tensor) -> torch.Tensor:
        """Attention of rows with their own padding, which `parallel_attn` has no argument for.

        `is_step` is `[B, S]`, False for padding. A window counts steps and not padding.
        """
        past = k.shape[1] - q.shape[1]
        seen = visible(q, k)[None] & is_step[:, None]
        if self.window_size is not None:
            position = is_step.cumsum(1)
            seen &= position[:, None] > position[:, past:, None] - self.window_size
        # the queries of padding see all keys: the softmax over none is NaN
        seen |= ~is_step[:, past:, None]
        mask = seen[:, None]
        if takes_cudnn(q, k, v, mask) and (more := -k.shape[1] % KEYS_MULTIPLE):
            # adds masked keys: a copy of k and v, but fewer plans
            mask = F.pad(mask, (0, more))
            k, v = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = self.num_heads != self.num_kv_heads
        if forward_ad._current_level >= 0:
            # the only one of PyTorch's kernels with a forward-mode derivative; it adds its mask
            added = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
            o: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, added, enable_gqa=grouped)[0]
        else:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        return o.transpose(1, 2).masked_fill(~is_step[:, past:, None, None], 0.0)
