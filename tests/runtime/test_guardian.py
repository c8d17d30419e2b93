"""What Guardian tells, against figures computed by hand; and what it says about arguments that cannot work."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.callbacks.finite.guard import FiniteGuard
from gpt_guard.errors import GuardUsageError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Moment, Observation
from gpt_guard.report.run_log import read_run


def line(slope: float = 2.0) -> nn.Linear:
    """Predicts slope * x: with the loss mean(slope * x) its gradient is mean(x)."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, slope)
    return model


def guard(model: nn.Module, optimizer: Any = None, **options: Any) -> Guardian:
    return Guardian(model, optimizer, sinks=[], **options)


def newest(guardian: Guardian) -> Observation:
    assert guardian.latest is not None
    return guardian.latest


@pytest.fixture(params=["immediate", "per_step"])
def reads(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_one_step_by_hand(reads: Any) -> None:
    model = line()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "lr": 0.5}])
    with guard(model, optimizer, reads=reads) as guardian:
        assert guardian.latest is None
        model(torch.tensor([[1.0], [2.0], [6.0]])).mean().backward()
        optimizer.step()
        assert guardian.step == 1
    seen = newest(guardian)
    assert seen.step == 0
    assert seen.moment is Moment.AFTER_STEP
    assert seen.loss == pytest.approx(6.0)
    assert seen.lr == (0.5,)
    assert seen.grad_norm == seen.grad_norm_clipped == pytest.approx(3.0)
    assert seen.clipped is False
    assert (seen.samples, seen.tokens) == (3, None)
    assert seen.step_time is not None
    assert seen.step_time > 0
    assert not seen.skipped
    assert not guardian.findings


def test_learning_rate_of_each_group_is_the_one_of_the_step(reads: Any) -> None:
    model = nn.Sequential(line(), line())
    groups = [{"params": model[0].parameters(), "lr": 0.4}, {"params": model[1].parameters(), "lr": torch.tensor(0.2)}]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    with guard(model, optimizer, scheduler=schedule, reads=reads) as guardian:
        for _ in range(2):
            model(torch.ones(1, 1)).mean().backward()
            optimizer.step()
            schedule.step()
    assert newest(guardian).lr == pytest.approx((0.2, 0.1))


@pytest.mark.parametrize("how", ["norm", "value", "by hand"])
def test_clipping_shows_both_norms(reads: Any, how: str) -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guard(model, optimizer, reads=reads) as guardian:
        model(torch.tensor([[10.0]])).mean().backward()
        if how == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        elif how == "value":
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
        else:
            model.weight.grad = torch.ones(1, 1)
        optimizer.step()
    seen = newest(guardian)
    assert seen.grad_norm == pytest.approx(10.0)
    assert seen.grad_norm_clipped == pytest.approx(1.0, rel=1e-5)
    assert seen.clipped is True


def test_clipping_through_data_is_seen(reads: Any) -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guard(model, optimizer, reads=reads) as guardian:
        model(torch.tensor([[10.0]])).mean().backward()
        assert model.weight.grad is not None
        model.weight.grad.data.clamp_(-1.0, 1.0)
        optimizer.step()
    assert newest(guardian).grad_norm_clipped == pytest.approx(1.0)
    assert newest(guardian).clipped is True


def test_clipping_that_does_nothing_is_not_clipping(reads: Any) -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guard(model, optimizer, reads=reads) as guardian:
        model(torch.tensor([[10.0]])).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
    assert newest(guardian).clipped is False


def test_accumulation_adds_the_losses_up(reads: Any) -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with guard(model, optimizer, reads=reads) as guardian:
        for _ in range(2):
            optimizer.zero_grad()
            for value in (1.0, 2.0, 3.0):
                (model(torch.tensor([[value]])).mean() / 3).backward()
            optimizer.step()
    seen = newest(guardian)
    assert seen.micro_batches == 3
    assert seen.loss == pytest.approx(4.0)
    assert seen.grad_norm == pytest.approx(2.0)
    assert seen.samples == 6


def test_accumulated_gradients_without_zeroing_are_told_as_they_are(reads: Any) -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with guard(model, optimizer, reads=reads) as guardian:
        for _ in range(3):
            model(torch.ones(1, 1)).mean().backward()
            optimizer.step()
    assert newest(guardian).loss == pytest.approx(2.0)
    assert newest(guardian).grad_norm == pytest.approx(3.0)


