"""Programs that compare, and programs on graphs, train under every default guard without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from .conftest import Guarded
from .parts import mlp, update
from .programs import STEPS, learned, pictures


def views(rows: int = 24) -> tuple[Tensor, Tensor]:
    """Two noisy looks at the same things `[B, 16]`."""
    things = torch.randn(rows, 4) @ torch.linspace(-1, 1, 64).view(4, 16).sin()
    return things + 0.1 * torch.randn_like(things), things + 0.1 * torch.randn_like(things)


def test_pairs_that_are_alike_or_not(guarded: Guarded) -> None:
    """A Siamese net on pictures with a contrastive loss; one net is called twice to a step."""
    images, kinds = pictures(256)
    model = nn.Sequential(nn.Flatten(), mlp(64, 32, 8))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            first, second = torch.randint(256, (32,)), torch.randint(256, (32,))
            alike = (kinds[first] == kinds[second]).float()
            distance = F.pairwise_distance(model(images[first]), model(images[second]))
            loss = (alike * distance.pow(2) + (1 - alike) * F.relu(1.0 - distance).pow(2)).mean()
            update(optimizer, loss)
            losses.append(loss.item())
    learned(losses)


def test_negatives_from_the_batch(guarded: Guarded) -> None:
    """Two encoders, one temperature that is learned, every other row a negative."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = mlp(16, 32, 8), mlp(16, 32, 8)
            self.logit_scale = nn.Parameter(torch.tensor(2.6))

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            x, y = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
            return self.logit_scale.exp() * x @ y.T

    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            scores = model(*views())
            labels = torch.arange(len(scores))
            loss = (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2
            update(optimizer, loss)
            with torch.no_grad():
                model.logit_scale.clamp_(max=4.6)
            losses.append(loss.item())
    learned(losses)


def test_two_views_in_one_batch_without_the_row_itself(guarded: Guarded) -> None:
    """Rows of both views in one forward; a row is no negative of itself, so its score is minus infinity."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            rows = F.normalize(model(torch.cat(views())), dim=1)
            scores = (rows @ rows.T / 0.2).fill_diagonal_(float("-inf"))
            partner = torch.arange(len(rows)).roll(len(rows) // 2)
            loss = F.cross_entropy(scores, partner)
            update(optimizer, loss)
            losses.append(loss.item())
    learned(losses)


def test_anchors_between_the_like_and_the_unlike(guarded: Guarded) -> None:
    images, kinds = pictures(256)
    by_kind = [torch.where(kinds == kind)[0] for kind in range(3)]
    model = nn.Sequential(nn.Flatten(), mlp(64, 32, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.TripletMarginLoss(margin=1.0)

    def one_of(which: Tensor) -> Tensor:
        return images[torch.stack([by_kind[kind][torch.randint(len(by_kind[kind]), ())] for kind in which.tolist()])]

    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            kind = torch.randint(3, (24,))
            other = (kind + torch.randint(1, 3, (24,))) % 3
            loss = criterion(model(one_of(kind)), model(one_of(kind)), model(one_of(other)))
            update(optimizer, loss)
            losses.append(loss.item())
    learned(losses)


class Convolved(nn.Module):
    """Two layers that mix neighbours: the whole graph is one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 3, bias=False)
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = F.relu(adjacency @ self.first(x) + self.bias)
        x = F.dropout(x, 0.3, self.training)
        return F.log_softmax(adjacency @ self.second(x), dim=1)


