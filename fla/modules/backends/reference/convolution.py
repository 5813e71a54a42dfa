"""Plain PyTorch: short convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fla.modules.backends.reference.overwrite import overwrite
from fla.ops.recurrence.gates import wide


class ReferenceConvolution:
    """Methods of `ModulesReference` for short convolutions."""

    def causal_conv1d(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        activation: str | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        width = weight.shape[1]
        before = None if initial_state is None else initial_state.transpose(1, 2)
        # x is widened before it is sliced, so that its gradients are summed in float32
        if cu_seqlens is None:
            history = x.new_zeros(x.shape[0], width, x.shape[2]) if before is None else before
            inputs = torch.cat([history, wide(x)], 1)
            taps = [inputs[:, 1 + w : 1 + w + x.shape[1]] for w in range(width)]
            final = inputs[:, x.shape[1] :]
        else:
            taps, final = _packed_taps(wide(x), before, cu_seqlens, width)
        y = _filter(taps, weight, bias, activation)
        y = (y if residual is None else y + wide(residual)).to(x.dtype)
        if not output_final_state:
            return y.contiguous(), None
        dtype = x.dtype if initial_state is None else initial_state.dtype
        # a copy: the caller may update it in place
        return y.contiguous(), final.transpose(1, 2).to(dtype).clone(memory_format=torch.contiguous_format)

    def causal_conv1d_update(
        self,
        x: torch.Tensor,
        cache: torch.Tensor,
        residual: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert weight is not None  # checked
        now = x.flatten(0, -2)[..., None]
        inputs = torch.cat([cache[..., 1:], now.to(cache.dtype)], -1)
        # the sum uses x itself, not x rounded to the cache's dtype
        taps = [*(inputs[..., w] for w in range(weight.shape[1] - 1)), now[..., 0]]
        y = _filter(taps, weight, bias, activation).reshape(x.shape)
        y = (y if residual is None else y + wide(residual)).to(x.dtype)
        # last, so that a failed call changes nothing
        overwrite(cache, inputs)
        return y, cache


def _filter(
    taps: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """The sum of taps, each `[..., D]`, weighted by the columns of the weight."""
    # Rows of a contiguous [W, D] instead of strided columns: 4.8 ms instead of 18 for x [1, 1024, 1536] on one core.
    # F.conv1d, which needs the channels first, takes 15 ms.
    rows = wide(weight).t().contiguous()
    y = wide(taps[0]) * rows[0]
    for tap, row in zip(taps[1:], rows[1:], strict=True):
        y = torch.addcmul(y, wide(tap), row)
    y = y if bias is None else y + wide(bias)
    return y if activation is None else F.silu(y)


def _packed_taps(
    x: torch.Tensor, before: torch.Tensor | None, cu_seqlens: torch.Tensor, width: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """For packed sequences, the W taps `[1, T, D]` of the filter's columns, and the last W steps of each sequence,
    `[N, W, D]`. Indices are computed on the device; bad `cu_seqlens` give wrong values, but no reads out of bounds."""
    length, count = x.shape[1], cu_seqlens.shape[0] - 1
    # rows to pick from: the steps, then those of the initial states, then a row of zeros
    steps = [x[0], x.new_zeros(1, x.shape[2])]
    if before is not None:
        steps.insert(1, before.reshape(count * width, x.shape[2]))
    rows = torch.cat(steps)
    lens = cu_seqlens.long().clamp(0, length)
    start, end = lens[:-1], lens[1:]
    sequences = torch.arange(count, device=x.device)

    def pick(sequence: torch.Tensor, first: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Step `step` of a sequence that begins at `first`; negative steps come from its initial state."""
        if before is None:
            past = torch.full_like(step, rows.shape[0] - 1)
        else:
            past = length + sequence * width + (width + step).clamp(0, width - 1)
        return rows[torch.where(step >= 0, (first + step).clamp(max=max(length - 1, 0)), past)]

    time = torch.arange(length, device=x.device)
    # the clamp matters only for unsorted cu_seqlens
    sequence = (torch.searchsorted(end.contiguous(), time, right=True)).clamp(max=max(count - 1, 0))
    first = start[sequence]
    step = time - first
    # the current step is always in its own sequence, and needs no index
    taps = [pick(sequence, first, step - (width - 1 - w))[None] for w in range(width - 1)]
    last = (end - start)[:, None] - width + torch.arange(width, device=x.device)
    return [*taps, x], pick(sequences[:, None], start[:, None], last)
