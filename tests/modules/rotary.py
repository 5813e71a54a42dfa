"""The rotary embedding by its definition, over whole tensors at a time."""

import itertools

import torch


def rotated(x, cos, sin, interleaved=False, seqlen_offsets=0, cu_seqlens=None, **_):
    """Multiplies pairs of channels, as complex numbers, by those of the tables, in float64."""
    B, T = x.shape[:2]
    lengths = [T] * B if cu_seqlens is None else [b - a for a, b in itertools.pairwise(cu_seqlens.tolist())]
    offsets = seqlen_offsets.tolist() if isinstance(seqlen_offsets, torch.Tensor) else [seqlen_offsets] * len(lengths)
    places = [place for length, first in zip(lengths, offsets, strict=True) for place in range(first, first + length)]
    rows = torch.tensor(places, device=x.device, dtype=torch.int64).reshape(B, T)
    turn = torch.complex(cos.double(), sin.double())[rows][:, :, None]
    half = cos.shape[1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = turned.unflatten(-1, (half, 2)) if interleaved else turned.unflatten(-1, (2, half)).transpose(-1, -2)
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([turned, rest], -1)
