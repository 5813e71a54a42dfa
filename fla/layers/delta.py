"""What the layers around a gated delta rule share: projections, short convolutions, cache, padding, gated norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fla.backends.core.tensors import in_func_transform
from fla.layers.cache import Cache, LayerState, check_cache, check_rows, check_state
from fla.layers.checks import check_hidden
from fla.layers.padding import Packing
from fla.modules.checks import check_finite, check_int, check_sizes
from fla.modules.convolution import ShortConvolution, changes_cache
from fla.ops.checks import MAX_HEAD_DIM


class DeltaLayer(nn.Module):
    """Base of the layers. A subclass adds the projections of gate and output gate, and names its operation."""

    # Looked up on the class, so that functions do not become methods.
    chunk: ClassVar[Callable[..., Any]]
    fused_recurrent: ClassVar[Callable[..., Any]]
    # Decays begin as -A softplus(raw + dt_bias), A between this and 16.
    least_A: ClassVar[float]
    # Modules of the subclass.
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
        biases_of_head: int,
    ) -> None:
        super().__init__()
        if mode not in ('chunk', 'fused_recurrent'):
            raise ValueError(f"mode must be 'chunk' or 'fused_recurrent', got {mode!r}")
        self.hidden_size, self.mode, self.layer_idx = hidden_size, mode, layer_idx
        self.num_heads, self.num_v_heads = num_heads, num_heads if num_v_heads is None else num_v_heads
        check_sizes(hidden_size=hidden_size, head_dim=head_dim, num_heads=num_heads, num_v_heads=self.num_v_heads)
        check_sizes(conv_size=conv_size)
        check_finite('expand_v', expand_v)
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
        # Wider heads of v than the operation takes are several, of the same decays and beta: columns of a state do not mix.
        widest = next(n for n in range(MAX_HEAD_DIM, 0, -1) if self.head_v_dim % n == 0)
        self._parts = self.head_v_dim // widest
        self.key_dim, self.value_dim = num_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        self.use_short_conv, self.allow_neg_eigval = use_short_conv, allow_neg_eigval

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
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads * biases_of_head, dtype=torch.float32))
        self.reset_parameters()
        self._mark()

    def reset_parameters(self) -> None:
        """Draw the layer's own parameters, as whoever makes it on the meta device needs to: A_log `[HV]`, of A uniform
        between `least_A` and 16, and dt_bias, such that softplus(dt_bias) is spread evenly, in logarithm, between 0.001 and
        0.1.

        Source: Dao and Gu 2024, "Transformers are SSMs" (Mamba-2), arXiv 2405.21060.
        """
        with torch.no_grad():
            self.A_log.uniform_(self.least_A, 16).log_()
            dt = self.dt_bias.uniform_(math.log(0.001), math.log(0.1)).exp_()
            # the inverse of softplus
            dt.add_(dt.neg().expm1().neg().log())

    def _mark(self) -> None:
        """`_no_weight_decay`, which optimizers' grouping looks for."""
        for name in ('A_log', 'dt_bias'):
            parameter = self._parameters.get(name)
            if parameter is not None:
                parameter._no_weight_decay = True  # type: ignore[attr-defined]

    # Where PyTorch puts new parameters in place of these, they lack the marks.

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DeltaLayer:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._mark()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()

    def raw_gate(self, x: torch.Tensor) -> torch.Tensor:
        """The gate's raw values for x `[B, T, hidden]`, shaped as the operation wants them."""
        raise NotImplementedError

    def output_gate(self, x: torch.Tensor) -> torch.Tensor | None:
        """The raw output gate `[B, T, value_dim]`, or None."""
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
            attention_mask: `[B, S]`, 1 for steps and 0 for padding anywhere, not negative; the last T columns are of
                `hidden_states`. Padding changes no state, and gets zeros out. Costs a wait for the device, or in compiled
                code and in a CUDA graph capture the work on padding, or, where one step goes on from states, some small
                launches; where no new step is padding, as in generation, it may be left out.
            past_key_values: the states to go on from, updated in place.
            use_cache: with no `past_key_values`, make a new cache.
            output_attentions: must be False; there are no attention weights.
            cu_seqlens: `[N + 1]`, int32 or int64: packed sequences, with B == 1.

        Returns:
            The output `[B, T, hidden_size]`, None, and the cache or None.

        Raises:
            TypeError, ValueError: for arguments that do not fit.
        """
        if output_attentions:
            raise ValueError('output_attentions: a linear recurrence has no attention weights; pass False')
        check_hidden(hidden_states, self.hidden_size, attention_mask, cu_seqlens)
        if past_key_values is None and use_cache:
            past_key_values = Cache()
        check_cache(past_key_values, self.layer_idx)

        batch, length = hidden_states.shape[:2]
        state = None if past_key_values is None or self.layer_idx is None else past_key_values[self.layer_idx]
        if state is not None:
            check_rows(state, batch if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        packing = padding = None
        if attention_mask is not None:
            if length == 1 and state is not None and state.recurrent is not None:
                padding = attention_mask[:, -1:, None] == 0
            else:
                packing = Packing.of(attention_mask[:, attention_mask.shape[1] - length :])
                hidden_states, cu_seqlens = packing.pack(hidden_states), packing.cu_seqlens
        out = self._mix(hidden_states, state, cu_seqlens, packing, padding, decoding=length == 1)
        if state is not None:
            state.length += length
        return out if packing is None else packing.unpack(out), None, past_key_values

    def _mix(
        self,
        x: torch.Tensor,
        state: LayerState | None,
        cu_seqlens: torch.Tensor | None,
        packing: Packing | None,
        padding: torch.Tensor | None,
        decoding: bool,
    ) -> torch.Tensor:
        """The layer on steps `[B, T, hidden]`, of which those of `padding` `[B, 1, 1]` are none."""
        batch, length = x.shape[:2]
        if padding is not None:
            x = x.masked_fill(padding, 0.0)
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d) if self.use_short_conv else ()
        if state is not None:
            check_state(
                state,
                self.layer_idx,
                x.device,
                recurrent=[(self.num_v_heads * self._parts, self.head_k_dim, self.head_v_dim // self._parts)],
                conv=[(y.shape[2], one.kernel_size[0]) for y, one in zip(projected, convolutions, strict=False)],
            )
        conv: tuple[Any, ...] | None = None
        if self.use_short_conv:
            before: tuple[torch.Tensor | None, ...] = (None, None, None)
            if state is not None and state.conv is not None:
                before = state.conv if packing is None else tuple(packing.states(past) for past in state.conv)
            results = []
            for convolution, y, past in zip(convolutions, projected, before, strict=True):
                if state is not None and past is not None and padding is None and changes_cache(y, past, cu_seqlens):
                    # until the recurrence has taken the step too; of a transform PyTorch refuses it, and writes nothing
                    state.torn |= not in_func_transform()
                results.append(_convolved(convolution, y, past, state is not None, cu_seqlens, padding))
            (q, k, v), conv = (y for y, _ in results), tuple(after for _, after in results)
        else:
            q, k, v = (F.silu(y) for y in projected)
        gate, beta = self.raw_gate(x), self.b_proj(x)
        if padding is not None:
            # a decay of 1 and a beta of 0 leave the state as it is
            beta = beta.masked_fill(padding, -math.inf)
            gate = gate.masked_fill(padding if gate.dim() == 3 else padding[..., None], -math.inf)

        initial = None if state is None else state.recurrent
        if initial is not None and initial.dtype != v.dtype:
            initial = initial.float()  # float64 of a layer that was made narrower since
        if packing is not None:
            initial = packing.states(initial)
        gate, beta, A_log, dt_bias = self._for_parts(gate, beta)
        recurrence = type(self).fused_recurrent if decoding or self.mode == 'fused_recurrent' else type(self).chunk
        o, final = recurrence(
            q.view(batch, length, self.num_heads, self.head_k_dim),
            k.view(batch, length, self.num_heads, self.head_k_dim),
            v.view(batch, length, self.num_v_heads * self._parts, self.head_v_dim // self._parts),
            g=gate,
            beta=beta,
            initial_state=initial,
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
        if state is not None and packing is not None:
            final, conv = packing.of_rows(final), conv and tuple(packing.of_rows(after) for after in conv)
        if state is not None:
            state.conv, state.recurrent, state.torn = conv, final, False
        return out if padding is None else out.masked_fill(padding, 0.0)

    def _for_parts(self, gate: torch.Tensor, beta: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gate and beta `[B, T, HV, ...]`, A_log and dt_bias, of each part of a head of v."""
        given = gate, beta, self.A_log, self.dt_bias
        if self._parts == 1:
            return given
        dt_bias = self.dt_bias.view(self.num_v_heads, -1).repeat_interleave(self._parts, 0).flatten()
        return (
            *(x.repeat_interleave(self._parts, 2) for x in given[:2]),
            self.A_log.repeat_interleave(self._parts),
            dt_bias,
        )


def _convolved(
    convolution: ShortConvolution,
    x: torch.Tensor,
    before: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
    padding: torch.Tensor | None,
) -> tuple[torch.Tensor, Any]:
    """x convolved, and the steps to go on from, which padding leaves as they were."""
    if padding is None or before is None:
        y, after = convolution(x, cache=before, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
        return y, after
    # a step is taken in place
    y, after = convolution(x, cache=before.clone(), output_final_state=output_final_state)
    return y, torch.where(padding, before, after)


__all__ = ['DeltaLayer']
