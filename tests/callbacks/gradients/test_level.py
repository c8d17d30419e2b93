"""The robust history: what enters, what is put aside, and when a new level is believed."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest

from gpt_guard.callbacks.gradients.level import MAD_TO_SIGMA, RobustHistory, middle, quantile
from gpt_guard.errors import GuardUsageError


def filled(count: int = 100, *, spread: float = 0.2, level: float = 1.0, seed: int = 0) -> RobustHistory:
    history = RobustHistory()
    draw = random.Random(seed)
    for _ in range(count):
        history.take(level * draw.lognormvariate(0.0, spread), high=10.0, low=1e-3)
    return history


def test_median_and_distance_agree_with_the_definition() -> None:
    draw = random.Random(1)
    values = [draw.lognormvariate(0.0, 0.5) for _ in range(150)]
    history = RobustHistory(window=100)
    for value in values:
        history.take(value)
    logs = [math.log(value) for value in values[-100:]]
    center = statistics.median(logs)
    assert history.median == pytest.approx(math.exp(center))
    sigma = MAD_TO_SIGMA * statistics.median(abs(each - center) for each in logs)
    standing = history.take(math.exp(center + 20 * sigma), high=2.0)
    assert standing is not None
    assert standing.sigmas == pytest.approx(20.0)
    assert standing.factor == pytest.approx(math.exp(20 * sigma))


def test_nothing_is_said_before_enough_is_known() -> None:
    history = RobustHistory(least=20)
    assert all(history.take(1.0, high=10.0) is None for _ in range(20))
    standing = history.take(100.0, high=10.0)
    assert standing is not None
    assert standing.side == "high"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0])
def test_what_is_no_norm_never_enters_and_blinds_nothing(value: float) -> None:
    history = filled()
    before = history.state_dict()
    assert history.take(value, high=10.0, low=1e-3) is None
    assert history.state_dict() == before
    standing = history.take(50.0, high=10.0)
    assert standing is not None
    assert standing.side == "high"


def test_a_flagged_value_does_not_move_the_median() -> None:
    history = filled()
    median = history.median
    assert [history.take(1e6, high=10.0) is not None for _ in range(10)] == [True] * 10
    assert history.median == median


def test_a_factor_within_the_spread_is_usual() -> None:
    wide = filled(spread=1.5)
    standing = wide.take(12.0 * wide.median, high=10.0)
    assert standing is not None
    assert standing.side == "usual"
    assert 0.0 < standing.sigmas < 6.0


def test_a_constant_history_has_infinite_distance() -> None:
    history = RobustHistory()
    for _ in range(30):
        history.take(2.0, high=10.0)
    standing = history.take(40.0, high=10.0)
    assert standing is not None
    assert standing.sigmas == math.inf


def test_a_lasting_level_becomes_the_history_once() -> None:
    history = filled()
    stands = [history.take(1000.0 + place, high=10.0) for place in range(25)]
    adopted = [place for place, standing in enumerate(stands) if standing is not None and standing.adopted]
    assert adopted == [19]
    assert history.median == pytest.approx(1000.0, rel=0.05)
    last = stands[-1]
    assert last is not None
    assert last.side == "usual"


def test_values_of_two_sides_are_no_new_level() -> None:
    history = filled()
    for place in range(60):
        standing = history.take(1000.0 if place % 2 else 1e-6, high=10.0, low=1e-3)
        assert standing is not None
        assert standing.streak == 1
    assert history.median == pytest.approx(1.0, rel=0.2)


def test_memory_is_bounded() -> None:
    history = filled(5000)
    assert len(history) == 100
    assert len(history.state_dict()["logs"]) == 100


def test_state_survives_json() -> None:
    history = filled()
    history.take(1e5, high=10.0)
    copy = RobustHistory()
    copy.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert copy.take(3e5, high=10.0) == history.take(3e5, high=10.0)
    assert copy.state_dict() == history.state_dict()


def test_a_foreign_state_cannot_plant_nan_or_outgrow_the_window() -> None:
    history = RobustHistory(window=50, least=20)
    history.load_state_dict({"logs": [math.nan, *([0.0] * 500)], "aside": [math.inf] * 99, "side": "sideways"})
    assert len(history) == 50
    assert history.median == 1.0
    assert history.state_dict()["aside"] == []


@pytest.mark.parametrize("limits", [{"least": 1}, {"window": 10}, {"sigmas": -1}, {"adopt_after": 0}])
def test_limits_that_cannot_work_are_named(limits: dict[str, int]) -> None:
    with pytest.raises(GuardUsageError, match="2 <= least <= window"):
        RobustHistory(**limits)


def test_middle_and_quantile() -> None:
    assert middle([1.0, 2.0, 3.0]) == 2.0
    assert middle([1.0, 2.0]) == 1.5
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.25) == 2.0
    assert quantile([5.0], 1.0) == 5.0
