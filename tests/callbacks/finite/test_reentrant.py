"""A reentrant checkpoint whose inputs are frozen builds no graph: its parameters get no gradient, and why is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpt_guard.callbacks.gradients.guard import GradNormMonitor
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

# torch itself says that no input requires a gradient.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


class Net(nn.Module):
    """Blocks behind a first layer, each in a checkpoint."""

    def __init__(self, first: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.reentrant = first, reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        logits: Tensor = self.head(x.mean(1) if x.dim() == 3 else x)
        return logits


def run(model: Net, x: Tensor) -> tuple[Finding, ...]:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with Guardian(model, optimizer, guards=[GradNormMonitor()], sinks=[]) as guardian:
        for _ in range(22):
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)).backward()
            optimizer.step()
    return guardian.findings


def embedded(*, frozen: bool, reentrant: bool) -> Net:
    return Net(nn.Embedding(9, 6).requires_grad_(not frozen), reentrant=reentrant)


IDS, NUMBERS = torch.randint(9, (4, 5)), torch.randn(4, 6)


@pytest.mark.parametrize(
    ("model", "x"),
    [(embedded(frozen=True, reentrant=True), IDS), (Net(nn.Identity(), reentrant=True), NUMBERS)],
    ids=["frozen embedding", "no layer before it"],
)
def test_it_is_named(model: Net, x: Tensor) -> None:
    (found,) = run(model, x)
    assert (found.code, found.module) == ("GG202", "blocks")
    assert "reentrant checkpoint, none of whose inputs requires a gradient" in found.seen
    assert "use_reentrant=False" in found.causes[0]


@pytest.mark.parametrize(
    ("frozen", "reentrant"), [(True, False), (False, True)], ids=["not reentrant", "trained embedding"]
)
def test_its_healthy_twin_is_silent(frozen: bool, reentrant: bool) -> None:
    assert run(embedded(frozen=frozen, reentrant=reentrant), IDS) == ()


def test_no_grad_without_a_checkpoint_is_said_as_before() -> None:
    class Without(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.first(x)
            for block in self.blocks:
                x = block(x)
            logits: Tensor = self.head(x)
            return logits

    (found,) = run(Without(nn.Linear(6, 6), reentrant=True), NUMBERS)
    assert "ran only with gradients disabled" in found.seen


def test_one_layer_of_a_list_in_a_checkpoint_is_named_too() -> None:
    class First(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.blocks[0], self.first(x), use_reentrant=self.reentrant)
            logits: Tensor = self.head(self.blocks[1](x).mean(1))
            return logits

    def made(*, reentrant: bool) -> Net:
        return First(nn.Embedding(9, 6).requires_grad_(False), reentrant=reentrant)

    (found,) = run(made(reentrant=True), IDS)
    assert (found.code, found.module) == ("GG202", "blocks.0.0")
    assert run(made(reentrant=False), IDS) == ()
