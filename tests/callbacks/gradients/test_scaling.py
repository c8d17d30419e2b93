"""A GradScaler out of order is told from exact figures; every healthy order of its calls is silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, Optimizer

from gpt_guard.callbacks.gradients.guard import GradNormMonitor
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity

Body = Callable[[int, nn.Module, Optimizer, GradScaler, Tensor], None]


@pytest.fixture(params=["immediate", "per_step"])
def reads(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def clip(model: nn.Module, limit: float = 1.0) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), limit)


def train(body: Body, reads: str, *, steps: int = 60, lr: float = 1e-3, make: type[Optimizer] = SGD) -> list[Finding]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = make(model.parameters(), lr=lr)  # type: ignore[call-arg]  # all of them take lr
    scaler = GradScaler("cpu")
    guards = [GradNormMonitor()]
    with Guardian(model, optimizer, guards=guards, summary=False, sinks=[], reads=reads) as guardian:  # type: ignore[arg-type]  # parametrized
        for step in range(steps):
            x = torch.randn(32, 8)
            body(step, model, optimizer, scaler, F.mse_loss(model(x), x.sum(1, keepdim=True)))
    return list(guardian.findings)


def clipped_scaled(_: int, model: nn.Module, optimizer: Optimizer, scaler: GradScaler, loss: Tensor) -> None:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    clip(model)
    scaler.step(optimizer)
    scaler.update()


def test_clipping_before_unscale_is_told_and_nothing_else(reads: str) -> None:
    (finding,) = train(clipped_scaled, reads, steps=120)
    assert (finding.code, finding.severity, finding.step) == ("GG210", Severity.WARNING, 2)
    assert finding.evidence["scale"] == 65536.0
    assert finding.evidence["applied"] == pytest.approx(1.0 / 65536.0, rel=1e-3)
    assert "unscale_" in finding.causes[0]


@pytest.mark.parametrize("make", [SGD, Adam])
def test_a_plain_step_on_scaled_gradients_is_told_before_it_is_made(reads: str, make: type[Optimizer]) -> None:
    def body(_: int, model: nn.Module, optimizer: Optimizer, scaler: GradScaler, loss: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        optimizer.step()

    finding = train(body, reads, lr=1e-7, make=make)[0]
    assert (finding.code, finding.severity, finding.step) == ("GG211", Severity.ERROR, 0)
    assert finding.causes[0].startswith("optimizer.step() stands where scaler.step")


def test_both_steps_on_the_same_gradients_are_told(reads: str) -> None:
    def body(_: int, model: nn.Module, optimizer: Optimizer, scaler: GradScaler, loss: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        optimizer.step()
        scaler.update()

    (finding,) = train(body, reads)
    assert (finding.code, finding.step) == ("GG211", 5)
    assert "both stand in the loop" in finding.causes[0]


@pytest.mark.parametrize("unscale", [False, True])
def test_a_loss_that_was_not_scaled_is_told(reads: str, unscale: bool) -> None:
    def body(_: int, model: nn.Module, optimizer: Optimizer, scaler: GradScaler, loss: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss)
        loss.backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    (finding,) = train(body, reads, make=Adam)
    assert (finding.code, finding.severity, finding.step) == ("GG212", Severity.ERROR, 2)
    assert "scaler.scale(loss).backward()" in finding.causes[0]


def plain(_: int, model: nn.Module, optimizer: Optimizer, scaler: GradScaler, loss: Tensor) -> None:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def unscaled_and_clipped(_: int, model: nn.Module, optimizer: Optimizer, scaler: GradScaler, loss: Tensor) -> None:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip(model)
    scaler.step(optimizer)
    scaler.update()


def accumulating(step: int, model: nn.Module, optimizer: Optimizer, scaler: GradScaler, loss: Tensor) -> None:
    (scaler.scale(loss) / 4).backward()
    if step % 4 == 3:
        scaler.unscale_(optimizer)
        clip(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def divided_by_tokens(step: int, model: nn.Module, optimizer: Optimizer, scaler: GradScaler, loss: Tensor) -> None:
    optimizer.zero_grad()
    scaler.scale(loss * 7).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(7)
    scaler.step(optimizer)
    scaler.update()


def divided_by_hand(step: int, model: nn.Module, optimizer: Optimizer, scaler: GradScaler, loss: Tensor) -> None:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(scaler.get_scale())
    clip(model)
    optimizer.step()


def skipping(step: int, model: nn.Module, optimizer: Optimizer, scaler: GradScaler, loss: Tensor) -> None:
    if step == 1:
        scaler.update(2.0**127)
    plain(step, model, optimizer, scaler, loss)


def not_scaled_at_all(step: int, model: nn.Module, optimizer: Optimizer, scaler: GradScaler, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    clip(model, 10.0)
    optimizer.step()


@pytest.mark.parametrize(
    "body",
    [
        plain,
        unscaled_and_clipped,
        accumulating,
        divided_by_tokens,
        divided_by_hand,
        skipping,
        not_scaled_at_all,
    ],
)
def test_healthy_orders_are_silent(reads: str, body: Body) -> None:
    assert [f.code for f in train(body, reads, steps=40)] == []


@pytest.mark.parametrize("both_first", [False, True])
def test_two_optimizers_with_one_scaler_are_silent(reads: str, both_first: bool) -> None:
    gan = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
    optimizers = [SGD(gan[key].parameters(), lr=1e-3) for key in ("g", "d")]
    scaler = GradScaler("cpu")
    guards = [GradNormMonitor()]
    with Guardian(gan, optimizers, guards=guards, summary=False, sinks=[], reads=reads) as guardian:  # type: ignore[arg-type]  # parametrized
        for _ in range(30):
            for optimizer in optimizers:
                optimizer.zero_grad()
            x = torch.randn(8, 4)
            losses = [gan["g"](x).square().mean(), gan["d"](x).square().mean()]
            if both_first:
                for loss in losses:
                    scaler.scale(loss).backward()
                for optimizer in optimizers:
                    scaler.step(optimizer)
            else:
                for loss, optimizer in zip(losses, optimizers, strict=True):
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
            scaler.update()
    assert not guardian.findings


@pytest.mark.parametrize("scaled_first", [False, True])
def test_one_scaled_and_one_plain_optimizer_are_silent(reads: str, scaled_first: bool) -> None:
    gan = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
    g_opt, d_opt = (SGD(gan[key].parameters(), lr=1e-3) for key in ("g", "d"))
    scaler = GradScaler("cpu")
    guards = [GradNormMonitor()]
    with Guardian(gan, [g_opt, d_opt], guards=guards, summary=False, sinks=[], reads=reads) as guardian:  # type: ignore[arg-type]  # parametrized
        for _ in range(30):
            g_opt.zero_grad()
            d_opt.zero_grad()
            x = torch.randn(8, 4)
            losses = {key: gan[key](x).square().mean() for key in ("g", "d")}
            for key in ("g", "d") if scaled_first else ("d", "g"):
                (scaler.scale(losses[key]) if key == "g" else losses[key]).backward()
            d_opt.step()
            scaler.step(g_opt)
            scaler.update()
    assert not guardian.findings
