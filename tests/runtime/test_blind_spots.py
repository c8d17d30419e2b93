"""Steps, forwards and backward calls that the Guardian does not get to see: said at once, and once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer

from gpt_guard.callbacks.finite.guard import FiniteGuard
from gpt_guard.errors import GuardError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Moment, Severity


class Run:
    """A small model, its optimizer, and the micro-batches of a usual loop."""

    def __init__(self, **options: Any) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer: Optimizer = SGD(self.model.parameters(), lr=0.01)
        options.setdefault("guards", [FiniteGuard()])
        self.guardian = Guardian(self.model, self.optimizer, sinks=[], **options)

    def loss(self) -> Tensor:
        x = torch.randn(8, 4)
        return functional.mse_loss(self.model(x), x.sum(1, keepdim=True))

    def backward(self, times: int = 1) -> None:
        for _ in range(times):
            self.loss().backward()

    def steps(self, count: int, accumulate: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.backward(accumulate)
            self.optimizer.step()

    def watch(self, loop: Callable[[], None]) -> list[Finding]:
        with self.guardian:
            loop()
        return list(self.guardian.findings)


# GG903: another optimizer steps.


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_an_optimizer_made_again_is_noticed_while_the_run_goes_on(reads: str) -> None:
    run = Run(reads=reads)
    told: list[int] = []

    def loop() -> None:
        run.steps(20)
        run.optimizer = Adam(run.model.parameters(), lr=1e-3)
        for _ in range(60):
            run.steps(1)
            told.append(len(run.guardian.findings))

    (found,) = run.watch(loop)
    assert (found.code, found.severity, found.step, found.moment) == (
        "GG903",
        Severity.WARNING,
        20,
        Moment.AFTER_BACKWARD,
    )
    assert "backward calls reached the model since step 19" in found.seen
    assert "SGD) no longer steps" in found.seen
    assert "something else updates them" in found.seen
    assert "made again after the Guardian" in found.causes[0]
    assert found.where is not None
    assert found.where.function == "backward"
    assert told.index(1) < 20
    assert any("optimizer steps after step 19: 60 backward calls" in spot for spot in run.guardian.report().not_watched)


def test_an_optimizer_that_was_never_the_one_that_steps() -> None:
    run = Run()

    def loop() -> None:
        run.optimizer = SGD(run.model.parameters(), lr=0.01)
        run.steps(30)

    (found,) = run.watch(loop)
    assert (found.code, found.step, found.moment) == ("GG903", 0, Moment.AFTER_BACKWARD)
    assert "does not step" in found.seen


def test_a_nan_is_still_found_where_no_step_comes_to_read_it() -> None:
    run = Run(reads="per_step")

    def loop() -> None:
        run.steps(20)
        run.optimizer = Adam(run.model.parameters(), lr=1e-3)
        run.steps(30)
        with torch.no_grad():
            run.model.get_parameter("2.weight")[0, 3] = math.nan
        run.steps(11)
        raise AssertionError("the NaN went unseen")

    with pytest.raises(GuardError, match="2"):
        run.watch(loop)
    assert run.guardian.findings[0].code == "GG903"
    assert any(found.code.startswith("GG1") for found in run.guardian.findings)


# GG903: no step at all.


def test_a_step_that_is_no_longer_reached() -> None:
    run = Run()

    def loop() -> None:
        run.steps(2)
        run.backward(60)

    (found,) = run.watch(loop)
    assert (found.code, found.severity, found.step, found.moment) == ("GG903", Severity.WARNING, 2, Moment.EXIT)
    assert "60 backward calls reached the model since step 1" in found.seen
    assert "stay as they are" in found.seen


def test_a_long_run_that_no_longer_steps_is_told_before_its_end() -> None:
    run = Run()

    def loop() -> None:
        run.steps(2)
        run.backward(215)
        assert len(run.guardian.findings) == 1

    (found,) = run.watch(loop)
    assert (found.code, found.step, found.moment) == ("GG903", 2, Moment.AFTER_BACKWARD)


def test_a_scaler_that_is_never_updated() -> None:
    run = Run()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def loop() -> None:
        for _ in range(40):
            run.optimizer.zero_grad()
            scaler.scale(run.loss()).backward()
            try:
                scaler.step(run.optimizer)
            except RuntimeError:
                continue

    (found,) = run.watch(loop)
    assert (found.code, found.step) == ("GG903", 1)
    assert "scaler.step() was called on it 39 times" in found.seen
    assert "scaler.update() is left out" in found.causes[0]


def test_gradients_collected_after_training_are_worth_knowing_at_most() -> None:
    run = Run()

    def loop() -> None:
        run.steps(100)
        run.backward(60)

    assert [(found.code, found.severity) for found in run.watch(loop)] == [("GG903", Severity.INFO)]


# GG903: the healthy twins.


def accumulate(run: Run) -> None:
    run.steps(4, accumulate=64)


def accumulate_more_later(run: Run) -> None:
    for times in (4, 8, 16, 32):
        run.steps(4, accumulate=times)


def attack_the_inputs(run: Run) -> None:
    """Robust evaluation: twenty backward calls a batch, no step, in eval mode."""
    for _ in range(2):
        run.steps(20)
        run.model.eval()
        run.backward(250)
        run.model.train()


def skip(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1000)
    for _ in range(30):
        run.optimizer.zero_grad()
        scaler.scale(run.loss()).backward()
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(math.inf)
        scaler.step(run.optimizer)
        scaler.update(2.0)


def penalise(run: Run) -> None:
    """A gradient penalty goes through autograd.grad, and an ascent step in between changes the weights."""
    for _ in range(30):
        run.optimizer.zero_grad()
        run.backward()
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.add_(1e-3)
        run.backward()
        run.optimizer.step()


def minimise(run: Run) -> None:
    """One step of LBFGS evaluates its closure up to 40 times, and changes the weights in between."""
    optimizer = torch.optim.LBFGS(run.model.parameters(), max_iter=40, line_search_fn="strong_wolfe")
    run.guardian = Guardian(run.model, optimizer, guards=[FiniteGuard()], sinks=[])
    x = torch.randn(16, 4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(run.model(x), x.sum(1, keepdim=True))
        loss.backward()
        return loss

    with run.guardian:
        for _ in range(4):
            optimizer.step(closure)


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("loop", [accumulate, accumulate_more_later, attack_the_inputs, skip, penalise])
def test_steps_that_take_many_backward_calls_are_quiet(loop: Callable[[Run], None], reads: str) -> None:
    run = Run(reads=reads)
    found = [each for each in run.watch(lambda: loop(run)) if each.code == "GG903"]
    assert found == []


def test_a_closure_evaluated_many_times_is_quiet() -> None:
    run = Run()
    minimise(run)
    assert [found for found in run.guardian.findings if found.code == "GG903"] == []


def test_evaluation_only_has_nothing_to_step() -> None:
    run = Run()
    guardian = Guardian(run.model, None, guards=[FiniteGuard()], sinks=[])
    with guardian:
        run.backward(300)
    assert list(guardian.findings) == []


def test_the_losses_of_a_step_that_comes_late_are_kept() -> None:
    run = Run(reads="per_step")

    def loop() -> None:
        run.steps(2)
        run.optimizer.zero_grad()
        for _ in range(30):
            run.backward()
            with torch.no_grad():
                run.model.get_parameter("0.bias").add_(1e-4)
        run.optimizer.step()
        latest = run.guardian.latest
        assert latest is not None
        assert latest.loss is not None
        assert latest.micro_batches == 30

    run.watch(loop)


# GG901 and GG902.


def parts(model: nn.Sequential) -> Iterator[Tensor]:
    """Trains a copy that shares its parameters: the model itself is never called."""
    first, second = model[0], model[2]
    while True:
        x = torch.randn(8, 4)
        hidden = functional.linear(x, first.weight, first.bias).tanh()  # type: ignore[arg-type]  # they are Linear
        yield functional.linear(hidden, second.weight, second.bias).mean()  # type: ignore[arg-type]


def test_a_model_that_is_never_called_is_told_at_the_third_step() -> None:
    run = Run()
    losses = parts(run.model)

    def loop() -> None:
        for step in range(6):
            run.optimizer.zero_grad()
            next(losses).backward()
            run.optimizer.step()
            assert len(run.guardian.findings) == (step >= 2)

    (found,) = run.watch(loop)
    assert (found.code, found.moment) == ("GG902", Moment.AFTER_STEP)
    assert "in 3 steps and 3 backward calls" in found.seen
    assert run.guardian.report().counts["GG902"] == 1


def test_a_short_run_is_told_at_its_end() -> None:
    run = Run()
    losses = parts(run.model)

    def loop() -> None:
        next(losses).backward()
        run.optimizer.step()

    (found,) = run.watch(loop)
    assert (found.code, found.moment) == ("GG902", Moment.EXIT)


def test_a_compiled_model_is_told_at_the_third_step() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    compiled = torch.compile(model, backend="eager")
    optimizer = SGD(model.parameters(), lr=0.01)
    guardian = Guardian(compiled, optimizer, guards=[FiniteGuard()], sinks=[])  # type: ignore[arg-type]  # a Module
    with guardian:
        for step in range(5):
            optimizer.zero_grad()
            compiled(torch.randn(8, 4)).mean().backward()
            optimizer.step()
            assert [found.code for found in guardian.findings] == ["GG901"] * (step >= 2)
    assert guardian.report().counts["GG901"] == 1
    assert "are not hooked" in guardian.findings[0].seen


def test_a_model_that_is_called_is_quiet() -> None:
    run = Run()
    assert run.watch(lambda: run.steps(10)) == []


def test_gradients_put_in_place_by_hand_need_no_forward() -> None:
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.5)
    with Guardian(model, optimizer, summary=False, sinks=[]) as guardian:
        for _ in range(6):
            worker = nn.Linear(3, 1)
            worker.load_state_dict(model.state_dict())
            inner = SGD(worker.parameters(), lr=0.1)
            for _ in range(3):
                inner.zero_grad()
                worker(torch.randn(8, 3)).square().mean().backward()
                inner.step()
            for parameter, moved in zip(model.parameters(), worker.parameters(), strict=True):
                parameter.grad = parameter.detach() - moved.detach()
            optimizer.step()
    assert [(finding.code, finding.severity) for finding in guardian.findings] == [("GG902", Severity.INFO)]


class Listed(nn.Module):
    """Its second layer is in a plain list, where no module knows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.rest[0](self.first(x))  # type: ignore[no-any-return]  # a module call is Any


def not_watched(model: nn.Module, **options: Any) -> tuple[str, ...]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, sinks=[], summary=False, **options) as guardian:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
    return guardian.report().not_watched


def test_modules_that_the_model_does_not_know_are_named_as_not_watched() -> None:
    (spot,) = [each for each in not_watched(Listed()) if "GG303" in each]
    assert "`rest`" in spot
    assert not any("GG303" in each for each in not_watched(nn.Linear(4, 4)))


def test_without_a_guard_for_them_outputs_are_named_as_not_watched() -> None:
    spot = "outputs of modules: no guard was given that tests them"
    assert spot in not_watched(nn.Linear(4, 4), guards=[])
    assert spot not in not_watched(nn.Linear(4, 4))
