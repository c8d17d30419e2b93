from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gpt_guard.callbacks.modes.eval_mode import EvalModeAssert
from gpt_guard.callbacks.modes.mode_sensitive import sensitive_modules
from gpt_guard.errors import ModeError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity


def net(p: float = 0.2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(p), nn.Linear(8, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()


def validate(model: nn.Module, batches: int = 1) -> None:
    with torch.no_grad():
        for _ in range(batches):
            model(torch.randn(8, 4))


class Run:
    """A model with its optimizer, and what a loop over them lets the guard say."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        self.model = model or net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.guard = EvalModeAssert(**options)

    def train(self, steps: int = 1) -> None:
        train(self.model, self.optimizer, steps)

    def watch(self, loop: Callable[[Guardian], None]) -> list[Finding]:
        guardian = Guardian(self.model, self.optimizer, guards=[self.guard], sinks=[])
        with guardian:
            loop(guardian)
        return list(guardian.findings)


# GG501: evaluation in training mode.


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
            run.optimizer.zero_grad()
            checkpoint(run.model, x, use_reentrant=reentrant).mean().backward()
            run.optimizer.step()

    assert run.watch(loop) == []


def test_an_averaged_copy_in_training_mode_is_not_ours() -> None:
    run = Run()
    average = copy.deepcopy(run.model)

    def loop(guardian: Guardian) -> None:
        for _ in range(3):
            run.train()
            validate(average, 2)

    assert run.watch(loop) == []


# GG502 to GG504: training in eval mode.


def test_training_in_eval_mode_from_the_start() -> None:
    run = Run()
    run.model.eval()
    (found,) = run.watch(lambda _: run.train(5))
    assert (found.code, found.step, found.module) == ("GG502", 0, "1")
    assert found.evidence["count"] == 2


def test_eval_that_is_never_undone() -> None:
    run = Run()

    def evaluate() -> None:
        run.model.eval()
        validate(run.model)

    def loop(guardian: Guardian) -> None:
        run.train(10)
        evaluate()
        run.train(5)

    (found,) = run.watch(loop)
    assert (found.code, found.step) == ("GG503", 10)
    assert "2 of 2 mode-sensitive modules in eval mode" in found.seen
    assert "They were in training mode until step 9; model.eval() was called in `evaluate`" in found.seen
    assert found.where is not None
    assert found.where.text == "run.model.eval()"
    assert found.where.file == __file__


def test_a_gradient_attack_in_eval_mode_is_quiet() -> None:
    run = Run()

    def loop(guardian: Guardian) -> None:
        for _ in range(4):
            run.model.eval()
            x = torch.randn(8, 4, requires_grad=True)
            run.model(x).mean().backward()
            run.model.train()
            run.train()

    assert run.watch(loop) == []


def test_a_part_frozen_from_the_start_is_quiet() -> None:
    run = Run()
    run.model.get_submodule("1").eval()
    assert run.watch(lambda _: run.train(5)) == []


def test_all_sensitive_parts_frozen_one_by_one_are_quiet() -> None:
    run = Run()
    run.model.get_submodule("1").eval()
    run.model.get_submodule("3").eval()
    assert run.watch(lambda _: run.train(5)) == []


@pytest.mark.parametrize("allow", ["1", ()])
def test_a_part_set_to_eval_later_is_worth_knowing(allow: Any) -> None:
    run = Run(allow=allow)

    def loop(guardian: Guardian) -> None:
        run.train(3)
        run.model.get_submodule("1").eval()
        run.train(3)

    found = run.watch(loop)
    if allow:
        assert found == []
    else:
        assert [(each.code, each.severity, each.step, each.module) for each in found] == [
            ("GG504", Severity.INFO, 3, "1")
        ]
        assert "model.1.eval() was called" in found[0].seen
        assert ". It was in training mode until step" in found[0].seen


def test_generation_that_restores_the_mode_is_quiet() -> None:
    run = Run()

    def sample() -> None:
        was = run.model.training
        run.model.eval()
        validate(run.model, 5)
        run.model.train(was)

    def loop(guardian: Guardian) -> None:
        for _ in range(5):
            sample()
            run.train()

    assert run.watch(loop) == []


# Leaving and resuming.


def test_what_was_seen_before_a_resume_still_counts() -> None:
    run = Run()
    first = Guardian(run.model, run.optimizer, guards=[run.guard], sinks=[])
    with first:
        run.train(3)
    guard = EvalModeAssert()
    second = Guardian(run.model, run.optimizer, guards=[guard], sinks=[])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run.model.eval()
    with second:
        run.train(2)
    assert [(found.code, found.step) for found in second.findings] == [("GG503", 3)]
    assert "until step 2." in second.findings[0].seen


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_nothing_is_left_behind(error: type[Exception] | None) -> None:
    run = Run()

    def loop(guardian: Guardian) -> None:
        run.train()
        if error is not None:
            raise error

    try:
        run.watch(loop)
    except RuntimeError:
        assert error is not None
    assert run.guard._watch is None
    assert not run.guard._sensitive
    assert not run.guard._modules
    run.guard.detach()
    assert not run.model._forward_pre_hooks


# Which modules count.


class HandWritten(nn.Module):
    """Attention as many write it: a float, used as `dropout_p` in training mode."""

    def __init__(self, p: float, config: Any = None) -> None:
        super().__init__()
        self.dropout = p
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class NormOrder(nn.Module):
    """`p` is no probability of dropout here, and nothing asks for the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.p = 0.5

    def forward(self, x: Tensor) -> Tensor:
        order: Tensor = x.norm(self.p)
        return order


class FromConfig(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.config = type("Config", (), {})()
        self.config.attn_dropout = rate

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.config.attn_dropout if self.training else 0.0)


@pytest.mark.parametrize(
    ("module", "sensitive"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.AlphaDropout(0.1), True),
        (nn.BatchNorm1d(4), True),
        (nn.BatchNorm1d(4, track_running_stats=False), False),
        (nn.InstanceNorm1d(4), False),
        (nn.InstanceNorm1d(4, track_running_stats=True), True),
        (nn.LayerNorm(4), False),
        (nn.RReLU(), True),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.MultiheadAttention(4, 2), False),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.1), True),
        (nn.GRU(4, 4, num_layers=2), False),
        (HandWritten(0.1), True),
        (HandWritten(0.0), False),
        (NormOrder(), False),
        (FromConfig(0.1), True),
        (FromConfig(0.0), False),
    ],
)
def test_which_modules_count(module: nn.Module, sensitive: bool) -> None:
    assert bool(sensitive_modules(module)) is sensitive


def test_patterns_leave_modules_out() -> None:
    assert [each.path for each in sensitive_modules(net())] == ["1", "3"]
    assert [each.path for each in sensitive_modules(net(), ["1"])] == ["3"]
