from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.errors import DataError, GuardUsageError, NonFiniteError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Severity
from gpt_guard.runtime.data_stages import StageLog, Stages, stages

ROWS, FEATURES = 40, 5


def table(**constant: float) -> Tensor:
    """Random features; `f3=7.5` makes feature 3 constant."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, FEATURES) * 3 + 1
    for name, value in constant.items():
        x[:, int(name[1:])] = value
    return x


def standardise(x: Tensor, eps: float = 0.0) -> Tensor:
    return (x - x.mean(0)) / (x.std(0) + eps)


def to_unit(x: Tensor) -> Tensor:
    low, high = x.amin(0), x.amax(0)
    return (x - low) / (high - low)


def pipeline(*steps: tuple[str, Any]) -> tuple[Stages, list[Finding]]:
    found: list[Finding] = []
    return stages(*steps, on_finding=found.append), found


def worth_saying(found: list[Finding]) -> list[str]:
    return [each.code for each in found if each.severity is not Severity.INFO]


# A constant feature, normalised to NaN.


@pytest.mark.parametrize("normalise", [standardise, to_unit])
@pytest.mark.parametrize("constant", [{"f3": 7.5}, {"f1": 0.0, "f4": 1.0}])
def test_the_stage_and_the_feature_are_named(normalise: Any, constant: dict[str, float]) -> None:
    run, found = pipeline(("clip", lambda x: x.clamp(-50, 50)), ("normalise", normalise))
    run(table(**constant))
    bad = next(each for each in found if each.code == "GG150")
    assert bad.evidence["stage"] == "normalise"
    assert bad.evidence["features"] == [int(name[1:]) for name in constant]
    assert "standard deviation is 0" in bad.seen
    assert all(f"{name[1:]} (always {value:g})" in bad.seen for name, value in constant.items())
    assert "A feature is constant" in bad.causes[0]
    assert bad.where is not None
    assert (bad.where.function, bad.where.file) == (normalise.__name__, __file__)
    assert bad.tensor is not None
    assert bad.tensor.nan == ROWS * len(constant)


def test_without_somebody_to_take_it_it_is_raised() -> None:
    run = stages(("scale", lambda x: 2 * x), ("normalise", standardise), ("later", lambda x: x + 1))
    with pytest.raises(NonFiniteError, match="Stage `normalise` makes values that are not finite"):
        run(table(f3=2.0))


def test_a_series_in_time() -> None:
    def over_time(x: Tensor) -> Tensor:
        return (x - x.mean((0, 1))) / x.std((0, 1))

    x = torch.randn(6, 10, 4)
    x[..., 2] = 3.0
    run, found = pipeline(("load", lambda x: x), ("normalise", over_time))
    run(x)
    assert [each.evidence["features"] for each in found if each.code == "GG150"] == [[2]]


def test_other_causes_are_not_blamed_on_a_deviation() -> None:
    run, found = pipeline(("logarithm", torch.log), ("later", lambda x: x * 2))
    run(table())
    (bad,) = found
    assert (bad.code, bad.evidence["stage"]) == ("GG150", "logarithm")
    assert "standard deviation" not in bad.seen


def test_values_that_were_missing_are_blamed_on_the_source() -> None:
    x = table()
    x[4, 2] = float("nan")
    found: list[Finding] = []
    log = StageLog()
    log.note("normalise", log.note("load", x, found.append), found.append)
    (bad,) = found
    assert bad.evidence == {"stage": "load", "features": [2]}
    assert "missing in the source" in bad.causes[0]


# What else a stage may lose.

LOSSES: dict[str, tuple[Any, Tensor, str, str]] = {
    "squeeze": ((lambda x: x.squeeze()), torch.randn(1, 8), "collapsed", "[1, 8] into [8]"),
    "one row": ((lambda x: x.mean(0, keepdim=True)), torch.randn(5, 8), "collapsed", "one row is left"),
    "cast": ((lambda x: x.long()), torch.rand(6, 4), "dtype", "float32 with fractions to int64"),
    "narrow": ((lambda x: x.to(torch.uint8)), torch.rand(6, 4), "dtype", "to uint8"),
    "first row": ((lambda x: x[:1].expand_as(x)), torch.randn(6, 4), "all_equal", "all equal"),
    "fill": ((lambda x: x.index_fill(1, torch.tensor([2]), 5.0)), torch.randn(6, 4), "zero_std", "2 (always 5)"),
    "clip": ((lambda x: x.clamp(min=-9.5, max=-9.0)), torch.randn(6, 1).repeat(1, 2) * 0.1, "all_equal", "all equal"),
    "filter": ((lambda x: x[x[:, 0] > 99]), torch.randn(6, 4), "empty", "no elements"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_stage_loses(name: str) -> None:
    function, data, cause, words = LOSSES[name]
    run, found = pipeline(("load", lambda x: x), (name, function))
    run(data)
    assert worth_saying(found) == ["GG639"]
    assert found[0].evidence["stage"] == name
    assert words in found[0].seen
    assert found[0].cause_id == f"{name} {cause}"


def test_each_is_told_once_for_all_batches() -> None:
    run, found = pipeline(("cast", lambda x: x.long()))
    for _ in range(3):
        run(torch.rand(6, 4))
    assert len(found) == 1


HEALTHY: dict[str, list[tuple[str, Any]]] = {
    "eps": [("load", lambda x: x), ("standardise", partial(standardise, eps=1e-6))],
    "one hot": [("ids", lambda x: x.abs().long() % 3), ("one hot", lambda x: nn.functional.one_hot(x, 9).float())],
    "mean over time": [("load", lambda x: x), ("pool", lambda x: x.mean(1))],
    "flatten": [("images", lambda x: x.reshape(ROWS, 1, FEATURES)), ("flatten", lambda x: x.flatten(1))],
    "pixels": [("load", lambda x: x.abs()), ("to bytes", lambda x: (x * 20).to(torch.uint8))],
    "bins": [("load", lambda x: x), ("bins", lambda x: torch.bucketize(x, torch.arange(-3.0, 3.0)))],
    "mask": [
        ("rows", lambda x: x.abs().long()),
        ("encode", lambda x: {"ids": x, "mask": torch.ones_like(x), "place": torch.arange(FEATURES).expand_as(x)}),
    ],
    "texts": [("split", lambda x: ["a b", "c"]), ("ids", lambda x: torch.tensor([[1, 2], [3, 0]]))],
    "whole numbers": [("counts", lambda x: x.round()), ("ids", lambda x: x.long())],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_pipeline_is_silent(name: str) -> None:
    run, found = pipeline(*HEALTHY[name])
    for _ in range(2):
        run(table())
    assert found == []


def test_a_constant_feature_alone_is_only_noted() -> None:
    run, found = pipeline(("load", lambda _: table(f3=7.5)), *HEALTHY["eps"][1:])
    out = run(torch.zeros(0))
    assert [(each.code, each.severity) for each in found] == [("GG639", Severity.INFO)]
    assert found[0].evidence == {"stage": "load", "features": [3]}
    assert out.isfinite().all()


# With a Guardian.


def run_guarded(x: Tensor, eps: float, **options: Any) -> Guardian:
    model = nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guardian = Guardian(model, optimizer, sinks=[], guards=[], **options)
    with guardian:
        raw = guardian.stage("load", x)
        assert raw is x
        guardian.stage("standardise", standardise(raw, eps))
    return guardian


def test_a_guardian_halts_before_the_first_step() -> None:
    with pytest.raises(NonFiniteError) as halted:
        run_guarded(table(f3=7.5), 0.0)
    found = halted.value.finding
    assert found.evidence["features"] == [3]
    assert found.where is not None
    assert "standardise(raw, eps)" in found.where.text


def test_its_policy_decides() -> None:
    guardian = run_guarded(table(f3=7.5), 0.0, policy={"GG150": "record"})
    # Beside these, that nothing was trained.
    assert [found.code for found in guardian.findings[:2]] == ["GG639", "GG150"]
    assert not any(found.code in ("GG150", "GG639") for found in run_guarded(table(), 0.0).findings)


def test_an_error_in_a_loss_of_information_is_raised_where_policy_says_so() -> None:
    model = nn.Linear(2, 1)
    guardian = Guardian(model, None, sinks=[], policy={"GG639": "halt"})
    guardian.stage("load", torch.rand(6, 4))
    with pytest.raises(DataError, match="drop"):
        guardian.stage("cast", torch.rand(6, 4).long())


@pytest.mark.parametrize("steps", [(), ("normalise",), (("normalise", 3),), ((standardise, "normalise"),)])
def test_what_is_no_stage_is_refused(steps: Any) -> None:
    with pytest.raises(GuardUsageError, match=r"normalise|nothing to run"):
        stages(*steps)
