"""DataWatch as a guest of the loop: it leaves nothing behind, reads once per step, and looks again on demand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gpt_guard.callbacks.data.guard import DataWatch
from gpt_guard.callbacks.data.loaders import LOADERS
from gpt_guard.errors import GuardUsageError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Severity
from gpt_guard.testing import refuse_host_reads

from ...cases.data_watch import ROWS, loader, samples, small, train


def same_batches(model: nn.Module, optimizer: Any, steps: int) -> None:
    x, y = samples(ROWS)
    for _ in range(steps):
        train(model, optimizer, x.clone(), y.clone())


def test_it_reads_with_the_step_and_at_no_other_time() -> None:
    model, optimizer = small()
    with Guardian(model, optimizer, guards=[DataWatch()], sinks=[], reads="per_step") as guardian:
        with refuse_host_reads() as reads:
            same_batches(model, optimizer, 8)
        assert reads.ledger == 8
        with guardian.evaluating(), refuse_host_reads() as reads:
            model(samples(ROWS)[0])
        assert reads.ledger == 1
    assert [found.code for found in guardian.findings] == ["GG605"]


def test_guarded_steps_are_those_of_a_bare_run() -> None:
    def weights(guarded: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model, optimizer = small()
        data = loader(shuffle=True)
        guardian = Guardian(model, optimizer if guarded else None, guards=[DataWatch()], sinks=[])
        with guardian:
            for x, y in data:
                train(model, optimizer, x, y)
        return [*model.parameters(), torch.rand(3)]

    for bare, watched in zip(weights(guarded=False), weights(guarded=True), strict=True):
        assert torch.equal(bare, watched)


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(fails: bool) -> None:
    before = DataLoader.__iter__
    model, optimizer = small()
    guard = DataWatch()
    guardian = Guardian(model, optimizer, guards=[guard], sinks=[])

    def run() -> None:
        with guardian:
            assert DataLoader.__iter__ is not before
            same_batches(model, optimizer, 4)
            if fails:
                raise KeyError("the loop's own")

    if fails:
        with pytest.raises(KeyError):
            run()
    else:
        run()
    assert DataLoader.__iter__ is before
    assert not LOADERS._listeners
    assert guard._log is None


def test_it_looks_again_on_demand() -> None:
    model, optimizer = small()
    data = loader(shuffle=True)
    with Guardian(model, optimizer, guards=[DataWatch(repeats=5)], sinks=[]) as guardian:
        for x, y in data:
            train(model, optimizer, x, y)
        same_batches(model, optimizer, 20)
        assert [found.code for found in guardian.findings] == []
        guardian.inspect_now(3)
        same_batches(model, optimizer, 10)
    assert [found.code for found in guardian.findings] == ["GG605"]


def test_without_inspection_it_says_that_it_saw_nothing() -> None:
    model, optimizer = small()
    with Guardian(model, optimizer, guards=[DataWatch()], sinks=[], inspect_steps=0) as guardian:
        same_batches(model, optimizer, 5)
    assert guardian.findings == ()
    assert any("DataWatch: batches" in each for each in guardian.report().not_watched)


def test_a_model_that_takes_names_and_structures() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 3)

        def forward(self, *, batch: dict[str, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(self.body(batch["x"]), batch["labels"])

    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = samples(ROWS)
    with Guardian(model, optimizer, guards=[DataWatch()], sinks=[]) as guardian:
        for _ in range(6):
            optimizer.zero_grad()
            model(batch={"x": torch.randn(ROWS, 6), "labels": y.clone()}).backward()
            optimizer.step()
    assert len(guardian.findings) == 1
    found = guardian.findings[0]
    assert (found.code, found.severity, found.evidence["same"]) == ("GG609", Severity.WARNING, "targets")
    assert len(x) == ROWS


def test_settings_are_checked_where_they_are_written() -> None:
    with pytest.raises(GuardUsageError, match="repeats"):
        DataWatch(repeats="often")  # type: ignore[arg-type]  # the mistake
