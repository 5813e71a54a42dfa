"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import nn

from fla.backends import check_tensors, dispatch
from fla.modules.checks import (
    check_dims,
    check_finite,
    check_floating,
    check_int,
    check_launchable,
    check_shape,
    check_written,
    is_dense_float,
    matches,
)
from fla.modules.on_triton import on_triton
from fla.modules.rotary.positions import positions
from fla.ops.checks import check_64_bits, check_cu_seqlens, check_given, readable
from fla.ops.recurrence.gates import wide


def rotary_embedding_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotates the first R of D channels, pair by pair: `(a, b) -> (a cos - b sin, a sin + b cos)`.

    Args:
        x: `[B, T, H, D]`.
        cos, sin: `[T, R / 2]` or `[B, T, R / 2]`.
        interleaved: pair adjacent channels; otherwise channel i is paired with i + R / 2.

    Returns:
        A tensor like x, computed in at least float32.
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


def _is_common_case(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    inplace: bool,
    seqlen_offsets: int | torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> bool:
    """Whether this is a valid call for sequences of one length that all start at one position."""
    if cu_seqlens is not None or type(seqlen_offsets) is not int or not (is_dense_float(x) and is_dense_float(cos)):
        return False
    shape, table = x.shape, cos.shape
    return (
        len(shape) == 4
        and len(table) == 2
        and 2 * table[1] <= shape[3]
        and cos.device == x.device
        and matches(sin, table, x.device)
        and 0 <= seqlen_offsets <= table[0] - shape[1]
        and (not inplace or x.is_contiguous())
    )


def _check(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    inplace: bool,
    seqlen_offsets: int | torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    check_values: bool,
) -> None:
    if _is_common_case(x, cos, sin, inplace, seqlen_offsets, cu_seqlens):
        return
    check_given(x=x, cos=cos, sin=sin)
    check_floating(x=x, cos=cos, sin=sin)
    if x.dim() != 4:
        raise ValueError(f'x must be [B, T, H, D], got shape {list(x.shape)}')
    check_dims('cos', cos, 2, '[S, R / 2]')
    check_shape('cos', cos, cos.shape[:2], '[S, R / 2]')
    check_shape('sin', sin, cos.shape, 'shaped like cos')
    if 2 * cos.shape[1] > x.shape[3]:
        raise ValueError(f'cos [S, R / 2] turns R = {2 * cos.shape[1]} channels, but x has D = {x.shape[3]}')
    if inplace:
        check_written('x', x)
    check_offsets('seqlen_offsets', x, seqlen_offsets, cu_seqlens, check_values)
    steps, rows = x.shape[1], cos.shape[0]
    if not isinstance(seqlen_offsets, torch.Tensor):
        # the length of the longest packed sequence may be known to the device only
        least = steps if cu_seqlens is None else int(steps > 0)
        if not 0 <= seqlen_offsets <= rows - least:
            raise ValueError(
                f'cos has S = {rows} rows, too few for T = {steps} steps from position seqlen_offsets = {seqlen_offsets} on'
            )
    if steps and not rows:
        raise ValueError(f'cos has S = 0 rows, too few for T = {steps} steps')
    content = [one for one in (seqlen_offsets, cu_seqlens) if isinstance(one, torch.Tensor)]
    if x.shape[0] and steps and content and (check_values or all(readable(one) for one in content)):
        last = positions(x, seqlen_offsets, cu_seqlens).aminmax()
        if last.min < 0 or last.max >= rows:
            raise ValueError(
                f'cos has S = {rows} rows, but positions go from {int(last.min)} to {int(last.max)}: '
                'seqlen_offsets must not be negative, and the tables reach to the last step'
            )


def check_offsets(
    name: str, x: torch.Tensor, offsets: int | torch.Tensor, cu_seqlens: torch.Tensor | None, check_values: bool = False
) -> None:
    """Checks `cu_seqlens` of x `[B, T, …]`, and the position of each sequence's first step: an int or a tensor `[N]`."""
    check_tensors(x=x, cu_seqlens=cu_seqlens)
    count = check_cu_seqlens(x, cu_seqlens, None, check_values)
    if not isinstance(offsets, torch.Tensor):
        check_int(name, offsets)
        return check_64_bits(f'{name} + T', offsets + x.shape[1])
    check_tensors(x=x, **{name: offsets})
    check_shape(name, offsets, (count,), 'an int or a tensor [N]')
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f'{name} must be int32 or int64, got {offsets.dtype}')


def _constant_tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[bool, str | None]:
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return False, 'the Triton kernel has no gradient of cos and sin'
    return True, None


