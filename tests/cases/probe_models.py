"""Small models of text and series, of which one thing can be made wrong."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH, HEADS = 19, 10, 16, 4


class Attention(nn.Module):
    """Self-attention of which one thing can be made wrong by `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = 0.2

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (self.heads(part) for part in self.qkv(x).chunk(3, -1))
        mixed = self.by_hand(q, k, v) if self.how.startswith("hand") else self.by_call(q, k, v, real)
        if self.how != "heads_first":
            mixed = mixed.transpose(1, 2)
        out: Tensor = self.out(mixed.reshape(rows, length, WIDTH))
        return out

    def heads(self, part: Tensor) -> Tensor:
        rows, length, _ = part.shape
        if self.how == "heads_viewed":
            return part.reshape(rows, HEADS, length, WIDTH // HEADS)
        part = part.view(rows, length, HEADS, WIDTH // HEADS)
        return part if self.how == "heads_first" else part.transpose(1, 2)

    def by_call(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        length = real.size(1)
        ones = torch.ones(length, length)
        masks = {
            "future_bool": ones.triu(1).bool(),
            "future_and_itself": ones.triu().bool(),
            "zero_one": ones.tril(),
            "zero_one_padding": real[:, None, None].float(),
            "padding_shown": ~real[:, None, None],
            "padding_hidden": real[:, None, None],
            "strict": ones.tril(-1).bool(),
            "past_bool": ones.tril().bool(),
            "past_inf": torch.zeros_like(ones).masked_fill(ones.triu(1).bool(), -math.inf),
            "past_and_real": ones.tril().bool() & real[:, None, None],
        }
        if self.how == "dropout_always":
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        if self.how == "dropout_by_mode":
            p = self.dropout if self.training else 0.0
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        if self.how in masks:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=masks[self.how])
        causal = self.how not in ("bare", "heads_viewed_bare")
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def by_hand(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.size(-2)
        scores = q @ k.mT / math.sqrt(q.size(-1))
        ones = torch.ones(length, length)
        if self.how == "hand_future":
            scores = scores.masked_fill(ones.tril() == 1, -1e9)
        elif self.how == "hand_diagonal":
            scores = scores.masked_fill(ones.tril(-1) == 0, -1e9)
        elif self.how == "hand_window":
            # The window of the second half begins behind its own queries.
            near = (ones.tril() - ones.tril(-3)).bool()
            near[length // 2] = False
            scores = scores.masked_fill(~near, -1e9)
        elif self.how != "hand_none":
            scores = scores.masked_fill(ones.tril() == 0, -math.inf if self.how == "hand" else -1e9)
        weights = F.softmax(scores, dim=-2 if self.how == "hand_queries" else -1)
        return weights @ v


class Language(nn.Module):
    """A small causal model; `pooled` gives one answer for each row instead, `after` does something to the states."""

    def __init__(self, how: str = "", *, pooled: int = 0, after: str = "", padding: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Attention(how), Attention(how)])
        self.head = nn.Linear(WIDTH, pooled or VOCABULARY)
        self.pooled, self.after = pooled, after

    def forward(self, ids: Tensor) -> Tensor:
        real = ids != 0
        x = self.embed(ids) + self.place(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = x + block(x, real)
        if self.after == "mean_over_rows":
            x = x - x.mean(0, keepdim=True)
        elif self.after == "mean_over_time":
            x = x - x.mean(1, keepdim=True)
        elif self.after == "rows_viewed":
            x = x + x.reshape(x.size(1), x.size(0), -1).transpose(0, 1)
        elif self.after == "dropout":
            x = F.dropout(x, 0.2)
        elif self.after == "dropout_by_mode":
            x = F.dropout(x, 0.2, training=self.training)
        if self.pooled:
            x = x[:, 0]
        logits: Tensor = self.head(x)
        return logits


class Recurrent(nn.Module):
    """An LSTM over `[B, T]` ids."""

    def __init__(self, *, batch_first: bool, bidirectional: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=batch_first, bidirectional=bidirectional)
        self.head = nn.Linear(2 * WIDTH if bidirectional else WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cell(self.embed(ids))[0])
        return logits


class Series(nn.Module):
    """The last state of an LSTM over `[B, T, F]` numbers."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(3, WIDTH, batch_first=batch_first), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.cell(x)[0][:, -1])
        return answer


class Convolution(nn.Module):
    """A convolution over time, padded on the left or on both sides."""

    def __init__(self, *, left: bool) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(VOCABULARY, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=0 if left else 1)
        self.head, self.left = nn.Linear(WIDTH, VOCABULARY), left

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).mT
        x = self.conv(F.pad(x, (2, 0)) if self.left else x)
        logits: Tensor = self.head(x.mT)
        return logits


class Encoder(nn.Module):
    """torch's own encoder over padded ids; `mask` says which padding mask it is given."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head, self.mask = nn.Linear(WIDTH, 2), mask

    def forward(self, ids: Tensor) -> Tensor:
        padding = {"right": ids == 0, "inverted": ids != 0, "none": None}[self.mask]
        logits: Tensor = self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding)[:, 0])
        return logits


class Pooled(nn.Module):
    """torch's own layer over ids `[B, T]`, and a class for each row."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 2)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.1, batch_first=batch_first)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embed(ids))[:, 0])
        return logits


class Cached(Language):
    """Keeps the keys of all forwards: a cache that belongs to generation."""

    def __init__(self, *, cleared: bool) -> None:
        super().__init__("past_bool")
        self.cleared = cleared
        self.kept: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.cleared:
            self.kept = None
        self.kept = x.detach() if self.kept is None else torch.cat([self.kept, x.detach()], 1)
        logits: Tensor = self.head(x + 0.1 * self.kept.cumsum(1)[:, -ids.size(1) :])
        return logits


class Hidden(Language):
    """Its dropout is in a plain list, or in a ModuleList."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__("past_bool")
        self.drops: Any = nn.ModuleList([nn.Dropout(0.2)]) if registered else [nn.Dropout(0.2)]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        logits: Tensor = self.head(self.drops[0](x))
        return logits


class Incremental(Language):
    """Generates with its keys in a cache: one query, many keys."""

    def __init__(self, *, flag: bool) -> None:
        super().__init__("past_bool")
        self.flag = flag

    def newest(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return F.scaled_dot_product_attention(x[:, None, -1:], x[:, None], x[:, None], is_causal=self.flag)

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        # Only the last position may look at all keys.
        return torch.cat([logits[:, :-1], logits[:, -1:] + self.head(self.newest(ids)[:, 0])], 1)
