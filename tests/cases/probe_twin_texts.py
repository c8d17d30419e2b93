"""Healthy models of text of many kinds, and the loss of each."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH, ROWS = 17, 8, 12, 6


def ids(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length))


class TimeMajor(nn.Module):
    """A language model over `[T, B]`, as torch's own example has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.LSTM(WIDTH, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        out, state = self.cell(self.embed(x), state)
        return self.head(out), state


class TimeMajorTransformer(nn.Module):
    """torch's own layers as they are by default, over `[T, B]`: causal, or pooled to a class for each column."""

    def __init__(self, *, pooled: bool) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCABULARY, WIDTH), nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.1)
        self.head, self.pooled = nn.Linear(WIDTH, VOCABULARY), pooled

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        mask = None if self.pooled else torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        out = self.layer(self.embed(x), src_mask=mask)
        return self.head(out.mean(0) if self.pooled else out), None


class Tagger(TimeMajor):
    """Tags for `[T, B]` from both sides: nothing in its shapes tells which dimension is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(WIDTH, WIDTH, bidirectional=True), nn.Linear(2 * WIDTH, 3)


class CachedInEval(nn.Module):
    """Keeps what it has seen in eval mode, where it generates; whoever generates clears it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        seen = self.embed(x)
        if not self.training:
            self.cache = seen = seen if self.cache is None else torch.cat([self.cache, seen], 1)
        logits: Tensor = self.head(seen.cumsum(1)[:, -x.size(1) :])
        return logits


class Bidirectional(nn.Module):
    """Sees both sides; `prefix` positions see each other, the rest what came before."""

    def __init__(self, prefix: int | None = None) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY + 1, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.qkv, self.head, self.prefix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY), prefix

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(x) + self.place).chunk(3, -1)
        mask = None
        if self.prefix is not None:
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            mask[:, : self.prefix] = True
        logits: Tensor = self.head(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=mask))
        return logits[:, 0]


class BothWays(nn.Module):
    """Two language models in one, from left to right and from right to left."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCABULARY, WIDTH), nn.LSTM(WIDTH, WIDTH, bidirectional=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ahead, back = self.cell(self.embed(x).transpose(0, 1))[0].transpose(0, 1).chunk(2, -1)
        return self.head(ahead), self.head(back)


class CapacityRouter(nn.Module):
    """Experts with a capacity that the whole batch shares."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        share = self.gate(flat).softmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            mine = (share.argmax(-1) == number).nonzero().flatten()[: len(flat) // 3]
            out = out.index_put((mine,), expert(flat[mine]) * share[mine, number, None])
        return x + out.view_as(x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.moe, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            CapacityRouter(),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.moe(self.embed(x)))
        return logits


class Scan(nn.Module):
    """A linear state-space layer, run step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.decay, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Parameter(torch.zeros(WIDTH)),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def forward(self, x: Tensor) -> Tensor:
        inputs, state, states = self.embed(x), torch.zeros(x.size(0), WIDTH), []
        for t in range(x.size(1)):
            state = torch.sigmoid(self.decay) * state + inputs[:, t]
            states.append(state)
        logits: Tensor = self.head(torch.stack(states, 1))
        return logits


@dataclasses.dataclass
class Returned:
    """What a model returns, or is given."""

    logits: Tensor
    loss: Tensor | None = None


class HubStyle(Scan):
    """Takes labels and shifts them itself; takes and returns dataclasses."""

    def forward(self, x: Any, labels: Tensor | None = None) -> Any:
        logits = super().forward(x.logits if isinstance(x, Returned) else x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Returned(logits, loss)


class Stateful(Scan):
    """Carries its state from batch to batch, as truncated backpropagation through time does."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(ROWS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, states = self.state, []
        for step in self.embed(x).unbind(1):
            state = torch.sigmoid(self.decay) * state + step
            states.append(state)
        self.state = state.detach()
        logits: Tensor = self.head(torch.stack(states, 1))
        return logits


def masked(model: nn.Module) -> Tensor:
    y = ids()
    hidden = torch.rand(y.shape) < 0.3
    hidden[0, 0] = True
    logits = model(y.masked_fill(hidden, VOCABULARY))
    return F.cross_entropy(logits.flatten(0, 1), y.masked_fill(~hidden, -100).flatten())


def prefixed(model: nn.Module) -> Tensor:
    x = ids(length=LENGTH + 1)
    y = x[:, 1:].clone()
    y[:, :2] = -100
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), y.flatten())


def both(model: nn.Module) -> Tensor:
    x = ids(length=LENGTH)
    ahead, back = model(x)
    first = F.cross_entropy(ahead[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    return first + F.cross_entropy(back[:, 1:].flatten(0, 1), x[:, :-1].flatten())


def hub(model: nn.Module) -> Tensor:
    x = ids()
    loss: Tensor = model(Returned(x), labels=x).loss
    return loss


def language(model: nn.Module) -> Tensor:
    x = ids(length=LENGTH + 1)
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def rebuilt(model: nn.Module) -> Tensor:
    x = ids()
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def time_major(model: nn.Module) -> Tensor:
    x = ids(length=LENGTH + 1).T
    return F.cross_entropy(model(x[:-1])[0].flatten(0, 1), x[1:].flatten())


def tags(model: nn.Module) -> Tensor:
    x = ids().T
    return F.cross_entropy(model(x)[0].flatten(0, 1), (x % 3).flatten())


def autocast(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return language(model)


def time_major_classes(model: nn.Module) -> Tensor:
    x = ids().T
    return F.cross_entropy(model(x)[0], x[0])
