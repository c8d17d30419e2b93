"""An auxiliary loss that the model computes and the loop does not add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpt_guard import Guardian, LossInputs
from gpt_guard.records import Finding, Severity

WIDTH = 6
Loss = Callable[[Any, Tensor], Any]


class Gated(nn.Module):
    """Experts behind a gate, whose balance is left in an attribute."""

    def __init__(self, *, keep: str = "aux_loss", detach: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.keep, self.detach_it = keep, detach

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        balance = share.mean(0).square().sum()
        setattr(self, self.keep, balance.detach() if self.detach_it else balance)
        parts = [share[:, [k]] * expert(x) for k, expert in enumerate(self.experts)]
        return torch.stack(parts).sum(0)


class Net(nn.Module):
    def __init__(self, *, checkpointed: bool = False, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated(**options) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)
        self.losses: list[Tensor] = []
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        out: Tensor = self.head(x)
        return out


class Listed(Net):
    """Gathers them in a list."""

    def forward(self, x: Tensor) -> Tensor:
        self.losses = []
        for block in self.blocks:
            x = block(x)
            self.losses.append(block.get_parameter("gate.weight").square().mean())
        out: Tensor = self.head(x)
        return out


class Returned(Net):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return {"logits": out, "kl_loss": out.square().mean()}


def plain(model: Any, x: Tensor) -> Tensor:
    out = model(x)
    return F.cross_entropy(out["logits"] if isinstance(out, dict) else out, (x.sum(1) > 0).long())


def added(model: Any, x: Tensor) -> Tensor:
    main = plain(model, x)
    balance: Tensor = sum(block.aux_loss for block in model.blocks)
    return main + 0.01 * balance


def apart(model: Any, x: Tensor) -> list[Tensor]:
    """Two backward calls in one step: the main loss, and the others."""
    main = plain(model, x)
    return [main, sum(block.aux_loss for block in model.blocks)]


def run(model: nn.Module, loss: Loss, steps: int = 5, micro: int = 1) -> list[Finding]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[LossInputs()], sinks=[]) as guardian:
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(micro):
                x = torch.randn(16, WIDTH)
                value = loss(model, x)
                for part in value if isinstance(value, list) else [value]:
                    part.backward(retain_graph=isinstance(value, list))
            optimizer.step()
    return [found for found in guardian.findings if found.code == "GG647"]


@pytest.mark.parametrize(
    ("model", "module", "name"),
    [
        (lambda: Net(), "blocks.0", "`blocks.0.aux_loss`"),
        (lambda: Net(keep="balance_loss"), "blocks.0", "`blocks.0.balance_loss`"),
        (lambda: Net(checkpointed=True), "blocks.0", "`blocks.0.aux_loss`"),
        (lambda: Listed(detach=True), "", "`losses`"),
        (lambda: Returned(detach=True), "", "`output['kl_loss']` of the model"),
    ],
)
@pytest.mark.parametrize("micro", [1, 2])
def test_it_is_told_with_its_module(model: Callable[[], nn.Module], module: str, name: str, micro: int) -> None:
    (found,) = run(model(), plain, micro=micro)
    assert (found.severity, found.step, found.module) == (Severity.WARNING, 2, module)
    assert found.seen.startswith(name)
    assert "never adds it" in found.causes[0]


def test_a_number_of_another_name_is_a_note() -> None:
    (found,) = run(Net(keep="entropy"), plain)
    assert found.severity is Severity.INFO


def test_the_models_own_loss_in_whose_place_another_is_used_is_a_note() -> None:
    class Own(Net):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return {"logits": out, "loss": out.square().mean()}

    (found,) = run(Own(detach=True), plain)
    assert found.severity is Severity.INFO


def now_and_then() -> Loss:
    calls: list[int] = []

    def loss(model: Any, x: Tensor) -> Tensor:
        calls.append(1)
        return added(model, x) if len(calls) % 2 else plain(model, x)

    return loss


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (lambda: Net(), added),
        (lambda: Net(checkpointed=True), added),
        (lambda: Net(), apart),
        (lambda: Net(detach=True), plain),
        (lambda: Net(), now_and_then()),
        (lambda: Listed(detach=True), lambda model, x: plain(model, x) + sum(model.losses)),
    ],
)
def test_what_some_loss_contains_is_silent(model: Callable[[], nn.Module], loss: Loss) -> None:
    assert run(model(), loss) == []
