"""A part that began in eval mode, and a call of .train() that reaches it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.callbacks.modes.eval_mode import EvalModeAssert
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding


class Tuned(nn.Module):
    """A pretrained part and a new head."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.back(x))
        return logits


def run(model: Tuned, after: Callable[[Tuned], object], **options: object) -> tuple[Finding, ...]:
    """Six steps; after the third the model is evaluated, and `after` sets its mode."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guards = [EvalModeAssert(allow=str(options["allow"]) if "allow" in options else ())]
    with Guardian(model, optimizer, guards=guards, sinks=[]) as guardian:
        for step in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
            optimizer.step()
            if step == 2:
                model.eval()
                with torch.no_grad():
                    model(torch.randn(8, 4))
                after(model)
    return guardian.findings


def frozen() -> Tuned:
    model = Tuned()
    model.back.eval().requires_grad_(False)
    return model


def kept_statistics() -> Tuned:
    model = Tuned()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    return model


def blanket(model: Tuned) -> None:
    model.train()


def restore(model: Tuned) -> None:
    model.train()
    model.back.eval()


def unfreeze(model: Tuned) -> None:
    model.requires_grad_(True)
    model.train()


@pytest.mark.parametrize("make", [frozen, kept_statistics])
def test_a_blanket_train_is_told_with_its_line(make: Callable[[], Tuned]) -> None:
    (found,) = run(make(), blanket)
    assert (found.code, found.step, found.module) == ("GG506", 3, "back.1")
    assert "model.train() was called" in found.seen
    assert found.where is not None
    assert found.where.text == "model.train()"
    assert found.evidence["statistics"] == 1
    assert ("parameters are frozen" in found.seen) == (make is frozen)


def part_again(model: Tuned) -> None:
    restore(model)
    model.back.train()


def rest_alone(model: Tuned) -> None:
    model.head.train()
    model.training = True


@pytest.mark.parametrize("after", [restore, unfreeze, part_again, rest_alone])
def test_what_is_meant_is_silent(after: Callable[[Tuned], object]) -> None:
    assert run(frozen(), after) == ()


def test_statistics_that_were_never_kept_are_silent() -> None:
    assert run(Tuned(), blanket) == ()


def test_a_part_whose_mode_is_allowed_is_silent() -> None:
    assert run(frozen(), blanket, allow="back.*") == ()


def test_each_module_keeps_its_mode_inside_of_evaluating() -> None:
    model = frozen()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, guards=[EvalModeAssert()], sinks=[]) as guardian:
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
            optimizer.step()
            with guardian.evaluating():
                model(torch.randn(8, 4))
    assert guardian.findings == ()


def run_from_the_top(model: Tuned, begin: Callable[[Tuned], object]) -> tuple[Finding, ...]:
    """The loop sets the mode before its very first step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with Guardian(model, optimizer, guards=[EvalModeAssert()], sinks=[]) as guardian:
        begin(model)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
            optimizer.step()
    return guardian.findings


def test_train_at_the_top_of_the_loop_is_told_in_the_first_step() -> None:
    (found,) = run_from_the_top(frozen(), blanket)
    assert (found.code, found.step, found.module) == ("GG506", 0, "back.1")
    assert "in eval mode on entry" in found.seen
    assert found.evidence["statistics"] == 1


def dropout_alone() -> Tuned:
    model = Tuned()
    model.back = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1)).eval().requires_grad_(False)
    return model


def loaded_whole() -> Tuned:
    model = frozen()
    model.eval()
    return model


@pytest.mark.parametrize(
    ("model", "begin"),
    [(frozen(), restore), (frozen(), unfreeze), (dropout_alone(), blanket), (loaded_whole(), blanket)],
    ids=["restored", "unfrozen", "dropout of a loaded part", "all in eval mode"],
)
def test_what_the_first_step_finds_as_it_is_meant_is_silent(model: Tuned, begin: Callable[[Tuned], object]) -> None:
    assert run_from_the_top(model, begin) == ()


class Taught(nn.Module):
    """A student beside its frozen teacher, which is asked without gradients, or with them."""

    def __init__(self, *, quiet: bool = True) -> None:
        super().__init__()
        self.student, self.teacher = (
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2)) for _ in range(2)
        )
        self.teacher.eval().requires_grad_(False)
        self.quiet = quiet

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.quiet):
            taught = self.teacher(x)
        logits: Tensor = self.student(x) + taught
        return logits


def taught(model: Taught, begin: Callable[[Taught], object]) -> tuple[Finding, ...]:
    optimizer = torch.optim.AdamW(model.student.parameters(), lr=1e-3)
    with Guardian(model, optimizer, guards=[EvalModeAssert()], sinks=[]) as guardian:
        begin(model)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
            optimizer.step()
    assert not model.teacher[1]._forward_pre_hooks
    return guardian.findings


def test_the_dropout_of_a_teacher_that_a_blanket_train_reaches_is_told() -> None:
    (found,) = taught(Taught(), lambda model: model.train())
    assert (found.code, found.step, found.module) == ("GG506", 0, "teacher.1")
    assert found.seen.startswith("1 mode-sensitive module was in eval mode on entry and is in training mode")
    assert found.seen.endswith(" Its parameters are frozen.")


@pytest.mark.parametrize(
    ("model", "begin"),
    [
        (Taught(), lambda model: model.student.train()),
        (Taught(), lambda model: model.teacher.train()),
        (Taught(quiet=False), lambda model: model.train()),
    ],
    ids=["student alone", "teacher on purpose", "gradients flow through it"],
)
def test_a_teacher_that_is_left_as_it_was_is_silent(model: Taught, begin: Callable[[Taught], object]) -> None:
    assert taught(model, begin) == ()


def test_no_hook_stays_where_nothing_is_trained() -> None:
    model = Taught()
    with Guardian(model, None, guards=[EvalModeAssert()], sinks=[], inspect_steps=0):
        pass
    assert not model.teacher[1]._forward_pre_hooks
