"""The base of the layers around a gated delta rule: projections, short convolutions, cache, padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fla.backends.core.tensors import in_func_transform
from fla.layers.cache import Cache, LayerState
from fla.layers.checks import StateSizes, cache_and_state, check_call, check_state
from fla.layers.padding import Packing
from fla.modules.checks import check_eps, check_finite, check_int, check_sizes
from fla.modules.convolution import ShortConvolution, changes_cache
from fla.ops.checks import MAX_HEAD_DIM


class DeltaLayer(nn.Module):
    """Base class. A subclass names its operation, and adds the gated norm and the projections of both gates."""

    # Functions of the operation. They are read from the class, where they are not methods.
    chunk: ClassVar[Callable[..., Any]]
    fused_recurrent: ClassVar[Callable[..., Any]]
    # Initial log decays are -A softplus(raw + dt_bias), with A drawn between `min_A` and 16.
    min_A: ClassVar[float]
    # Made by the subclass.
    o_norm: nn.Module

    def __init__(
        self,
        hidden_size: int,
        expand_v: float,
        head_dim: int,
        num_heads: int,
        num_v_heads: int | None,
        mode: str,
        use_short_conv: bool,
        allow_neg_eigval: bool,
        conv_size: int,
        conv_bias: bool,
        layer_idx: int | None,
        norm_eps: float,
        *,
        dt_biases_per_head: int,
    ) -> None:
        super().__init__()
        if mode not in ('chunk', 'fused_recurrent'):
            raise ValueError(f"mode must be 'chunk' or 'fused_recurrent', got {mode!r}")
        self.hidden_size, self.mode, self.layer_idx = hidden_size, mode, layer_idx
        self.num_heads, self.num_v_heads = num_heads, num_heads if num_v_heads is None else num_v_heads
        check_sizes(hidden_size=hidden_size, head_dim=head_dim, num_heads=num_heads, num_v_heads=self.num_v_heads)
        check_sizes(conv_size=conv_size)
        check_finite('expand_v', expand_v)
        check_eps(norm_eps, 'norm_eps')
        if layer_idx is not None:
            check_int('layer_idx', layer_idx)
        if self.num_v_heads % num_heads:
            raise ValueError(f'num_v_heads must be a multiple of num_heads = {num_heads}, got {num_v_heads}')
        if not (head_dim * expand_v >= 1 and head_dim * expand_v % 1 == 0):
            raise ValueError(
                f'expand_v times head_dim = {head_dim} must be a whole number from 1 on, got expand_v = {expand_v}'
            )
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f'head_dim must be at most {MAX_HEAD_DIM}, got {head_dim}')
        self.head_k_dim, self.head_v_dim = head_dim, int(head_dim * expand_v)
        # The columns of a state do not mix. So a value head that is too wide for the operation is passed as several heads
        # with the same decay and beta.
        widest = next(n for n in range(MAX_HEAD_DIM, 0, -1) if self.head_v_dim % n == 0)
        self._parts_per_head = self.head_v_dim // widest
        self.key_dim, self.value_dim = num_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        self.use_short_conv, self.allow_neg_eigval = use_short_conv, allow_neg_eigval
        self._state_sizes: StateSizes = {
            'recurrent': ((self.num_v_heads * self._parts_per_head, self.head_k_dim, widest),),
            'conv': tuple((dim, conv_size) for dim in (self.key_dim, self.key_dim, self.value_dim) if use_short_conv),
        }

        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias, 'silu')
            self.k_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias, 'silu')
            self.v_conv1d = ShortConvolution(self.value_dim, conv_size, conv_bias, 'silu')
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads * dt_biases_per_head, dtype=torch.float32))
        self.reset_parameters()
        self._mark_no_weight_decay()

    def reset_parameters(self) -> None:
        """Draw `A_log` and `dt_bias`; needed after the layer was made on the meta device.

        exp(A_log) is uniform between `min_A` and 16. softplus(dt_bias) is log-uniform between 0.001 and 0.1.

        Source: Dao and Gu 2024, "Transformers are SSMs" (Mamba-2), arXiv 2405.21060.
        """
        with torch.no_grad():
            self.A_log.uniform_(self.min_A, 16).log_()
            dt = self.dt_bias.uniform_(math.log(0.001), math.log(0.1)).exp_()
            # the inverse of softplus
            dt.add_(dt.neg().expm1().neg().log())

    def _mark_no_weight_decay(self) -> None:
        """Set `_no_weight_decay`, by which optimizers group parameters."""
        for name in ('A_log', 'dt_bias'):
            parameter = self._parameters.get(name)
            if parameter is not None:
                parameter._no_weight_decay = True  # type: ignore[attr-defined]

    # The following methods of nn.Module may replace the parameters, which loses the marks.

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DeltaLayer:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark_no_weight_decay()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._mark_no_weight_decay()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark_no_weight_decay()

    def raw_gate(self, x: torch.Tensor) -> torch.Tensor:
        """The raw decay gate for x `[B, T, hidden_size]`: `[B, T, HV]`, or `[B, T, HV, K]` with a decay per channel."""
        raise NotImplementedError

    def output_gate(self, x: torch.Tensor) -> torch.Tensor | None:
        """The raw output gate `[B, T, HV * V]`, or None for none."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None, Cache | None]:
        """Mix the steps of each sequence.

        Args:
            hidden_states: `[B, T, hidden_size]`.
            attention_mask: `[B, S]` with S at least T, 1 for steps and 0 for padding anywhere, not negative; its last T
                columns belong to `hidden_states`. Padding does not change the state, and its output is zero. A batch with a
                mask is packed, for which the host waits for the device; compiled code and CUDA graph captures compute the
                padding instead. A single step from a cached state needs neither, only some small launches. The mask may be
                omitted if no new step is padding, as in generation.
            past_key_values: the states to continue from, updated in place.
            use_cache: whether to make a new cache if `past_key_values` is None.
            output_attentions: must be False; there are no attention weights.
            cu_seqlens: `[N + 1]`, int32 or int64: packed sequences, with B == 1.

        Returns:
            The output `[B, T, hidden_size]`, None, and the cache or None.

        Raises:
            TypeError, ValueError: for arguments that do not fit.
        """
        check_call(hidden_states, self.hidden_size, attention_mask, cu_seqlens, output_attentions)
        cache, state = cache_and_state(past_key_values, use_cache, self.layer_idx)
        batch, length = hidden_states.shape[:2]
        if state is not None:
            rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
            check_state(state, self.layer_idx, rows, hidden_states.device, self._state_sizes)
        packing = padding = None
        if attention_mask is not None:
            if length == 1 and state is not None and state.recurrent is not None:
                padding = attention_mask[:, -1:, None] == 0
            else:
                packing = Packing.from_mask(attention_mask[:, attention_mask.shape[1] - length :])
                hidden_states, cu_seqlens = packing.pack(hidden_states), packing.cu_seqlens
        out = self._mix(hidden_states, state, cu_seqlens, packing, padding, decoding=length == 1)
        if state is not None:
            state.length += length
        return out if packing is None else packing.unpack(out), None, cache

    def _mix(
        self,
        x: torch.Tensor,
        state: LayerState | None,
        cu_seqlens: torch.Tensor | None,
        packing: Packing | None,
        padding: torch.Tensor | None,
        decoding: bool,
    ) -> torch.Tensor:
        """The output for x `[B, T, hidden_size]`; updates the state. `padding` `[B, 1, 1]` marks steps that are padding."""
        batch, length = x.shape[:2]
        if padding is not None:
            x = x.masked_fill(padding, 0.0)
        (q, k, v), conv = self._project(x, state, cu_seqlens, packing, padding)
        gate, beta = self.raw_gate(x), self.b_proj(x)
        if padding is not None:
            # a decay of 1 and a beta of 0 leave the state unchanged
            beta = beta.masked_fill(padding, -math.inf)
            gate = gate.masked_fill(padding if gate.dim() == 3 else padding[..., None], -math.inf)
        initial = None if state is None else state.recurrent
        if initial is not None and initial.dtype != v.dtype:
            initial = initial.float()  # float64 from before the layer was converted to a narrower dtype
        gate, beta, A_log, dt_bias = self._repeat_for_parts(gate, beta)
        recurrence = type(self).fused_recurrent if decoding or self.mode == 'fused_recurrent' else type(self).chunk
        o, final = recurrence(
            q.view(batch, length, self.num_heads, self.head_k_dim),
            k.view(batch, length, self.num_heads, self.head_k_dim),
            v.view(batch, length, self.num_v_heads * self._parts_per_head, self.head_v_dim // self._parts_per_head),
            g=gate,
            beta=beta,
            initial_state=initial if packing is None else packing.pack_states(initial),
            output_final_state=state is not None,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            cu_seqlens=cu_seqlens,
            A_log=A_log,
            dt_bias=dt_bias,
        )
        o = o.view(batch, length, self.num_v_heads, self.head_v_dim)
        output_gate = self.output_gate(x)
        o = self.o_norm(o) if output_gate is None else self.o_norm(o, output_gate.view(o.shape))
        out: torch.Tensor = self.o_proj(o.reshape(batch, length, self.value_dim))
        if state is not None:
            if packing is not None:
                final, conv = packing.unpack_states(final), conv and tuple(packing.unpack_states(x) for x in conv)
            state.conv, state.recurrent, state.torn = conv, final, False
        return out if padding is None else out.masked_fill(padding, 0.0)

    def _project(
        self,
        x: torch.Tensor,
        state: LayerState | None,
        cu_seqlens: torch.Tensor | None,
        packing: Packing | None,
        padding: torch.Tensor | None,
    ) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...] | None]:
        """q, k and v, projected and convolved, and the last steps before each convolution, for the cache."""
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if not self.use_short_conv:
            return tuple(F.silu(y) for y in projected), None
        before: tuple[torch.Tensor | None, ...] = (None, None, None)
        if state is not None and state.conv is not None:
            before = state.conv if packing is None else tuple(packing.pack_states(past) for past in state.conv)
        results = []
        convolutions = self.q_conv1d, self.k_conv1d, self.v_conv1d
        for convolution, y, past in zip(convolutions, projected, before, strict=True):
            if state is not None and past is not None and padding is None and changes_cache(y, past, cu_seqlens):
                # until the recurrence has taken the step too; in a torch.func transform PyTorch refuses to write at all
                state.torn |= not in_func_transform()
            results.append(_convolve(convolution, y, past, state is not None, cu_seqlens, padding))
        return tuple(y for y, _ in results), tuple(after for _, after in results)

    def _repeat_for_parts(self, gate: torch.Tensor, beta: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gate and beta `[B, T, HV, ...]`, A_log and dt_bias, repeated for each part of a value head."""
        parts = self._parts_per_head
        if parts == 1:
            return gate, beta, self.A_log, self.dt_bias
        dt_bias = self.dt_bias.view(self.num_v_heads, -1).repeat_interleave(parts, 0).flatten()
        gate, beta = (x.repeat_interleave(parts, 2) for x in (gate, beta))
        return gate, beta, self.A_log.repeat_interleave(parts), dt_bias


def _convolve(
    convolution: ShortConvolution,
    x: torch.Tensor,
    before: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
    padding: torch.Tensor | None,
) -> tuple[torch.Tensor, Any]:
    """x convolved, and the steps to continue from, which padding leaves unchanged."""
    if padding is None or before is None:
        y, after = convolution(x, cache=before, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
        return y, after
    # a copy, because a single step is written in place
    y, after = convolution(x, cache=before.clone(), output_final_state=output_final_state)
    return y, torch.where(padding, before, after)


__all__ = ['DeltaLayer']