def graph(nodes: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes of three kinds that know their own kind best: features, normalised adjacency, kinds."""
    kinds = torch.arange(nodes) % 3
    near = torch.rand(nodes, nodes) < torch.where(kinds[:, None] == kinds, 0.2, 0.02)
    linked = (near | near.T | torch.eye(nodes, dtype=torch.bool)).float()
    scale = linked.sum(1).rsqrt()
    return F.one_hot(kinds, 8).float() + torch.randn(nodes, 8), scale[:, None] * linked * scale, kinds


@pytest.mark.parametrize("sparse", [False, True])
def test_a_graph_as_one_batch(guarded: Guarded, sparse: bool) -> None:
    """The same inputs in each step, and labels for a third of the nodes."""
    x, adjacency, kinds = graph()
    adjacency = adjacency.to_sparse() if sparse else adjacency
    train, valid = torch.arange(20), torch.arange(20, 60)
    model = Convolved()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            model.train()
            optimizer.zero_grad()
            output = model(x, adjacency)
            loss = F.nll_loss(output[train], kinds[train])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                hits = model(x, adjacency)[valid].argmax(1) == kinds[valid]
        assert float(hits.float().mean()) > 0.6
    learned(losses)


def test_small_graphs_of_their_own_sizes(guarded: Guarded) -> None:
    """Edges in one list, nodes summed up by graph: how many triangles are there?"""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.message, self.head = nn.Embedding(4, 16), mlp(32, 16, 16), mlp(16, 16, 1)

        def forward(self, kinds: Tensor, edges: Tensor, owner: Tensor, graphs: int) -> Tensor:
            x = self.start(kinds)
            for _ in range(2):
                sent = self.message(torch.cat([x[edges[0]], x[edges[1]]], 1))
                x = x + torch.zeros_like(x).index_add(0, edges[1], sent)
            count: Tensor = self.head(torch.zeros(graphs, 16).index_add(0, owner, x)).squeeze(1)
            return count

    model = Counter()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            sizes = torch.randint(3, 7, (8,))
            owner = torch.repeat_interleave(torch.arange(8), sizes)
            kinds = torch.randint(4, (len(owner),))
            ends = torch.randint(len(owner), (2, 3 * len(owner)))
            edges = ends[:, owner[ends[0]] == owner[ends[1]]]
            wanted = torch.zeros(8).index_add(0, owner, (kinds == 1).float())
            loss = F.mse_loss(model(kinds, edges, owner, 8), wanted)
            update(optimizer, loss)
            losses.append(loss.item())
    learned(losses)


class LocalLayer(nn.Module):
    """Learns alone: what is good is to make it loud, what is bad to leave it quiet."""

    def __init__(self, inputs: int, outputs: int, make: Callable[[Any], Optimizer]) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.optimizer = make(self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x / (x.norm(2, 1, keepdim=True) + 1e-4)))

    def learn(self, good: Tensor, bad: Tensor) -> tuple[Tensor, Tensor, float]:
        loud, quiet = self(good).pow(2).mean(1), self(bad).pow(2).mean(1)
        loss = F.softplus(torch.cat([2.0 - loud, quiet - 2.0])).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return self(good).detach(), self(bad).detach(), loss.item()


def test_layers_that_learn_forward_alone(guarded: Guarded) -> None:
    """The label is written into the first pixels, rightly or wrongly; each layer has an optimizer of its own."""
    images, kinds = pictures(256)
    layers = nn.ModuleList(
        LocalLayer(*sizes, make=lambda p: torch.optim.Adam(p, lr=2e-2)) for sizes in ((64, 64), (64, 32))
    )
    optimizers = [layer.optimizer for layer in layers if isinstance(layer, LocalLayer)]

    def written(rows: Tensor, labels: Tensor) -> Tensor:
        x = images[rows].flatten(1).clone()
        x[:, :3] = 3.0 * F.one_hot(labels, 3)
        return x

    losses = []
    with guarded(layers, optimizers):
        for _ in range(STEPS):
            rows = torch.randint(256, (32,))
            right = kinds[rows]
            good, bad = written(rows, right), written(rows, (right + torch.randint(1, 3, (32,))) % 3)
            for layer in layers:
                assert isinstance(layer, LocalLayer)
                good, bad, loss = layer.learn(good, bad)
            losses.append(loss)
    learned(losses, 0.95)
