"""The model: bytes in, logits of the next byte out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fla.layers import Attention, Cache, GatedDeltaNet, KimiDeltaAttention
from fla.modules import RMSNorm
from fla.modules.activations import swiglu

MIXERS = {'gated delta rule': GatedDeltaNet, 'KDA': KimiDeltaAttention, 'attention': Attention}


@dataclass(frozen=True)
class Config:
    """Sizes of the model. The defaults are for a CPU.

    Attributes:
        hidden_size: width of the residual stream.
        mixers: the token mixer of each block, a key of `MIXERS`.
        num_heads, head_dim: heads of each mixer and their width.
        dropout: on the output of each mixer and each feed-forward layer.
    """

    hidden_size: int = 128
    mixers: tuple[str, ...] = tuple(MIXERS)
    num_heads: int = 2
    head_dim: int = 32
    dropout: float = 0.0

    @classmethod
    def on(cls, device: torch.device) -> Config:
        """Returns sizes that train in a minute on the device. Vendors' kernels need heads of 128."""
        if device.type == 'cpu':
            return cls()
        return cls(hidden_size=384, mixers=tuple(MIXERS) * 2, num_heads=3, head_dim=128, dropout=0.2)


class FeedForward(nn.Module):
    """A SwiGLU feed-forward layer."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, 6 * hidden_size, bias=False)
        self.down = nn.Linear(3 * hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(swiglu(gate, value))


class Block(nn.Module):
    """A token mixer and a feed-forward layer, each with a norm before it and a residual connection."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        kind = config.mixers[index]
        sizes = {'num_heads': config.num_heads, 'head_dim': config.head_dim, 'layer_idx': index}
        if kind != 'attention':
            sizes['expand_v'] = 1
        self.mixer = MIXERS[kind](config.hidden_size, **sizes)
        self.feed_forward = FeedForward(config.hidden_size)
        self.mixer_norm, self.feed_forward_norm = RMSNorm(config.hidden_size), RMSNorm(config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        mixed, _, _ = self.mixer(self.mixer_norm(x), past_key_values=cache)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class LanguageModel(nn.Module):
    """Byte embedding, blocks, norm, and head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(256, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(len(config.mixers)))
        self.norm = RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, 256, bias=False)
        # All bytes start equally likely, at a loss of ln 256 = 5.55.
        nn.init.zeros_(self.head.weight)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Returns float32 logits `[B, T, 256]` of the byte after each of `ids` `[B, T]`; continues and updates `cache`."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cache)
        return self.head(self.norm(x)).float()
