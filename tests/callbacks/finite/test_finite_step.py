"""FiniteGuard between backward() and step(), where bad values may be meant, and where one trouble has consequences."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Finding, FiniteGuard, Guardian, NonFiniteError

Reads = Literal["immediate", "per_step"]
both = pytest.mark.parametrize("reads", ["immediate", "per_step"])
Act = Callable[[nn.Sequential, int], Any]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def nothing(_model: nn.Module, _step: int) -> None:
    return None


class Loop:
    """Some steps, with what a user's code does before each forward and just before each step."""

    def __init__(self, model: Any = None, optimizer: Any = None, **options: Any) -> None:
        self.model = model or net()
        self.optimizer = optimizer or torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.guardian = Guardian(self.model, self.optimizer, guards=[FiniteGuard()], sinks=[], replay=False, **options)
        self.before: Any = None

    def run(
        self,
        first: Act = nothing,
        middle: Act = nothing,
        steps: int = 4,
        batch: Callable[[int], Tensor] = lambda step: torch.randn(6, 4),
        loss: Callable[[Tensor], Tensor] = lambda out: out.square().mean(),
    ) -> list[Finding]:
        with self.guardian:
            for step in range(steps):
                first(self.model, step)
                self.optimizer.zero_grad()
                loss(self.model(batch(step))).backward()
                middle(self.model, step)
                self.before = copy.deepcopy(self.model.state_dict())
                self.optimizer.step()
        return list(self.guardian.findings)

    def halted(self, *args: Any, **kwargs: Any) -> Finding:
        with pytest.raises(NonFiniteError) as caught:
            self.run(*args, **kwargs)
        return caught.value.finding

    @property
    def untouched(self) -> bool:
        return all(torch.equal(self.before[name], now) for name, now in self.model.state_dict().items())


# Gradients that code changes.


def spoil_one(model: nn.Sequential, step: int) -> None:
    if step == 2:
        model.get_parameter("2.bias").grad.fill_(math.nan)  # type: ignore[union-attr]  # it has a gradient


