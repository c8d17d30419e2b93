"""Healthy models with an encoder and a decoder, and the loss of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .probe_twin_texts import LENGTH, VOCABULARY, WIDTH, ids


class Seq2Seq(nn.Module):
    """Source and shifted target, torch's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), nn.Linear(WIDTH, VOCABULARY)
        self.net = nn.Transformer(WIDTH, 2, 1, 1, 24, dropout=0.1, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = torch.ones(target.size(1), target.size(1), dtype=torch.bool).triu(1)
        logits: Tensor = self.head(
            self.net(
                self.embed(source),
                self.embed(target),
                tgt_mask=mask,
                tgt_is_causal=True,
                src_key_padding_mask=source == 0,
                memory_key_padding_mask=source == 0,
                tgt_key_padding_mask=target == 0,
            )
        )
        return logits


class Autoencoder(nn.Module):
    """A code of the whole text, and a decoder that predicts each token from it and those before."""

    def __init__(self, *, split: bool) -> None:
        super().__init__()
        self.embed, self.split = nn.Embedding(VOCABULARY, WIDTH), split
        self.encoder, self.decoder = (nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, known: Tensor | None = None) -> Tensor:
        code = self.encoder(self.embed(x))[1]
        logits: Tensor = self.head(self.decoder(self.embed(x[:, :-1] if known is None else known), code)[0])
        return logits


def translate(model: nn.Module) -> Tensor:
    source, target = ids(), ids(length=LENGTH + 1)
    source[1:, 5:], target[2:, 6:] = 0, 0
    logits = model(source, target[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)


def encoded(model: Any) -> Tensor:
    x = ids()
    logits = model(x, x[:, :-1].clone()) if model.split else model(x)
    return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
