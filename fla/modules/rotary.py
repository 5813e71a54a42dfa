"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import nn

from fla.modules.checks import check_dims, check_floating, check_int, check_shape, check_written, require
from fla.modules.on_triton import on_triton
from fla.ops.backends import check_tensors, dispatch
from fla.ops.common.checks import check_cu_seqlens, check_given
from fla.ops.common.gates import wide


def rotary_embedding_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first R of D channels, pair by pair: `(a, b) -> (a cos - b sin, a sin + b cos)`.

    Args:
        x: `[B, T, H, D]`.
        cos, sin: `[T, R / 2]` or `[B, T, R / 2]`.
        interleaved: pairs are neighbours; otherwise channel i is paired with i + R / 2.

    Returns:
        A tensor like x; in between at least float32.
    """
    cos, sin = (wide(table).unsqueeze(-2) for table in (cos, sin))
    rotated = 2 * cos.shape[-1]
    pairs, rest = wide(x[..., :rotated]), x[..., rotated:]
    if interleaved:
        a, b = pairs[..., 0::2], pairs[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = pairs.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def _check(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    inplace: bool,
    seqlen_offsets: int | torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    check_values: bool,
) -> None:
    check_given(x=x, cos=cos, sin=sin)
    check_floating(x=x, cos=cos, sin=sin)
    check_tensors(x=x, cu_seqlens=cu_seqlens)
    if x.dim() != 4:
        raise ValueError(f'x must be [B, T, H, D], got shape {list(x.shape)}')
    check_dims('cos', cos, 2, '[S, R / 2]')
    check_shape('cos', cos, cos.shape[:2], '[S, R / 2]')
    check_shape('sin', sin, cos.shape, 'shaped like cos')
    if 2 * cos.shape[1] > x.shape[3]:
        raise ValueError(f'cos [S, R / 2] turns R = {2 * cos.shape[1]} channels, but x has D = {x.shape[3]}')
    if inplace:
        check_written('x', x)
    count = check_cu_seqlens(x, cu_seqlens, None, check_values)
    if isinstance(seqlen_offsets, torch.Tensor):
        check_tensors(x=x, seqlen_offsets=seqlen_offsets)
        check_shape('seqlen_offsets', seqlen_offsets, (count,), 'an int or a tensor [N]')
        if seqlen_offsets.dtype not in (torch.int32, torch.int64):
            raise TypeError(f'seqlen_offsets must be int32 or int64, got {seqlen_offsets.dtype}')
    else:
        check_int('seqlen_offsets', seqlen_offsets)
        if cu_seqlens is None and not 0 <= seqlen_offsets <= cos.shape[0] - x.shape[1]:
            raise ValueError(
                f'cos has S = {cos.shape[0]} rows, too few for T = {x.shape[1]} steps from position '
                f'seqlen_offsets = {seqlen_offsets} on'
            )
    if x.shape[1] and not cos.shape[0]:
        raise ValueError(f'cos has S = 0 rows, too few for T = {x.shape[1]} steps')
    if check_values and x.shape[1]:
        last = positions(x, seqlen_offsets, cu_seqlens).aminmax()
        if last.min < 0 or last.max >= cos.shape[0]:
            raise ValueError(f'cos has S = {cos.shape[0]} rows, but positions go from {last.min} to {last.max}')


def _fixed_tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[bool, str | None]:
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return False, 'the Triton kernel has no gradient of cos and sin'
    return True, None


@dispatch('modules', check=_check, default_verifier=(on_triton('x'), _fixed_tables), mutates=('x',))
def rotary_embedding(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate the first R of D channels by the angles of each step's position, in at least float32 and rounded once.

    Args:
        x: `[B, T, H, D]`, float16, bfloat16, float32 or float64.
        cos, sin: `[S, R / 2]`, R at most D: a row for each position, any floating dtype. On the device nothing reads past
            them: a position beyond gets the nearest row.
        interleaved: pairs are neighbours; otherwise channel i is paired with i + R / 2.
        inplace: write into x and return it. Where x needs a gradient, that takes a copy.
        seqlen_offsets: position of each sequence's first step: one for all, or a tensor `[N]`, int32 or int64.
        cu_seqlens: `[N + 1]`, int32 or int64: packed sequences, with B == 1.

    Returns:
        A tensor like x, or x.

    Raises:
        TypeError, ValueError: for arguments that do not fit, before any backend is asked.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv 2104.09864.
    """
    require('rotary_embedding', x=x, cos=cos, sin=sin)
    from fla.modules.kernels import rotary

    return rotary.rotary_embedding(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens)


