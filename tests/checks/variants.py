"""Healthy models of many kinds: no stage may find anything in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .small_gpt import GPT, Attention, C, H, LastOnly, LogitsOnly, ShiftsInside, T, V, batch


class Rotary(Attention):
    """Rotary positions from a complex buffer."""

    freqs: Tensor

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(T)[:, None] * torch.logspace(0, -2, C // H // 2)
        self.register_buffer("freqs", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.freqs[: x.size(2)]).flatten(-2).type_as(x)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mix(self.turned(q), self.turned(k), v)


class LateTable(Attention):
    """A table that is made at the first forward and kept in a buffer."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table.numel() < x.size(1):
            self.table = torch.linspace(1, 2, x.size(1), device=x.device)
        return super().forward(x) * self.table[: x.size(1), None].to(x.dtype)


class Sliding(Attention):
    """A window of four tokens."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.size(2), device=q.device)
        near = (i[:, None] >= i) & (i[:, None] - i < 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


class Experts(nn.Module):
    """Each token goes to its two best experts; with `capacity` an expert takes only the first tokens that ask."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.router, self.capacity = nn.Linear(C, 4), capacity
        self.experts = nn.ModuleList(nn.Linear(C, C) for _ in range(4))
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        shares = self.router(flat).softmax(-1)
        self.balance = shares.mean(0).square().sum()
        weights, chosen = shares.topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            row, slot = row[: self.capacity], slot[: self.capacity]
            out = out.index_add(0, row, expert(flat[row]) * weights[row, slot, None])
        return out.view_as(x)


class MoE(GPT):
    """Experts in place of the MLP, and a loss term that balances them."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp = Experts(capacity)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        balance = torch.stack([block.mlp.balance for block in self.blocks]).sum()
        return super().loss(logits, targets) + 0.01 * balance


class LowRank(nn.Module):
    """A frozen layer and an adapter that begins at zero."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down, self.up = nn.Linear(C, 2, bias=False), nn.Linear(2, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.up(self.down(x))
        return out


def lora() -> GPT:
    model = GPT()
    model.requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv = LowRank(block.attn.qkv)
    return model


class EncoderAttention(Attention):
    """Sees both sides, but no padding."""

    padding: Tensor | None = None

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        real = None if self.padding is None else ~self.padding[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=real)


class Encoder(GPT):
    """A masked language model; id 0 is padding."""

    def __init__(self, masked: bool = True) -> None:
        super().__init__(EncoderAttention)
        self.masked = masked

    def logits(self, idx: Tensor) -> Tensor:
        for block in self.blocks:
            block.attn.padding = (idx == 0) if self.masked else None
        return super().logits(idx)


def masked_batch() -> tuple[Tensor, Tensor]:
    """For the encoder: a third of the tokens is hidden, and only those have a label."""
    x, _ = batch()
    hidden = torch.zeros_like(x, dtype=torch.bool)
    hidden[:, ::3] = True
    return x.masked_fill(hidden, V - 1), x.masked_fill(~hidden, -100)


HEALTHY: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "tied": (GPT, {}),
    "untied": (lambda: GPT(tie=False), {}),
    "dropout": (lambda: GPT(dropout=0.2), {}),
    "bfloat16": (lambda: GPT().bfloat16(), {}),
    "float64": (lambda: GPT().double(), {}),
    "rotary": (lambda: GPT(Rotary), {}),
    "late table": (lambda: GPT(LateTable), {}),
    "sliding window": (lambda: GPT(Sliding), {}),
    "experts": (MoE, {}),
    "lora": (lora, {}),
    "labels shifted inside": (ShiftsInside, {"same": True}),
    "logits only": (LogitsOnly, {}),
    "last position only": (LastOnly, {}),
    "encoder": (Encoder, {"causal": False, "pad_id": 0, "masked": True}),
}
"""Name, how to build it, and how it is asked: `same` gives y = x, `masked` the batch of a masked language model."""


def asked(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments for `check` that belong to a healthy variant."""
    rest = {name: value for name, value in options.items() if name not in ("same", "masked")}
    x, y = masked_batch() if options.get("masked") else batch()
    return {"batch": (x, x if options.get("same") else y), "vocab_size": V, "block_size": T, **rest}
