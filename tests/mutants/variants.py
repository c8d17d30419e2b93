"""Healthy decoders out of many kinds of layers: what real projects do, and a naive check would call a bug."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mini_gpt import MiniGPT, MiniGPTConfig

Output = tuple[Tensor, Tensor | None]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the targets that are not -100."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class TiedGPT(MiniGPT):
    """Output layer and token table are one parameter."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__(config)
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        self.head.weight = self.token_embedding.weight


class RotaryAttention(nn.Module):
    """Grouped queries with rotary positions in buffers that no checkpoint holds; a window where one is given."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: MiniGPTConfig, window: int | None = None) -> None:
        super().__init__()
        self.heads, self.window = config.num_heads, window
        self.size = config.embedding_dim // config.num_heads
        self.query = nn.Linear(config.embedding_dim, config.embedding_dim, bias=False)
        self.key = nn.Linear(config.embedding_dim, self.size, bias=False)
        self.value = nn.Linear(config.embedding_dim, self.size, bias=False)
        self.out = nn.Linear(config.embedding_dim, config.embedding_dim, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, self.size, 2) / self.size)
        angles = torch.outer(torch.arange(config.block_size), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        """Turn pairs of channels by their position; [B, H, T, D]."""
        cos, sin = (table[: x.size(2)].to(x.dtype) for table in (self.cos, self.sin))
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query = self.query(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        key, value = (layer(x)[:, None].expand_as(query) for layer in (self.key, self.value))
        place = torch.arange(length, device=x.device)
        seen = place[:, None] >= place
        if self.window is not None:
            seen &= place[:, None] - place < self.window
        mixed = F.scaled_dot_product_attention(self.turned(query), self.turned(key), value, attn_mask=seen)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Experts(nn.Module):
    """The best two of four experts for each token; an expert may get none, and then no gradient."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        width = config.embedding_dim
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            where = share.squeeze(-1) > 0
            if where.any():
                out[where] += share[where] * expert(x[where])
        return out


class Layer(nn.Module):
    """Norm and add around an attention and a feed-forward part."""

    def __init__(self, config: MiniGPTConfig, attention: nn.Module, mlp: nn.Module | None = None) -> None:
        super().__init__()
        width = config.embedding_dim
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = attention
        self.mlp = mlp or nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Decoder(nn.Module):
    """Token table, layers, norm, head; the layers know of positions, or nothing does."""

    window: int | None = None
    recompute = False

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_dim)
        self.layers = nn.ModuleList(self.layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.embedding_dim)
        self.head = nn.Linear(config.embedding_dim, config.vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def layer(self, config: MiniGPTConfig) -> nn.Module:
        return Layer(config, RotaryAttention(config, self.window))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Output:
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute and self.training else layer(x)
        logits = self.head(self.norm(x))
        return logits, None if targets is None else cross_entropy(logits, targets)


class SlidingWindow(Decoder):
    window = 5


class Recomputing(Decoder):
    recompute = True


class Mixture(Decoder):
    def layer(self, config: MiniGPTConfig) -> nn.Module:
        return Layer(config, RotaryAttention(config), Experts(config))


class CausalConvolution(nn.Module):
    """A convolution that is padded on the left only."""

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(config.embedding_dim, config.embedding_dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.convolution(F.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2)
        return out


class Convolutional(Decoder):
    def layer(self, config: MiniGPTConfig) -> nn.Module:
        return Layer(config, CausalConvolution(config))
