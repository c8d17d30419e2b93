"""Parts that are kept frozen: reached by a call of .train(), or frozen by a train() that nobody calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.callbacks.modes.frozen import FreezeInTrain
from gpt_guard.callbacks.modes.guard import EvalModeAssert
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


class Backbone(nn.Module):
    """Freezes its stem, and counts how often, when it is told to train."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.body = nn.Linear(8, 8)
        self.calls = 0

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.calls += 1
        self.stem.requires_grad_(False)
        self.stem.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(self.stem(x).relu())
        return out


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(x))
        return out


def asked(model: Tower, guard: FreezeInTrain, *, start_in_train: bool) -> tuple[Finding, ...]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if start_in_train:
        model.train()
    with Guardian(model, optimizer, guards=[guard], sinks=[]) as guardian:
        for _ in range(5):
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(6, 4)), torch.ones(6, 2)).backward()
            optimizer.step()
    return guardian.findings


def test_a_part_that_train_would_freeze_is_told_in_the_first_step() -> None:
    (found,) = asked(Tower(), FreezeInTrain(), start_in_train=False)
    assert (found.code, found.step, found.module, found.module_class) == ("GG511", 0, "backbone", "Backbone")
    assert found.evidence["parameters"] == ["backbone.stem.bias", "backbone.stem.weight"]


def test_a_loop_that_calls_train_is_silent() -> None:
    assert asked(Tower(), FreezeInTrain(), start_in_train=True) == ()


def test_asking_leaves_no_trace() -> None:
    def weights(guarded: bool) -> tuple[list[Tensor], int, list[bool]]:
        torch.manual_seed(0)
        model = Tower()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        guards = [FreezeInTrain()] if guarded else []
        with Guardian(model, optimizer, guards=guards, sinks=[]):
            for _ in range(4):
                optimizer.zero_grad()
                F.mse_loss(model(torch.randn(6, 4)), torch.ones(6, 2)).backward()
                optimizer.step()
        return list(model.parameters()), model.backbone.calls, [each.training for each in model.modules()]

    (asked, calls, modes), (plain, plain_calls, plain_modes) = weights(True), weights(False)
    assert all(torch.equal(mine, other) for mine, other in zip(asked, plain, strict=True))
    assert all(each.requires_grad for each in asked)
    assert (calls, modes) == (plain_calls, plain_modes)


def test_it_is_said_once_over_a_resume() -> None:
    guard = FreezeInTrain()
    asked(Tower(), guard, start_in_train=False)
    again = FreezeInTrain()
    again.load_state_dict(guard.state_dict())
    assert asked(Tower(), again, start_in_train=False) == ()


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.TransformerEncoderLayer(4, 1, 8)])
def test_models_without_a_train_of_their_own_are_not_asked(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[FreezeInTrain()], sinks=[]) as guardian:
        width = 2 if isinstance(model, nn.Linear) else 4
        model(torch.ones(1, 1, width)).sum().backward()
        optimizer.step()
    assert guardian.report().probes == {}


class TrainsItself(nn.Module):
    """Has methods of its own by the name of train(): with epochs, with a batch, with a switch for the log."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.stem(x).relu())
        return out

    def fit(self) -> None:
        self.train()

    def update(self) -> None:
        self.steps += 1
        self.optimizer.zero_grad()
        F.mse_loss(self(torch.randn(6, 4)), torch.ones(6, 2)).backward()
        self.optimizer.step()


class ByEpochs(TrainsItself):
    def train(self, epochs: Any = 5) -> Any:
        self.stem.train()
        for _ in range(epochs):
            self.update()


class ByBatch(TrainsItself):
    def train(self, positive: Any = None, negative: Any = None, *more: Any) -> Any:
        if positive is None or negative is None:
            raise TypeError("what is missing is a batch")
        self.update()

    def fit(self) -> None:
        self.train(1, 2)


class WithALog(TrainsItself):
    def train(self, log: bool = True) -> Any:
        for _ in range(5):
            self.update()


class ByWord(TrainsItself):
    """The name of the argument alone is no mode."""

    def train(self, mode: Any = "full") -> Any:
        self.stem.training = self.head.training = True
        for _ in range(5 if mode == "full" else 1):
            self.update()


class Around(nn.Module):
    """Its own train() is a mode's, and reaches a part whose train() is not."""

    def __init__(self, part: TrainsItself) -> None:
        super().__init__()
        self.part, self.optimizer = part, part.optimizer

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(x)
        return out


@pytest.mark.parametrize("kind", [ByEpochs, ByBatch, WithALog, ByWord])
@pytest.mark.parametrize("around", [False, True], ids=["alone", "inside of another"])
def test_a_train_that_trains_is_never_called(kind: type[TrainsItself], around: bool) -> None:
    def trained(guarded: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model = kind()
        whole: nn.Module = Around(model) if around else model
        if guarded:
            with Guardian(whole, model.optimizer, sinks=[]) as guardian:
                model.fit()
            assert [each for each in guardian.findings if each.code in ("GG511", "GG906")] == []
        else:
            model.fit()
        return list(model.parameters()), model.steps

    (weights, steps), (plain, plain_steps) = trained(True), trained(False)
    assert steps == plain_steps
    assert all(torch.equal(mine, other) for mine, other in zip(weights, plain, strict=True))


class BySwitch(Backbone):
    """Calls its switch by another name."""

    def train(self, flag: bool = True) -> Self:
        return super().train(flag)


class PassedOn(Backbone):
    def train(self, *args: Any, **kwargs: Any) -> Self:
        return super().train(*args, **kwargs)


@pytest.mark.parametrize("kind", [BySwitch, PassedOn])
def test_a_train_that_hands_a_mode_on_is_asked(kind: type[Backbone]) -> None:
    model = Tower()
    model.backbone = kind()
    (found,) = asked(model, FreezeInTrain(), start_in_train=False)
    assert (found.code, found.module, found.module_class) == ("GG511", "backbone", kind.__name__)


class Refuses(Backbone):
    def train(self, mode: bool = True) -> Self:
        if self.stem.weight.grad is not None:
            raise RuntimeError("not in the middle of a run")
        return super().train(mode)


def test_a_train_that_raises_is_named_as_unseen() -> None:
    model, guard = Tower(), FreezeInTrain()
    model.backbone = Refuses()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, guards=[guard], sinks=[]) as guardian:
        F.mse_loss(model(torch.randn(6, 4)), torch.ones(6, 2)).backward()
        optimizer.step()
    assert guardian.findings == ()
    assert list(guard.blind_spots()) == ["what train() of Refuses freezes: it raised RuntimeError"]
