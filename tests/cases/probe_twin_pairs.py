"""Healthy models whose rows know of each other, or come in pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .probe_twin_texts import ROWS, VOCABULARY, WIDTH, ids


class Graph(nn.Module):
    """Nodes are the rows, and they know of each other; their features may be ids."""

    def __init__(self, *, features: str, edges: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.last, self.features = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), features
        square = torch.rand(ROWS, ROWS) < 0.5
        self.register_buffer("links", None if edges else (square | square.T | torch.eye(ROWS).bool()).float())

    def forward(self, x: Tensor, edges: Tensor | None = None) -> Tensor:
        x = self.embed(x).mean(1) if self.features == "ids" else x
        links: Any = self.links
        if edges is not None:
            links = torch.eye(len(x)).index_put((edges[0], edges[1]), torch.ones(edges.size(1)))
        x = torch.relu(links @ self.first(x) / links.sum(1, keepdim=True))
        answer: Tensor = self.last(links @ x)
        return answer


class Pairs(nn.Module):
    """Two towers of ids; their similarity by row, or of each with each."""

    def __init__(self, *, all_pairs: bool) -> None:
        super().__init__()
        self.embed, self.proj, self.all_pairs = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 8), all_pairs

    def forward(self, a: Tensor, b: Tensor) -> Any:
        a, b = (F.normalize(self.proj(self.embed(each).mean(1)), dim=-1) for each in (a, b))
        return a @ b.T if self.all_pairs else (a * b).sum(-1)


def graph(features: str, *, edges: bool) -> Callable[[Any], Tensor]:
    def loss(model: Any) -> Tensor:
        x = ids(length=5) if features == "ids" else torch.randn(ROWS, WIDTH)
        given = (x, torch.randint(ROWS, (2, 9))) if edges else (x,)
        return F.cross_entropy(model(*given), torch.randint(3, (ROWS,)))

    return loss


def contrast(model: nn.Module) -> Tensor:
    x = ids()
    scores = model(x, x.roll(1, 1))
    if scores.dim() == 2:
        return F.cross_entropy(5 * scores, torch.arange(ROWS))
    loss: Tensor = F.mse_loss(scores, torch.ones(ROWS))
    return loss