def divide_all(model: nn.Sequential, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(0.0 if step == 2 else 2.0)


def clip_after_spoiling(model: nn.Sequential, step: int) -> None:
    if step == 2:
        model.get_parameter("0.weight").grad[0, 0] = math.inf  # type: ignore[index]  # it has a gradient
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@both
@pytest.mark.parametrize("unit", ["SGD", "Adam"])
@pytest.mark.parametrize(
    ("middle", "parameter", "count"),
    [(spoil_one, "2.bias", 1), (divide_all, "0.weight", 4), (clip_after_spoiling, "0.weight", 1)],
)
def test_gradients_that_go_bad_after_backward_halt_before_the_step(
    middle: Act, parameter: str, count: int, unit: str, reads: Reads
) -> None:
    model = net()
    loop = Loop(model, getattr(torch.optim, unit)(model.parameters(), lr=1e-2), reads=reads)
    found = loop.halted(middle=middle)
    assert (found.code, found.parameter, found.step, found.moment) == ("GG104", parameter, 2, "before step")
    assert "finite after backward()" in found.seen
    assert found.origin == "Code between backward() and step() made it."
    assert found.evidence["bad_gradient_count"] == count
    assert found.causes[0].startswith("A hook, a custom autograd.Function or code between")
    assert loop.untouched


@both
def test_gradients_that_code_changes_and_keeps_finite_are_quiet(reads: Reads) -> None:
    def halve(model: nn.Sequential, _step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for parameter in model.parameters():
            parameter.grad.mul_(1e-3)  # type: ignore[union-attr]  # it has a gradient

    def enormous(model: nn.Sequential, _step: int) -> None:
        # Finite, but its square is not.
        model.get_parameter("0.weight").grad.fill_(1e30)  # type: ignore[union-attr]  # it has a gradient

    assert Loop(reads=reads).run(middle=halve) == []
    model = net()
    assert Loop(model, torch.optim.SGD(model.parameters(), lr=1e-38), reads=reads).run(middle=enormous) == []


@both
def test_a_closure_that_spoils_its_gradients_is_stopped_before_the_first_change(reads: Reads) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    before = copy.deepcopy(model.state_dict())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        spoil_one(model, 2)
        return loss

    guardian = Guardian(model, optimizer, guards=[FiniteGuard()], sinks=[], reads=reads, replay=False)
    with pytest.raises(NonFiniteError) as caught, guardian:
        optimizer.step(closure)
    assert (caught.value.finding.code, caught.value.finding.parameter) == ("GG104", "2.bias")
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


@both
@pytest.mark.parametrize("skip", [True, False])
def test_a_scaler_that_skips_is_quiet_and_one_that_is_passed_over_is_not(skip: bool, reads: Reads) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    guardian = Guardian(
        model, optimizer, guards=[FiniteGuard()], sinks=[], reads=reads, replay=False, policy={"error": "warn"}
    )
    with guardian:
        scaler.scale(model(torch.randn(6, 4)).square().mean()).backward()
        spoil_one(model, 2)
        if skip:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    assert [finding.code for finding in guardian.findings] == ([] if skip else ["GG104"])


# -inf alone.


@both
def test_a_step_that_makes_negative_infinity_is_told(reads: Reads) -> None:
    def overflow(model: nn.Sequential, step: int) -> None:
        if step == 2:
            loop.optimizer.param_groups[0]["lr"] = 1e38
            for parameter in model.parameters():
                parameter.grad.zero_()  # type: ignore[union-attr]  # it has a gradient
            model.get_parameter("0.weight").grad[0, 0] = 30.0  # type: ignore[index]  # it has a gradient

    loop = Loop(reads=reads)
    found = loop.halted(middle=overflow)
    assert (found.code, found.parameter, found.step) == ("GG106", "0.weight", 2)
    assert "so were all gradients" in found.seen
    assert found.causes[0].startswith("lr times the update")


@both
def test_a_weight_set_to_negative_infinity_is_told_before_its_step(reads: Reads) -> None:
    def cut(model: nn.Sequential, step: int) -> None:
        if step == 2:
            model.get_parameter("2.weight").data[0, 0] = -math.inf

    loop = Loop(reads=reads)
    found = loop.halted(first=cut)
    assert (found.code, found.parameter, found.step) == ("GG105", "2.weight", 2)


@both
def test_running_statistics_of_negative_infinity_are_told(reads: Reads) -> None:
    def cut(model: nn.Sequential, step: int) -> None:
        if step == 2:
            model.get_buffer("1.running_mean")[0] = -math.inf

    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    found = Loop(model, reads=reads).halted(first=cut)
    assert (found.code, found.parameter, found.step) == ("GG107", "1.running_mean", 2)
    assert found.causes[0].startswith("BatchNorm took one")


class LearnedMask(nn.Module):
    """-inf that was so at entry, and a mask that grows with the sequence: both on purpose."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.scores = nn.Parameter(torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1) > 0, -math.inf))
        self.register_buffer("mask", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.mask.shape != (6, 6):
            self.mask = torch.arange(6.0).masked_fill(torch.ones(6, 6).triu(1) > 0, -math.inf)
        return self.layer((self.scores + self.mask).softmax(-1) @ x)  # type: ignore[no-any-return]  # Any


@both
def test_masks_in_parameters_and_in_tables_that_grow_are_quiet(reads: Reads) -> None:
    assert Loop(LearnedMask(), reads=reads).run() == []


@both
def test_an_input_of_negative_infinity_is_named_as_the_cause(reads: Reads) -> None:
    def log_of_zero(_step: int) -> Tensor:
        return (torch.randn(6, 4) * torch.tensor([0.0, 1.0, 1.0, 1.0])).abs().log()

    found = Loop(reads=reads).halted(batch=log_of_zero)
    assert (found.code, found.module, found.evidence["neg_inf_input"]) == ("GG101", "0", "[0]")
    assert "input that holds -inf" in str(found.origin)
    assert found.causes[0].startswith("An input held -inf")


# A batch that holds NaN on purpose.


class Imputing(nn.Module):
    def __init__(self, *, handles: bool = True) -> None:
        super().__init__()
        self.net, self.missing, self.handles = net(), nn.Parameter(torch.zeros(4)), handles

    def forward(self, x: Tensor) -> Tensor:
        known = torch.where(x.isnan(), self.missing, x) if self.handles else x + self.missing
        return self.net(known)  # type: ignore[no-any-return]  # a module call is Any


def missing(_step: int) -> Tensor:
    return torch.randn(6, 4).masked_fill(torch.eye(6, 4) > 0, math.nan)


@both
def test_a_model_that_takes_nan_for_a_missing_value_is_quiet(reads: Reads) -> None:
    loop = Loop(Imputing(), reads=reads)
    assert loop.run(batch=missing) == []
    with torch.no_grad(), loop.guardian:
        loop.model(missing(0))
    assert [found.code for found in loop.guardian.findings if found.code < "GG2"] == []


@both
def test_the_batch_is_blamed_once_something_is_bad_with_it(reads: Reads) -> None:
    loop = Loop(Imputing(handles=False), reads=reads)
    found = loop.halted(batch=missing)
    assert (found.code, found.module, found.position, found.step) == ("GG103", "", "input[0]", 0)
    loop = Loop(Imputing(), reads=reads)
    batch = missing(0)
    found = loop.halted(batch=lambda _: batch, loss=lambda out: F.mse_loss(out, batch[:, :1]))
    assert found.code == "GG103"


@both
def test_a_bad_batch_in_evaluation_is_told_at_the_end_of_its_forward(reads: Reads) -> None:
    loop = Loop(Imputing(handles=False), reads=reads)
    with pytest.raises(NonFiniteError) as caught, torch.no_grad(), loop.guardian:
        loop.model(missing(0))
    assert (caught.value.finding.code, caught.value.finding.evaluation) == ("GG103", True)


# Weights that are bad at entry.


def spoiled() -> nn.Sequential:
    model = net()
    with torch.no_grad():
        model.get_parameter("0.weight").fill_(math.nan)
    return model


@both
def test_weights_that_are_loaded_inside_are_quiet_and_watched(reads: Reads) -> None:
    healthy = net().state_dict()

    def load(model: nn.Sequential, step: int) -> None:
        if step == 0:
            model.load_state_dict(healthy)

    loop = Loop(spoiled(), reads=reads)
    assert loop.run(first=load) == []

    def load_and_spoil(model: nn.Sequential, step: int) -> None:
        load(model, step)
        if step == 2:
            model.get_parameter("0.weight").data.fill_(math.nan)

    found = Loop(spoiled(), reads=reads).halted(first=load_and_spoil)
    assert (found.code, found.parameter, found.step) == ("GG105", "0.weight", 2)
    assert "finite when last measured" in found.seen


@both
def test_weights_that_stay_bad_halt_before_any_step_even_where_no_output_shows_it(reads: Reads) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(5, 1)
            with torch.no_grad():
                self.rows.weight[4] = math.nan

        def forward(self, x: Tensor) -> Tensor:
            return self.rows(x)  # type: ignore[no-any-return]  # a module call is Any

    loop = Loop(Table(), reads=reads)
    found = loop.halted(batch=lambda _: torch.arange(3))
    assert (found.code, found.parameter, found.moment) == ("GG105", "rows.weight", "before step")
    assert "when the Guardian was entered" in found.seen


# One trouble, one finding.


@both
def test_where_policy_only_warns_what_follows_from_a_finding_is_not_told_again(reads: Reads) -> None:
    def nan_loss(step: int) -> Callable[[Tensor], Tensor]:
        return lambda out: out.square().mean() * (math.nan if step == 1 else 1.0)

    model = net()
    loop = Loop(model, reads=reads, policy={"error": "warn"})
    count = iter(range(9))
    assert [found.code for found in loop.run(loss=lambda out: nan_loss(next(count))(out))] == ["GG102"]
    loop = Loop(reads=reads, policy={"error": "warn"})
    assert [found.code for found in loop.run(middle=divide_all, steps=6)] == ["GG104"]
    # The run goes on from a checkpoint: what breaks after that is a new trouble.
    loop = Loop(reads=reads, policy={"error": "warn"})
    healthy = net().state_dict()

    def restore_and_spoil(model: nn.Sequential, step: int) -> None:
        if step == 4:
            model.load_state_dict(healthy)
        if step == 6:
            model.get_parameter("2.weight").data.fill_(math.nan)

    found = loop.run(first=restore_and_spoil, middle=divide_all, steps=9)
    assert [(each.code, each.step) for each in found] == [("GG104", 2), ("GG105", 6)]


@both
@pytest.mark.parametrize("policy", [None, {"error": "warn"}])
def test_parameters_that_one_step_breaks_are_one_finding(policy: Any, reads: Reads) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def no_rate(_model: nn.Module, step: int) -> None:
        optimizer.param_groups[0]["lr"] = math.nan if step == 2 else 1e-2

    loop = Loop(model, optimizer, reads=reads, policy=policy)
    if policy is None:
        loop.halted(middle=no_rate)
    else:
        loop.run(middle=no_rate, steps=6)
    (found,) = loop.guardian.findings
    assert (found.code, found.parameter, found.step) == ("GG106", "0.weight", 2)
    assert found.evidence["bad_tensor_count"] == 4
    assert "3 other parameters became non-finite" in found.seen
    assert found.causes[0].startswith("The learning rate is itself NaN")


def test_the_optimizer_state_and_eps_order_the_causes() -> None:
    model = net()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)

    def negative(model: nn.Sequential, step: int) -> None:
        if step == 2:
            adam.state[model.get_parameter("2.weight")]["exp_avg_sq"].fill_(-1.0)

    found = Loop(model, adam).halted(first=negative)
    assert (found.code, found.parameter) == ("GG106", "2.weight")
    assert found.causes[0].startswith("The optimizer's state was bad")
    model = net()
    with torch.no_grad():
        model.get_parameter("0.bias")[3] = -100.0
    found = Loop(model, torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.0)).halted()
    assert found.code == "GG106"
    assert found.causes[0].startswith("eps is 0")


def test_a_running_average_of_one_s_own_is_not_batchnorm() -> None:
    class Averaging(nn.Module):
        average: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.average.lerp_(x[x[:, 0] > 100.0].mean(0), 0.1)
            return self.layer(x)  # type: ignore[no-any-return]  # a module call is Any

    found = Loop(Averaging()).halted()
    assert (found.code, found.parameter) == ("GG107", "average")
    assert found.causes[0].startswith("A running average of your own")


def test_a_loss_without_labels_is_not_blamed_on_ignore_index() -> None:
    found = Loop().halted(loss=lambda out: out[:0].abs().mean())
    assert found.code == "GG102"
    assert "a mean over no elements" in found.seen
    assert found.causes[0].startswith("A sum divided by a count")
    found = Loop().halted(loss=lambda out: out.square().mean() * math.nan)
    assert found.causes[0].startswith("Another term of your own")


@both
def test_negative_infinity_in_several_modules_is_one_line(reads: Reads) -> None:
    class Low(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full_like(x, -math.inf)

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.a, self.b = nn.Linear(4, 1), Low(), Low()

        def forward(self, x: Tensor) -> Tensor:
            self.a(x), self.b(x)
            return self.layer(x)  # type: ignore[no-any-return]  # a module call is Any

    assert [(found.code, found.module) for found in Loop(Cut(), reads=reads).run()] == [("GG109", "a")]