def test_tokens_are_counted_where_ids_come_in(reads: Any) -> None:
    model = nn.Embedding(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guard(model, optimizer, reads=reads) as guardian:
        for _ in range(2):
            model(torch.zeros(3, 5, dtype=torch.long)).mean().backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.zeros(3, 5, dtype=torch.long))
    assert (newest(guardian).samples, newest(guardian).tokens) == (6, 30)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(reads: Any, dtype: torch.dtype) -> None:
    model = line().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guard(model, optimizer, reads=reads) as guardian:
        model(torch.full((2, 1), 3.0, dtype=dtype)).mean().backward()
        optimizer.step()
    assert newest(guardian).loss == pytest.approx(6.0)
    assert newest(guardian).grad_norm == pytest.approx(3.0)


def test_half_and_double_parameters_in_one_model(reads: Any) -> None:
    model = nn.ModuleList([line().to(torch.bfloat16), line().double()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guard(model, optimizer, reads=reads) as guardian:
        x = torch.full((1, 1), 3.0)
        total = model[0](x.bfloat16()).double() + model[1](x.double() * 4 / 3)
        total.mean().backward()
        optimizer.step()
    assert newest(guardian).grad_norm == pytest.approx(5.0)


def test_own_numbers_are_logged_under_the_newest_step(tmp_path: Path) -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guard(model, optimizer, run_dir=tmp_path, start_step=7) as guardian:
        model(torch.ones(1, 1)).mean().backward()
        optimizer.step()
        guardian.log(accuracy=torch.tensor(0.25), perplexity=3)
    assert guardian.report().facts == {"metrics.accuracy": 0.25, "metrics.perplexity": 3.0}
    log = read_run(tmp_path)
    assert [step.step for step in log.steps] == [7]
    assert guardian.step == 8


def test_report_tells_what_was_run(reads: Any) -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with guard(model, optimizer, reads=reads, guards=[FiniteGuard()]) as guardian:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).mean().backward()
            optimizer.step()
    report = guardian.report()
    assert (report.model, report.parameters, report.steps) == ("Linear", 1, 3)
    assert [report.first_loss, report.last_loss] == pytest.approx([2.0, 1.0])
    assert (report.lr_min, report.lr_max) == (0.5, 0.5)
    assert report.grad_norm_median == report.grad_norm_max == pytest.approx(1.0)
    assert report.clipped_share == 0.0
    assert report.guards == ("FiniteGuard",)
    assert report.environment["torch"] == torch.__version__


def test_a_large_float64_norm_does_not_overflow() -> None:
    model = nn.ModuleList([line().double(), line().double()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with guard(model, optimizer, guards=[]) as guardian:
        x = torch.full((1, 1), 3e150, dtype=torch.float64)
        (model[0](x) + model[1](x * 4 / 3)).sum().backward()
        optimizer.step()
    assert math.isfinite(newest(guardian).grad_norm or math.inf)


class Sequence:
    """Not an optimizer, although it has a step."""

    def step(self) -> None:
        return None


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "gpt2"}, "model is a str, not a torch.nn.Module"),
    "optimizer": ({"optimizer": Sequence()}, "optimizer is a Sequence, which is not a torch.optim.Optimizer"),
    "parameters": ({"optimizer": line().parameters()}, "optimizer is a Parameter"),
    "class": ({"guards": [FiniteGuard]}, r"write FiniteGuard\(\)"),
    "one guard": ({"guards": FiniteGuard()}, r"it takes a list: guards=\[FiniteGuard"),
    "twice": ({"guards": [FiniteGuard()] * 2}, "the same FiniteGuard twice"),
    "reads": ({"reads": "never"}, "reads is 'never'"),
    "policy": ({"policy": "halt"}, "give a mapping"),
    "scaler": ({"scaler": Sequence()}, r"scaler is a Sequence without scale, is_enabled\(\)"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_arguments_that_cannot_work_teach(case: str) -> None:
    given, message = BAD_ARGUMENTS[case]
    with pytest.raises(GuardUsageError, match=message):
        Guardian(**({"model": line()} | given))


def test_the_same_optimizer_twice() -> None:
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GuardUsageError, match="given twice"):
        Guardian(model, [optimizer, optimizer])


def test_models_on_meta_are_not_read(reads: Any) -> None:
    model = nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guard(model, optimizer, reads=reads):
        output: Tensor = model(torch.zeros(1, 2, device="meta"))
        assert output.is_meta
