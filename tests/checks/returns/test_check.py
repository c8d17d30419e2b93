from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_guard import check_returns
from gpt_guard.catalogue import entry
from gpt_guard.checks.asserts import CheckFailed, assert_returns
from gpt_guard.errors import GuardUsageError
from gpt_guard.records import Severity

from .functions import WRITTEN, Written, gae, gae_that_leaks, reward_to_go, td_target, td_target_without_mask


def name(each: Written) -> str:
    return each.function.__name__


@pytest.mark.parametrize("each", [each for each in WRITTEN if each.mistake is None], ids=name)
def test_what_is_right_passes(each: Written) -> None:
    result = check_returns(each.function, **each.options)
    computes: Any = result.facts["computes"]
    assert (result.status, ", ".join(computes)) == ("passed", each.computes)
    assert all(found.severity is Severity.INFO for found in result.findings)


@pytest.mark.parametrize("each", [each for each in WRITTEN if each.mistake is not None], ids=name)
def test_a_mistake_is_named_with_its_figures(each: Written) -> None:
    result = check_returns(each.function, **each.options)
    assert result.status == "failed"
    found = [one for one in result.findings if one.severity is Severity.ERROR]
    assert [one.cause_id for one in found] == [each.mistake]
    assert found[0].code == "GG617"
    text = next(cause.text for cause in entry("GG617").causes if cause.key == each.mistake)
    assert found[0].causes[0] == text
    assert found[0].evidence["result"] != found[0].evidence["expected"]
    assert found[0].where is not None
    assert found[0].where.function == each.function.__name__


def test_the_figures_are_those_of_a_hand() -> None:
    """Gamma 0.5: 1 + 0.5 * 2 and 2, though the value after the terminal is 64."""
    results: Any = check_returns(reward_to_go, gamma=0.5).facts["results"]
    assert results["two steps, then a true terminal"] == [[2.0, 2.0]]
    evidence: Any = check_returns(td_target_without_mask, gamma=0.5).findings[0].evidence
    assert evidence["expected"][1] == 2.0
    assert evidence["result"][1] == 2.0 + 0.5 * 32


def test_one_flag_for_two_kinds_of_ends_is_noted() -> None:
    def target(rewards: Tensor, next_values: Tensor, dones: Tensor, gamma: float) -> Tensor:
        return rewards + gamma * next_values * (1 - dones)

    (note,) = check_returns(target).findings
    assert (note.severity, note.cause_id) == (Severity.INFO, "one flag")
    assert check_returns(td_target).findings == ()


def test_any_gamma_and_lambda() -> None:
    for gamma, lam in ((0.9, 0.95), (1.0, 1.0), (0.99, 0.5)):
        assert check_returns(gae, gamma=gamma, lam=lam).status == "passed"


def test_flags_as_booleans_and_lists() -> None:
    def only_lists(rewards: list[float], dones: list[bool], gamma: float) -> list[float]:
        assert isinstance(rewards, list)
        return [float(each) for each in reward_to_go(rewards, dones, gamma)]

    def booleans(rewards: Tensor, next_values: Tensor, terminated: Tensor, gamma: float) -> Tensor:
        return rewards + gamma * next_values * ~terminated

    assert check_returns(only_lists).status == "passed"
    assert check_returns(booleans).status == "passed"


def test_a_standardised_result_is_no_return() -> None:
    def standardised(rewards: Any, dones: Any, gamma: float) -> Tensor:
        found = torch.stack([torch.as_tensor(each) for each in reward_to_go(rewards, dones, gamma)])
        return (found - found.mean()) / found.std()

    result = check_returns(standardised)
    assert [found.cause_id for found in result.findings] == ["arithmetic"]
    assert "which is none of: returns [3, 4, 4]" in result.measured


def broken(rewards: Tensor, gamma: float) -> Tensor:
    raise ZeroDivisionError("its own")


def unknown(rewards: Tensor, spam: Tensor, gamma: float) -> Tensor:
    return rewards


def no_rewards(values: Tensor, gamma: float) -> Tensor:
    return values


def fixed(rewards: Tensor) -> Tensor:
    return rewards


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (broken, {}, "ZeroDivisionError: its own"),
        (unknown, {}, "the part of the argument 'spam'"),
        (unknown, {"names": {"spam": "eggs"}}, "'eggs'; there are rewards"),
        (no_rewards, {}, "takes no rewards"),
        (fixed, {}, "takes no gamma"),
        (gae, {"gamma": 1.5}, "gamma=1.5"),
        (gae, {"kind": "advantage"}, "'advantages'"),
        (3, {}, "takes a function, not a int"),
    ],
)
def test_what_cannot_be_asked_is_refused(function: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(GuardUsageError, match=words):
        check_returns(function, **options)


def test_the_assertion() -> None:
    assert_returns(gae)
    with pytest.raises(CheckFailed, match="leaks back") as failed:
        assert_returns(gae_that_leaks)
    assert failed.value.finding.code == "GG617"