@dispatch('modules', check=_check, default_verifier=(on_triton('x'), _constant_tables), mutates=('x',))
def rotary_embedding(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates the first R of D channels by the angles of each step's position, in at least float32 and rounded once.

    Args:
        x: `[B, T, H, D]`, float16, bfloat16, float32 or float64.
        cos, sin: `[S, R / 2]`, R at most D: one row per position, any floating dtype. On a GPU a position outside the
            tables is not an error, as reading it would synchronise; it uses the first or last row.
        interleaved: pair adjacent channels; otherwise channel i is paired with i + R / 2.
        inplace: write into x and return it. If x needs a gradient, this makes a copy.
        seqlen_offsets: position of each sequence's first step: an int for all, or a tensor `[N]`, int32 or int64.
        cu_seqlens: `[N + 1]`, int32 or int64: packed sequences, with B == 1.

    Returns:
        A tensor like x, or x.

    Raises:
        TypeError, ValueError: for invalid arguments, before any backend is tried.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv 2104.09864.
    """
    check_launchable('rotary_embedding', x=x, cos=cos, sin=sin)
    from fla.modules.kernels import rotary

    return rotary.rotary_embedding(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of queries and keys.

    The angle of channel pair i at position p is `p base^(-2i / dim)`, in float32. Each call computes the angles of its own
    positions, so no table has to grow, be cast with the model or be copied between devices.

    Args:
        dim: R, the number of rotated channels; even.
        base: base of the frequencies, above 0.
        scale_base: must be None; scaled (xPos) rotations are not implemented.
        interleaved: pair adjacent channels; otherwise channel i is paired with i + R / 2.
        pos_idx_in_fp32, device: accepted for compatibility with flash-linear-attention, without effect: positions are
            always float32, and the module has no buffers.

    Raises:
        TypeError, ValueError: for a dim that is odd, negative or not an int, a base that is not a number above 0, or a
            scale_base.
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
        check_int('dim', dim)
        if dim < 0 or dim % 2:
            raise ValueError(f'dim must be even and not negative, got {dim}')
        check_finite('base', base)
        if not base > 0:
            raise ValueError(f'base must be above 0, got {base}')
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
        """Rotates q and k by their positions.

        Args:
            q: `[B, T, HQ, D]`; k: `[B, T, H, D]`, D at least `dim`.
            seqlen_offset: position of each sequence's first step: an int for all, or a tensor `[N]`, int32 or int64. It may
                be negative.
            cu_seqlens: `[N + 1]`, int32 or int64: packed sequences, with B == 1.
            max_seqlen: accepted for compatibility with flash-linear-attention, without effect: there is no table to fill.
            position_ids: `[B, T]`, instead of seqlen_offset and cu_seqlens; integers or fractions.

        Returns:
            q and k, rotated; new tensors.

        Raises:
            TypeError, ValueError: for invalid arguments.
        """
        self._check(q, k, seqlen_offset, cu_seqlens, position_ids)
        place = positions(q, seqlen_offset, cu_seqlens) if position_ids is None else position_ids
        half = self.dim // 2
        # base^(-2i / dim) in one launch; the product converts integer positions to float32
        powers = torch.logspace(0, -(half - 1) / max(half, 1), half, self.base, dtype=torch.float32, device=q.device)
        angles = (place.float() if place.is_floating_point() else place).reshape(-1, 1) * powers
        cos, sin = angles.cos(), angles.sin()
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _is_common_case(self, q: torch.Tensor, k: torch.Tensor) -> bool:
        return (
            is_dense_float(q)
            and is_dense_float(k)
            and len(q.shape) == len(k.shape) == 4
            and q.shape[:2] == k.shape[:2]
            and q.shape[3] >= self.dim
            and k.shape[3] >= self.dim
            and q.device == k.device
        )

    def _check(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        seqlen_offset: int | torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> None:
        if type(seqlen_offset) is int and cu_seqlens is position_ids is None and self._is_common_case(q, k):
            return check_64_bits('seqlen_offset + T', seqlen_offset + q.shape[1])
        check_given(q=q, k=k)
        check_floating(q=q, k=k)
        for name, x in (('q', q), ('k', k)):
            if x.dim() != 4:
                raise ValueError(f'{name} must be [B, T, H, D], got shape {list(x.shape)}')
            if x.shape[3] < self.dim:
                raise ValueError(f'{name} must have D of at least dim = {self.dim}, got shape {list(x.shape)}')
        check_shape('k', k, (*q.shape[:2], *k.shape[2:]), 'of the batch and time of q, [B, T, H, D]')
        check_offsets('seqlen_offset', q, seqlen_offset, cu_seqlens)
        check_tensors(q=q, position_ids=position_ids)
        check_shape('position_ids', position_ids, q.shape[:2], '[B, T]')
        if position_ids is None:
            return
        if cu_seqlens is not None or isinstance(seqlen_offset, torch.Tensor) or seqlen_offset != 0:
            raise ValueError('position_ids gives every position: with it, pass no seqlen_offset and no cu_seqlens')
        if position_ids.dtype == torch.bool or position_ids.is_complex():
            raise TypeError(f'position_ids must be integers or real numbers, got {position_ids.dtype}')

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates x by tables with one row per step, of one sequence for all batch rows or of each batch row."""
        if cos.shape[0] == x.shape[1]:
            return rotary_embedding(x, cos, sin, self.interleaved)
        packed = rotary_embedding(x.flatten(0, 1)[None], cos, sin, self.interleaved)
        return packed.reshape(x.shape)

    def extra_repr(self) -> str:
        return f'{self.dim}, base={self.base}, interleaved={self.interleaved}'
