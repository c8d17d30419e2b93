"""Guardian round loops as people write them: nothing in the loop is changed for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.callbacks.finite.guard import FiniteGuard
from gpt_guard.guardian import Guardian

INPUTS, CLASSES, ROWS = 6, 3, 8
Wrap = Callable[[Tensor, Tensor], Any]


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Classifier(nn.Module):
    """Returns its logits and loss in whatever shape `wrap` gives them."""

    def __init__(self, wrap: Wrap, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(INPUTS, width), nn.ReLU(inplace=True), nn.Linear(width, CLASSES))
        self.wrap = wrap

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.body(x)
        return self.wrap(logits, F.cross_entropy(logits, y))


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, INPUTS)
    return x, x[:, :CLASSES].argmax(1)


def guard(model: nn.Module, optimizer: Any, **options: Any) -> Guardian:
    return Guardian(model, optimizer, sinks=[], **options)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def silent(guardian: Guardian) -> bool:
    assert not [(each.code, each.seen) for each in guardian.findings]
    return True


RETURNS: dict[str, tuple[Wrap, Callable[[Any, Tensor], Tensor]]] = {
    "logits": (lambda logits, loss: logits, lambda out, y: F.cross_entropy(out, y)),
    "logits and loss": (lambda logits, loss: (logits, loss), lambda out, y: out[1]),
    "loss and logits": (lambda logits, loss: [loss, logits], lambda out, y: out[0]),
    "dict": (lambda logits, loss: {"loss": loss, "logits": logits}, lambda out, y: out["loss"]),
    "dataclass": (lambda logits, loss: Output(loss, logits), lambda out, y: out.loss),
    "namespace": (lambda logits, loss: SimpleNamespace(loss=loss, logits=logits), lambda out, y: out.loss),
    "nested": (
        lambda logits, loss: {"a": [(logits, {"l": (loss, None, "text")})]},
        lambda out, y: out["a"][0][1]["l"][0],
    ),
    "loss alone": (lambda logits, loss: loss, lambda out, y: out),
    "loss per row": (lambda logits, loss: logits, lambda out, y: F.cross_entropy(out, y, reduction="none").mean()),
}


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("kind", RETURNS)
def test_whatever_the_model_returns(kind: str, reads: Any) -> None:
    wrap, loss_of = RETURNS[kind]
    model = Classifier(wrap)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    with guard(model, optimizer, reads=reads) as guardian:
        for _ in range(4):
            x, y = batch()
            optimizer.zero_grad()
            loss = loss_of(model(x, y), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert guardian.step == 4
    assert guardian.latest is not None
    assert guardian.latest.loss == pytest.approx(losses[-1])
    assert guardian.latest.samples == 4 * ROWS
    assert silent(guardian)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("as_keyword", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_closures_are_measured_where_their_gradients_are_complete(kind: Any, as_keyword: bool) -> None:
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.1)
    x, y = batch()
    calls: list[float] = []
    norms: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        for part in (loss / 2, loss / 2):
            part.backward(retain_graph=True)
        calls.append(loss.item())
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        return loss

    with guard(model, optimizer) as guardian:
        for _ in range(3):
            start = len(calls)
            returned = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
            assert returned.item() == calls[start]
            assert guardian.latest is not None
            assert guardian.latest.loss == pytest.approx(calls[start])
            assert guardian.latest.grad_norm == pytest.approx(norms[start])
            assert guardian.latest.micro_batches == 2
    assert guardian.step == 3
    assert silent(guardian)


@pytest.mark.parametrize("clears", [True, False])
def test_a_closure_without_a_backward_is_a_step_like_any_other(clears: bool) -> None:
    """As Lightning steps in manual optimisation: with a closure that does nothing."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guard(model, optimizer) as guardian:
        for _ in range(6):
            if clears:
                optimizer.zero_grad()
            x, y = batch()
            F.cross_entropy(model(x), y).backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.step(lambda: None)
            assert guardian.latest is not None
            assert guardian.latest.grad_norm == pytest.approx(float(norm))
    assert [found.code for found in guardian.findings] == ([] if clears else ["GG209"])


def test_a_closure_that_raises_leaves_the_next_step_right() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def broken() -> float:
        raise OSError("no more data")

    with guard(model, optimizer) as guardian:
        with pytest.raises(OSError, match="no more data"):
            optimizer.step(broken)
        loss = one_step(model, optimizer)
    assert guardian.step == 1
    assert guardian.latest is not None
    assert guardian.latest.loss == pytest.approx(loss.item())


def test_several_losses_and_backward_calls() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()
    with guard(model, optimizer) as guardian:
        logits = model(x)
        first, second = F.cross_entropy(logits, y), logits.pow(2).mean()
        torch.autograd.backward([first, second])
        optimizer.step()
        assert guardian.latest is not None
        assert guardian.latest.loss == pytest.approx(first.item() + second.item())
        assert guardian.latest.micro_batches == 1

        optimizer.zero_grad()
        logits = model(x)
        first, second = F.cross_entropy(logits, y), logits.pow(2).mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        assert guardian.latest.loss == pytest.approx(first.item() + second.item())
        assert guardian.latest.micro_batches == 2


def test_backward_from_a_gradient_edge_and_of_a_vector() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guard(model, optimizer) as guardian:
        edge = torch.autograd.graph.get_gradient_edge(model(batch()[0]).sum())
        torch.autograd.backward(edge, torch.ones(()))
        optimizer.step()
        assert guardian.latest is not None
        assert guardian.latest.loss is None
        optimizer.zero_grad()
        model(batch()[0]).backward(torch.ones(ROWS, CLASSES))
        optimizer.step()
        assert guardian.latest.loss is None
        assert guardian.latest.grad_norm is not None
    assert guardian.step == 2


def test_gradient_penalty_is_not_a_micro_batch() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()
    x.requires_grad_()
    with guard(model, optimizer) as guardian:
        loss = F.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        total = loss + slope.pow(2).sum()
        total.backward()
        optimizer.step()
    assert guardian.latest is not None
    assert guardian.latest.micro_batches == 1
    assert guardian.latest.loss == pytest.approx(total.item())
    assert silent(guardian)


def test_only_methods_of_the_model_are_called() -> None:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(INPUTS, 2), nn.Linear(2, INPUTS)

        def encode(self, x: Tensor) -> Any:
            return self.encoder(x)

    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with guard(model, optimizer, guards=[FiniteGuard()]) as guardian:
        for _ in range(20):
            optimizer.zero_grad()
            x, _ = batch()
            F.mse_loss(model.decoder(model.encode(x)), x).backward()
            optimizer.step()
        session = guardian._session
        assert session is not None
        # What is noted of a forward goes with the step, also where no call of the model begins the next one.
        assert not session.watch.tap.order
    assert silent(guardian)
