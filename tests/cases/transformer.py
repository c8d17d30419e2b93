"""A small causal language model as many programs have it, and the usual course of the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .programs import STEPS

LENGTH, WIDTH = 16, 32


@dataclass
class Output:
    """As the models of well-known collections return it."""

    loss: Tensor | None
    logits: Tensor


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn: nn.Module = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.mlp: nn.Module = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        )
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        output: Tensor = x + self.mlp(self.ln_2(x))
        return output


class Transformer(nn.Module):
    """Causal, with tied tables; returns `Output`, and shifts the labels itself where it is given the ids as labels."""

    def __init__(self, vocabulary: int, dropout: float = 0.0, checkpointed: bool = False, layers: int = 1) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.apply(self._start)
        self.lm_head.weight = self.wte.weight
        self.checkpointed = checkpointed

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, targets: Tensor | None = None, labels: Tensor | None = None) -> Output:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed and self.training else block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        elif labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits)

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            logits = self(ids[:, -LENGTH:]).logits[:, -1] / 0.8
            limit = logits.topk(5).values[:, -1:]
            chances = logits.masked_fill(logits < limit, -math.inf).softmax(-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1)], 1)
        return ids


def rate(step: int) -> float:
    """Up over 20 steps, then a cosine down to a tenth."""
    if step < 20:
        return (step + 1) / 20
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - 20) / (STEPS - 20))))
