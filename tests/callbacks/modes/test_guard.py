"""EvalModeAssert: training in eval mode, what stays over a resume, and nothing after the end."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from gpt_guard.callbacks.modes.guard import EvalModeAssert
from gpt_guard.guardian import Guardian
from gpt_guard.records import Severity

from .loops import Run, validate


def test_training_in_eval_mode_from_the_start() -> None:
    run = Run()
    run.model.eval()
    (found,) = run.watch(lambda _: run.train(5))
    assert (found.code, found.step, found.module) == ("GG502", 0, "1")
    assert found.evidence["count"] == 2
    assert found.causes[0].startswith("model.train() is never called")


def test_an_evaluation_before_the_first_step_that_is_never_undone() -> None:
    run = Run()

    def loop(guardian: Guardian) -> None:
        run.model.eval()
        validate(run.model)
        run.train(5)

    (found,) = run.watch(loop)
    assert (found.code, found.step) == ("GG502", 0)
    assert found.causes[0].startswith("An evaluation or a sample before training")
    assert found.where is not None
    assert found.where.text == "run.model.eval()"


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


def test_what_was_seen_before_a_resume_still_counts() -> None:
    run = Run()
    first = Guardian(run.model, run.optimizers, guards=[run.guard], sinks=[])
    with first:
        run.train(3)
    guard = EvalModeAssert()
    second = Guardian(run.model, run.optimizers, guards=[guard], sinks=[])
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
    run.guard.detach()
    assert not run.model._forward_pre_hooks