def positions(x: torch.Tensor, offsets: int | torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """The position of each step of x `[B, T, ...]` in its sequence: `[T]`, or `[B, T]` with a tensor of offsets."""
    if cu_seqlens is None and not isinstance(offsets, torch.Tensor):
        return torch.arange(offsets, offsets + x.shape[1], device=x.device)
    time = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is None:
        assert isinstance(offsets, torch.Tensor)
        return time + offsets[:, None]
    count = cu_seqlens.shape[0] - 1
    if count == 0:
        return time
    # clamped for the sake of bad values alone
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), time.to(cu_seqlens.dtype), right=True).clamp(max=count - 1)
    return time - cu_seqlens[sequence] + (offsets[sequence] if isinstance(offsets, torch.Tensor) else offsets)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of queries and keys.

    The angle of channel pair i at position p is `p base^(-2i / dim)`, in float32. Angles are computed at each call, for the
    positions at hand alone: there is no table to grow, to cast with the model or to copy between devices.

    Args:
        dim: R, how many channels are rotated; even.
        base: of the frequencies.
        scale_base: must be None: there are no scaled (xPos) rotations.
        interleaved: pairs are neighbours; otherwise channel i is paired with i + R / 2.
        pos_idx_in_fp32, device: for callers of flash-linear-attention's class; without effect, as positions are always in
            float32, and nothing is kept on a device.

    Raises:
        ValueError: for an odd or negative dim, or a scale_base.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        scale_base: float | None = None,
        interleaved: bool = False,
        pos_idx_in_fp32: bool = True,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        if dim < 0 or dim % 2:
            raise ValueError(f'dim must be even and not negative, got {dim}')
        if scale_base is not None:
            raise ValueError(f'scale_base must be None, as scaled (xPos) rotations are not implemented, got {scale_base}')
        self.dim, self.base, self.interleaved = dim, base, interleaved

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        seqlen_offset: int | torch.Tensor = 0,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        *,
        position_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate.

        Args:
            q: `[B, T, HQ, D]`; k: `[B, T, H, D]`, D at least `dim`.
            seqlen_offset: position of each sequence's first step: one for all, or a tensor `[N]`.
            cu_seqlens: `[N + 1]`: packed sequences, with B == 1.
            max_seqlen: for callers of flash-linear-attention's class; without effect, as there is no table to fill.
            position_ids: `[B, T]`, instead of seqlen_offset and cu_seqlens.

        Returns:
            q and k, rotated; new tensors.

        Raises:
            TypeError, ValueError: for arguments that do not fit.
        """
        check_given(q=q, k=k)
        check_tensors(q=q, k=k, cu_seqlens=cu_seqlens, position_ids=position_ids)
        check_shape('k', k, (*q.shape[:2], *k.shape[2:]), 'of the batch and time of q, [B, T, H, D]')
        check_shape('position_ids', position_ids, q.shape[:2], '[B, T]')
        place = positions(q, seqlen_offset, cu_seqlens) if position_ids is None else position_ids
        half = self.dim // 2
        # base^(-2i / dim) in one launch; whole positions are made float32 by the product itself
        powers = torch.logspace(0, -(half - 1) / max(half, 1), half, self.base, dtype=torch.float32, device=q.device)
        angles = (place.float() if place.is_floating_point() else place).reshape(-1, 1) * powers
        cos, sin = angles.cos(), angles.sin()
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """With a row for each step of one sequence, or of all sequences."""
        if cos.shape[0] == x.shape[1]:
            return rotary_embedding(x, cos, sin, self.interleaved)
        packed = rotary_embedding(x.flatten(0, 1)[None], cos, sin, self.interleaved)
        return packed.reshape(x.shape)

    def extra_repr(self) -> str:
        return f'{self.dim}, base={self.base}, interleaved={self.interleaved}'
