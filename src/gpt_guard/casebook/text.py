"""Text and model that the scripts of the casebook share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY = 18


def token_ids(length: int, seed: int = 0) -> Tensor:
    """Ids `[length]` of a text in which each word is followed by one of three: there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    followers = torch.randint(VOCABULARY, (VOCABULARY, 3), generator=torch.Generator().manual_seed(7))
    ids = [0]
    for choice in torch.randint(3, (length - 1,), generator=generator).tolist():
        ids.append(int(followers[ids[-1], choice]))
    return torch.tensor(ids)


def windows(ids: Tensor, block_size: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch of inputs and targets `[B, T]`, the targets one further."""
    starts = torch.randint(len(ids) - block_size - 1, (batch,), generator=generator).tolist()
    x = torch.stack([ids[start : start + block_size] for start in starts])
    y = torch.stack([ids[start + 1 : start + 1 + block_size] for start in starts])
    return x, y


class Attention(nn.Module):
    """Causal attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (self.split(each) for each in self.qkv(x).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out

    def split(self, x: Tensor) -> Tensor:
        """`[B, T, C]` to `[B, H, T, D]`."""
        heads: Tensor = x.unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)


class Block(nn.Module):
    """Attention and MLP, each with its residual."""

    def __init__(self, width: int, heads: int, dropout: float, attention: type[Attention]) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = attention(width, heads)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before_attention(x)))
        x = x + self.dropout(self.mlp(self.before_mlp(x)))
        return x


class SmallGPT(nn.Module):
    """Logits `[B, T, V]` for ids `[B, T]`."""

    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        width: int = 32,
        heads: int = 4,
        blocks: int = 2,
        block_size: int = 16,
        dropout: float = 0.0,
        attention: type[Attention] = Attention,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, attention) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
