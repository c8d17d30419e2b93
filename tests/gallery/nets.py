"""The small nets that the cases are built from: a GPT whose parts can be replaced, and a few others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, LENGTH, BATCH = 32, 16, 8, 4
IGNORED = -100


class Attention(nn.Module):
    """Causal self-attention, written out; `weights` is what a case replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        mixed = self.weights(self.query(x), self.key(x), keep) @ self.value(x)
        out: Tensor = self.out(mixed)
        return out

    def weights(self, query: Tensor, key: Tensor, keep: Tensor | None) -> Tensor:
        """Weights [B, T, T] of queries and keys [B, T, C]; `keep` [B, T] tells tokens from padding."""
        scores = query @ key.transpose(-2, -1) * WIDTH**-0.5
        out: Tensor = scores.masked_fill(~causal(query.size(1)), -torch.inf).softmax(-1)
        return out


def causal(length: int) -> Tensor:
    """Which keys a position may see, [T, T]."""
    return torch.ones(length, length, dtype=torch.bool).tril()


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    def __init__(self, attn: nn.Module, mlp: nn.Module, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm(WIDTH), attn, norm(WIDTH), mlp

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), keep)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """Two blocks; returns logits [B, T, V], and with targets [B, T] the loss alone."""

    def __init__(
        self,
        attn: Callable[[], nn.Module] = Attention,
        mlp: Callable[[], nn.Module] = MLP,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(attn(), mlp(), norm) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, targets: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.size(1)]
        for block in self.blocks:
            x = block(x, keep)
        logits: Tensor = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Encoder(nn.Module):
    """A plain feed-forward net from `inputs` numbers to `outputs`."""

    def __init__(self, inputs: int = 8, outputs: int = 4) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.hidden(x)))
        return out


def ids() -> Tensor:
    """Token ids [B, T]."""
    return torch.randint(1, VOCAB, (BATCH, LENGTH))


def shifted() -> tuple[Tensor, Tensor]:
    """Token ids and the next ones, [B, T] each."""
    rows = torch.randint(1, VOCAB, (BATCH, LENGTH + 1))
    return rows[:, :-1], rows[:, 1:]


def features(count: int = BATCH, width: int = 8) -> Tensor:
    """A batch of numbers."""
    return torch.randn(count, width)
