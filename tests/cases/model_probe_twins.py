"""Healthy models of many kinds, as data: what they do looks like a bug to a probe that does not think.

Each `Twin` makes a model and takes a training step with it; nothing of warning or above may be said in any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import probe_twin_decoders as decoders
from . import probe_twin_pairs as pairs
from . import probe_twin_texts as texts
from .probe_twin_texts import LENGTH, ROWS, VOCABULARY, WIDTH, ids


class Twin(NamedTuple):
    """A model and a function that gives its loss for one step."""

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[Any], Tensor]


class Images(nn.Module):
    """BatchNorm, dropout, and a counter in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten())
        self.head, self.calls, self.history = nn.Linear(144, 3), 0, {"norm": [0.0]}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history["norm"].append(float(x.norm()))
        answer: Tensor = self.head(self.body(x))
        return answer


class BatchStatistics(nn.Module):
    """BatchNorm without running statistics uses the batch's in eval mode too, as image translation does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Conv2d(4, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.body(x)
        return answer


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        x = torch.tanh(self.body(x))
        return torch.distributions.Categorical(logits=self.actor(x)), self.critic(x).squeeze(-1)


def play(model: nn.Module) -> Tensor:
    policy, value = model(torch.randn(ROWS, 4))
    gain = torch.randn(ROWS) - value
    loss: Tensor = (-policy.log_prob(policy.sample()) * gain.detach() + gain.pow(2)).mean()
    return loss


class Diffusion(nn.Module):
    """Noise and time steps are drawn inside of forward, whatever the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.net = nn.Embedding(50, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(50, (len(x),))
        noise = torch.randn_like(x)
        level = (t / 50)[:, None]
        return F.mse_loss(self.net(torch.cat([x * (1 - level) + noise * level, self.time(t)], -1)), noise)


class Queue:
    """What a model may keep in an object of its own."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.count = 0


class OwnThings(nn.Module):
    """A generator of its own, an object that counts, weights that its forward normalises."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.queue = nn.Linear(4, 4), Queue()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.net.weight.data = self.net.weight.data / self.net.weight.data.norm()
        self.queue.count += 1
        self.queue.seen.append(x.detach().mean())
        answer: Tensor = self.net(x + 0.1 * torch.randn(x.shape, generator=self.generator))
        return answer


class Generated(OwnThings):
    """The same without a word to its weights, so that it may be asked."""

    def forward(self, x: Tensor) -> Tensor:
        self.queue.count += 1
        self.queue.seen.append(x.detach().mean())
        answer: Tensor = self.net(x + 0.1 * torch.randn(x.shape, generator=self.generator) + 0.01 * self.queue.count)
        return answer


class AlwaysDrops(nn.Module):
    """Monte Carlo dropout, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.net(x), 0.2, training=True)


class TextLatent(nn.Module):
    """A variational autoencoder of text: it samples in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.code, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def forward(self, x: Tensor) -> Tensor:
        code = self.code(self.embed(x).mean(1, keepdim=True))
        logits: Tensor = self.head((code + torch.randn_like(code)).expand(-1, x.size(1), -1))
        return logits


class Packed(nn.Module):
    """Rows of different lengths, packed; the state at their end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = (
            nn.Embedding(VOCABULARY, WIDTH, padding_idx=0),
            nn.GRU(WIDTH, WIDTH, batch_first=True),
            nn.Linear(WIDTH, 2),
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(x), lengths.tolist(), batch_first=True, enforce_sorted=False
        )
        answer: Tensor = self.head(self.cell(packed)[1][-1])
        return answer


def packed(model: nn.Module) -> Tensor:
    x, lengths = ids(), torch.tensor([8, 3, 5, 8, 2, 6])
    x[torch.arange(LENGTH) >= lengths[:, None]] = 0
    return F.cross_entropy(model(x, lengths), x[:, 0] % 2)


class Document(nn.Module):
    """Rows are the sentences of one document, which know of each other; each gets a class."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(2 * WIDTH, 2)
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.cell(self.embed(x).mean(1)[None])[0][0])
        return answer


def sentences(model: nn.Module) -> Tensor:
    x = ids()
    return F.cross_entropy(model(x), x[:, 0] % 2)


def pictures(model: nn.Module) -> Tensor:
    answer = model(torch.randn(ROWS, 1, 8, 8))
    return F.cross_entropy(answer, torch.randint(3, (ROWS,))) if answer.dim() == 2 else answer.pow(2).mean()


def numbers(model: nn.Module) -> Tensor:
    squares: Tensor = model(torch.randn(ROWS, 4)).pow(2)
    return squares.mean()


def twins() -> Iterator[Twin]:
    """All of them."""
    yield Twin("images with BatchNorm and counters", Images, pictures)
    yield Twin("statistics of the batch", BatchStatistics, pictures)
    yield Twin("LSTM over [T, B]", texts.TimeMajor, texts.time_major)
    yield Twin("tags over [T, B]", texts.Tagger, texts.tags)
    yield Twin("encoder and decoder", decoders.Seq2Seq, decoders.translate)
    yield Twin("autoencoder of text", lambda: decoders.Autoencoder(split=False), decoders.encoded)
    yield Twin("autoencoder, two inputs", lambda: decoders.Autoencoder(split=True), decoders.encoded)
    yield Twin("cache of eval mode", texts.CachedInEval, texts.language)
    yield Twin("sentences of a document", Document, sentences)
    yield Twin("masked language model", texts.Bidirectional, texts.masked)
    yield Twin("autoencoder of ids", texts.Bidirectional, texts.rebuilt)
    yield Twin("prefix language model", lambda: texts.Bidirectional(2), texts.prefixed)
    yield Twin("both ways", texts.BothWays, texts.both)
    yield Twin(
        "graph, numbers, buffer",
        lambda: pairs.Graph(features="numbers", edges=False),
        pairs.graph("numbers", edges=False),
    )
    yield Twin("graph, ids, buffer", lambda: pairs.Graph(features="ids", edges=False), pairs.graph("ids", edges=False))
    yield Twin("graph, ids, edges", lambda: pairs.Graph(features="ids", edges=True), pairs.graph("ids", edges=True))
    yield Twin("transformer over [T, B]", lambda: texts.TimeMajorTransformer(pooled=False), texts.time_major)
    yield Twin("classes of [T, B]", lambda: texts.TimeMajorTransformer(pooled=True), texts.time_major_classes)
    yield Twin("siamese", lambda: pairs.Pairs(all_pairs=False), pairs.contrast)
    yield Twin("negatives in the batch", lambda: pairs.Pairs(all_pairs=True), pairs.contrast)
    yield Twin("actor and critic", ActorCritic, play)
    yield Twin("experts with a capacity", texts.Experts, texts.language)
    yield Twin("diffusion", Diffusion, lambda model: model(torch.randn(ROWS, 4)))
    yield Twin("text with a latent variable", TextLatent, texts.rebuilt)
    yield Twin("scan", texts.Scan, texts.language)
    yield Twin("labels shifted inside", texts.HubStyle, texts.hub)
    yield Twin("state from batch to batch", texts.Stateful, texts.language)
    yield Twin("normalised in forward", OwnThings, numbers)
    yield Twin("generator and object of its own", Generated, numbers)
    yield Twin("dropout that is always on", AlwaysDrops, numbers)
    yield Twin("packed rows", Packed, packed)
    yield Twin("autocast", texts.Scan, texts.autocast)
