"""Forwards without gradients in training mode: evaluations that forgot eval(), and forwards that are meant so."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint

from gpt_guard.callbacks.modes.guard import EvalModeAssert
from gpt_guard.errors import ModeError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity

from .loops import Run, net, validate


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2))
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.enc(x))
        return out


@pytest.mark.parametrize("batches", [1, 3])
def test_validation_in_training_mode(batches: int) -> None:
    run = Run()

    def loop(guardian: Guardian) -> None:
        run.train(3)
        validate(run.model, batches)
        run.train(3)

    (found,) = run.watch(loop)
    assert (found.code, found.step, found.evaluation, found.module) == ("GG501", 3, True, "1")
    assert found.evidence["modules"] == ["1", "3"]
    assert "Dropout p=0.2" in found.seen
    assert "changed the running statistics of 1 of them" in found.seen
    assert found.where is not None
    assert found.where.function == "validate"
    assert found.guard == "EvalModeAssert"


def test_the_last_validation_is_told_at_exit() -> None:
    run = Run()

    def loop(guardian: Guardian) -> None:
        run.train(3)
        validate(run.model)

    assert [found.code for found in run.watch(loop)] == ["GG501"]


def test_who_called_train_is_named() -> None:
    run = Run()

    def too_early() -> None:
        run.model.train()

    def loop(guardian: Guardian) -> None:
        run.train()
        run.model.eval()
        too_early()
        validate(run.model, 2)

    (found,) = run.watch(loop)
    assert "model.train() was called in `too_early`" in found.seen


def test_evaluation_without_optimizer_is_told_at_once() -> None:
    model = net()
    guardian = Guardian(model, None, guards=[EvalModeAssert()], sinks=[], policy={"GG501": "halt"})
    with guardian, pytest.raises(ModeError, match="training mode"):
        validate(model)


def test_inference_mode_counts_as_evaluation() -> None:
    run = Run()

    def loop(guardian: Guardian) -> None:
        run.train()
        with torch.inference_mode():
            run.model(torch.randn(8, 4))
            run.model(torch.randn(8, 4))

    assert [found.code for found in run.watch(loop)] == ["GG501"]


def test_evaluation_in_eval_mode_is_quiet() -> None:
    run = Run()

    def loop(guardian: Guardian) -> None:
        validate(run.model)
        for _ in range(3):
            run.train()
            with guardian.evaluating():
                run.model(torch.randn(8, 4))
            run.model.eval()
            validate(run.model, 2)
            run.model.train()

    assert run.watch(loop) == []


def test_a_model_in_which_mode_changes_nothing_is_quiet() -> None:
    run = Run(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.0), nn.Linear(8, 1)))

    def loop(guardian: Guardian) -> None:
        run.train()
        validate(run.model, 3)
        run.model.eval()
        run.train()

    assert run.watch(loop) == []


def test_monte_carlo_dropout_can_be_allowed() -> None:
    run = Run(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)), allow=["1"])

    def loop(guardian: Guardian) -> None:
        run.train()
        validate(run.model, 10)

    assert run.watch(loop) == []


def test_a_generator_sampled_for_its_critic_is_quiet() -> None:
    generator, critic = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), net()
    opt_g, opt_c = torch.optim.Adam(generator.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)

    def loop() -> None:
        for step in range(6):
            for _ in range(3):
                with torch.no_grad():
                    fake = generator(torch.randn(8, 4))
                opt_c.zero_grad()
                (critic(fake).mean() - critic(torch.randn(8, 4)).mean()).backward()
                opt_c.step()
            if step % 2:
                opt_g.zero_grad()
                critic(generator(torch.randn(8, 4))).mean().backward()
                opt_g.step()

    with (
        Guardian(generator, opt_g, guards=[EvalModeAssert()], sinks=[]) as first,
        Guardian(critic, opt_c, guards=[EvalModeAssert()], sinks=[]) as second,
    ):
        loop()
    assert list(first.findings) == []
    assert list(second.findings) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_the_whole_model_is_quiet(reentrant: bool) -> None:
    run = Run()

    def loop(guardian: Guardian) -> None:
        for _ in range(5):
            x = torch.randn(8, 4, requires_grad=True)
            run.optimizers[0].zero_grad()
            checkpoint(run.model, x, use_reentrant=reentrant).mean().backward()
            run.optimizers[0].step()

    assert run.watch(loop) == []


def test_an_averaged_copy_in_training_mode_is_not_ours() -> None:
    run = Run()
    average = copy.deepcopy(run.model)

    def loop(guardian: Guardian) -> None:
        for _ in range(3):
            run.train()
            validate(average, 2)

    assert run.watch(loop) == []


def listed(found: Iterable[Finding]) -> list[tuple[str, Severity, int | None]]:
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

    assert listed(run.watch(loop)) == [("GG501", Severity.WARNING, 5)]


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

    assert listed(run.watch(loop)) == [("GG501", Severity.INFO, 5), ("GG501", Severity.WARNING, 8)]


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

    assert listed(run.watch(loop)) == [("GG501", Severity.WARNING, 5)]


def test_a_single_validation_between_pseudo_labels_is_told() -> None:
    run = Run()

    def loop(_: Guardian) -> None:
        run.train(5, before=run.sample)
        run.sample()
        run.train(5, before=run.sample)

    assert listed(run.watch(loop)) == [("GG501", Severity.WARNING, 5)]


def test_a_validation_after_each_step_is_told() -> None:
    run = Run()

    def loop(_: Guardian) -> None:
        for _step in range(10):
            run.train()
            run.sample()

    assert listed(run.watch(loop)) == [("GG501", Severity.WARNING, 1)]


def test_a_validation_before_and_after_each_step_is_told_at_the_end() -> None:
    run = Run()

    def loop(_: Guardian) -> None:
        run.sample()
        for _step in range(10):
            run.train()
            run.sample()

    assert listed(run.watch(loop)) == [("GG501", Severity.WARNING, 10)]


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

    assert listed(run.watch(loop)) == [("GG501", Severity.WARNING, 0)]


def test_a_script_that_only_evaluates_is_told() -> None:
    run = Run()
    found = listed(run.watch(lambda _: run.sample(2)))
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
