"""EvalModeAssert: forwards without gradients in training mode that are meant so, and faults that look alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import update_bn

from gpt_guard.callbacks.modes.eval_mode import EvalModeAssert
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2))
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.enc(x))
        return out


class Run:
    """A model in training, with one optimizer or several."""

    def __init__(self, model: nn.Module | None = None, optimizers: int = 1) -> None:
        self.model = model or net()
        parameters = list(self.model.parameters())
        self.optimizers: list[Optimizer] = [SGD(parameters[part::optimizers], lr=0.01) for part in range(optimizers)]

    def train(self, steps: int = 1, *, before: Callable[[], object] | None = None, micro_batches: int = 1) -> None:
        for _ in range(steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            for _ in range(micro_batches):
                if before is not None:
                    before()
                x = torch.randn(8, 4)
                functional.mse_loss(self.model(x), x.sum(1, keepdim=True)).backward()
            for optimizer in self.optimizers:
                optimizer.step()

    def sample(self, batches: int = 1) -> None:
        with torch.no_grad():
            for _ in range(batches):
                self.model(torch.randn(8, 4))

    def watch(self, loop: Callable[[Guardian], object]) -> list[Finding]:
        guardian = Guardian(self.model, self.optimizers, guards=[EvalModeAssert()], sinks=[])
        with guardian:
            loop(guardian)
        return list(guardian.findings)


def told(found: Iterable[Finding]) -> list[tuple[str, Severity, int | None]]:
    return [(each.code, each.severity, each.step) for each in found]


# Statistics computed anew.


def test_update_bn_is_quiet() -> None:
    run = Run()

    def loop(_: Guardian) -> None:
        run.train(5)
        update_bn([(torch.randn(8, 4),) for _ in range(5)], run.model)
        run.model.eval()
        run.sample(3)

    assert run.watch(loop) == []


def test_a_momentum_that_is_always_none_excuses_nothing() -> None:
    model = net()
    vars(model[1])["momentum"] = None
    run = Run(model)

    def loop(_: Guardian) -> None:
        run.train(5)
        run.sample(3)

    assert told(run.watch(loop)) == [("GG501", Severity.WARNING, 5)]


# Modules put back on purpose.


def put_back(model: nn.Module, kind: type[nn.Module]) -> None:
    model.eval()
    for module in model.modules():
        if isinstance(module, kind):
            module.train()


@pytest.mark.parametrize("kind", [nn.Dropout, nn.BatchNorm1d])
def test_single_layers_put_back_in_an_evaluated_model_are_worth_knowing(kind: type[nn.Module]) -> None:
    run = Run()

    def loop(_: Guardian) -> None:
        run.train(5)
        put_back(run.model, kind)
        run.sample(10)

    (found,) = run.watch(loop)
    assert (found.code, found.severity, found.step) == ("GG501", Severity.INFO, 5)
    assert "seems to be meant" in found.seen
    assert "Monte Carlo dropout" in found.causes[0]


def test_a_part_put_back_is_no_single_layer() -> None:
    run = Run(Halves())

    def loop(_: Guardian) -> None:
        run.train(5)
        run.model.eval()
        run.model.get_submodule("head").train()
        run.sample(2)

    (found,) = run.watch(loop)
    assert (found.severity, found.module) == (Severity.WARNING, "head.0")
    assert "model.head.train() was called" in found.seen


def test_what_was_not_meant_is_told_after_what_was() -> None:
    run = Run()

    def loop(_: Guardian) -> None:
        run.train(5)
        put_back(run.model, nn.Dropout)
        run.sample(2)
        run.model.train()
        run.train(3)
        run.model.get_submodule("1").eval()
        run.sample(2)

    assert told(run.watch(loop)) == [("GG501", Severity.INFO, 5), ("GG501", Severity.WARNING, 8)]


def test_the_call_that_is_named_is_about_the_module_that_is_named() -> None:
    run = Run(Halves())

    def half() -> None:
        run.model.get_submodule("enc").eval()
        run.sample()
        run.model.get_submodule("enc").train()

    def loop(_: Guardian) -> None:
        for _epoch in range(3):
            run.train(5)
            half()

    (found,) = run.watch(loop)
    assert (found.module, found.step) == ("head.0", 5)
    assert "model.enc" not in found.seen
    assert "Nobody called .eval() on it since" in found.seen


# Pseudo-labels.


@pytest.mark.parametrize(("views", "micro_batches", "optimizers"), [(1, 1, 1), (2, 1, 1), (1, 4, 1), (1, 1, 2)])
def test_pseudo_labels_in_each_step_are_worth_knowing(views: int, micro_batches: int, optimizers: int) -> None:
    run = Run(optimizers=optimizers)
    found = run.watch(lambda _: run.train(10, before=lambda: run.sample(views), micro_batches=micro_batches))
    assert [(each.code, each.severity) for each in found] == [("GG501", Severity.INFO)]
    assert "part of the algorithm" in found[0].seen


def test_a_validation_between_pseudo_labels_is_told() -> None:
    run = Run()

    def loop(_: Guardian) -> None:
        for _epoch in range(3):
            run.train(5, before=run.sample)
            run.sample(4)

    assert told(run.watch(loop)) == [("GG501", Severity.WARNING, 5)]


def test_a_single_validation_between_pseudo_labels_is_told() -> None:
    run = Run()

    def loop(_: Guardian) -> None:
        run.train(5, before=run.sample)
        run.sample()
        run.train(5, before=run.sample)

    assert told(run.watch(loop)) == [("GG501", Severity.WARNING, 5)]


def test_a_validation_after_each_step_is_told() -> None:
    run = Run()

    def loop(_: Guardian) -> None:
        for _step in range(10):
            run.train()
            run.sample()

    assert told(run.watch(loop)) == [("GG501", Severity.WARNING, 1)]


def test_a_validation_before_and_after_each_step_is_told_at_the_end() -> None:
    run = Run()

    def loop(_: Guardian) -> None:
        run.sample()
        for _step in range(10):
            run.train()
            run.sample()

    assert told(run.watch(loop)) == [("GG501", Severity.WARNING, 10)]


def test_a_test_of_shapes_before_the_first_step_is_quiet() -> None:
    run = Run()

    def loop(_: Guardian) -> None:
        run.sample()
        run.train(5)

    assert run.watch(loop) == []


@pytest.mark.parametrize("batches", [2, 5])
def test_a_validation_before_the_first_step_is_told(batches: int) -> None:
    run = Run()

    def loop(_: Guardian) -> None:
        run.sample(batches)
        run.train(5)

    assert told(run.watch(loop)) == [("GG501", Severity.WARNING, 0)]


def test_a_script_that_only_evaluates_is_told() -> None:
    run = Run()
    found = told(run.watch(lambda _: run.sample(2)))
    assert [each for each in found if each[0] != "GG903"] == [("GG501", Severity.WARNING, 0)]


# Inside of `guardian.evaluating()`.


@pytest.mark.parametrize("part", ["", "1", "3"])
def test_training_mode_inside_evaluating_is_told_at_once(part: str) -> None:
    run = Run()
    seen: list[Any] = []

    def loop(guardian: Guardian) -> None:
        run.train(3)
        with guardian.evaluating() as model:
            run.sample()
            seen.append(len(guardian.findings))
            model.train()
            if part:
                model.eval()
                model.get_submodule("0").train()
                model.get_submodule(part).train()
            run.sample()
            seen.append(len(guardian.findings))
        run.train(3)

    (found,) = run.watch(loop)
    assert (found.code, found.severity, found.step) == ("GG501", Severity.WARNING, 3)
    assert "inside of guardian.evaluating()" in found.seen
    assert f"model{part and '.'}{part}.train() was called in `loop`" in found.seen
    assert seen == [0, 1]
