"""LossInputs looks at inspected steps only, can be tuned and switched off, and sees losses that are written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.callbacks.losses.guard import LossInputs
from gpt_guard.errors import DataError, GuardUsageError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Severity

from ...cases.loss_inputs import run
from ...cases.loss_parts import classifier, features
from ...cases.loss_sums import Heads
from .loops import BY_NAME, alone, codes, two_heads

TWO = BY_NAME["pascals_beside_classes"]


def test_without_hooks_the_same_loss_is_told() -> None:
    model = Heads()
    guardian = alone(model, lambda: two_heads(model))
    assert codes(guardian) == ["GG678"]
    found = guardian.findings[0]
    assert float(str(found.evidence["ratio"])) > 1000
    assert "cross_entropy" in str(found.evidence["small"])
    assert "mse_loss" in str(found.evidence["large"])
    assert "loops.py" in found.seen


def test_the_threshold_can_be_set_and_switched_off() -> None:
    for above, told in ((10.0, ["GG678"]), (1e12, []), (0, [])):
        assert codes(run(TWO, guards=[LossInputs(drowned_above=above)])) == told


@pytest.mark.parametrize("wrong", [-1, 0.5, "1000", None, True])
def test_settings_that_cannot_work_are_refused(wrong: Any) -> None:
    with pytest.raises(GuardUsageError, match="drowned_above"):
        LossInputs(drowned_above=wrong)


def test_only_inspected_steps_are_looked_at() -> None:
    case = BY_NAME["softmax_layer"]
    assert codes(run(case, guards=[LossInputs()], inspect_steps=0)) == []
    model, loss_of = case.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[LossInputs()], sinks=[]) as guardian:
        for step in range(8):
            optimizer.zero_grad()
            (F.cross_entropy(model[:-1](features()[0]), features()[1]) if step < 6 else loss_of(model)).backward()  # type: ignore[index]  # a Sequential
            optimizer.step()
            if step == 5:
                assert codes(guardian) == []
                guardian.inspect_now()
    assert [(found.code, found.step) for found in guardian.findings] == [("GG652", 6)]


def test_strict_halts_at_the_users_line_and_detaches() -> None:
    case = BY_NAME["softmax_layer"]
    with pytest.raises(DataError) as halt:
        run(case, guards=[LossInputs()], strict=True)
    assert halt.value.finding.code == "GG652"
    assert any(entry.name == "loss_of" for entry in halt.traceback)
    assert torch._C._len_torch_function_stack() == 0


def test_several_micro_batches_and_evaluation_are_no_trouble() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[LossInputs()], sinks=[]) as guardian:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(4):
                x, y = features()
                (F.cross_entropy(model(x), y) / 4).backward()
            optimizer.step()
            with torch.no_grad():
                F.nll_loss(model(features()[0]), features()[1])
    assert codes(guardian) == []


def test_ignored_labels_are_counted_over_all_inspected_steps() -> None:
    found = [each for each in run(BY_NAME["hardly_any_counts"], guards=[LossInputs()]).findings if each.code == "GG606"]
    assert found[0].evidence == {"targets": 3, "of": 180, "rows": 3, "of_rows": 18}
    assert found[0].severity is Severity.ERROR


def test_what_the_look_costs_is_counted() -> None:
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Guardian(model, optimizer, guards=[LossInputs()], sinks=[]) as guardian:
        optimizer.zero_grad()
        two_heads(model).backward()
        optimizer.step()
        assert guardian._session is not None
        inspection = guardian._session.watch.inspection
        assert inspection.probes == {"loss balance": 1}
        assert inspection.spent > 0


def test_a_loss_written_by_hand_is_named_as_not_looked_at() -> None:
    model = classifier()
    by_hand = alone(model, lambda: model(features()[0]).pow(2).mean())
    assert [spot for spot in by_hand.report().not_watched if "written by hand" in spot]
    by_call = alone(model, lambda: F.cross_entropy(model(features()[0]), features()[1]))
    assert not [spot for spot in by_call.report().not_watched if spot.startswith("LossInputs")]


Score = Callable[[Tensor], Tensor]


def policy_loss(model: nn.Module, score: Score) -> Tensor:
    """A policy gradient on tokens: log-probabilities are gathered, no loss of torch's is called."""
    x, actions = torch.randn(8, 5, 12), torch.randint(7, (8, 5, 1))
    chosen = score(model(x)).gather(-1, actions)
    return -(chosen * torch.randn(8, 1, 1)).mean()


def probabilities(scores: Tensor) -> Tensor:
    return scores.softmax(-1).log_softmax(-1)


def by_function(scores: Tensor) -> Tensor:
    return F.log_softmax(nn.Softmax(dim=2)(scores).view_as(scores), dim=2)


@pytest.mark.parametrize("score", [probabilities, by_function])
def test_log_softmax_of_probabilities_is_told(score: Score) -> None:
    model = nn.Linear(12, 7)
    (found,) = alone(model, lambda: policy_loss(model, score)).findings
    assert (found.code, found.severity) == ("GG652", Severity.WARNING)
    assert found.where is not None
    assert "softmax" in found.where.text


@pytest.mark.parametrize(
    "score",
    [
        lambda scores: scores.log_softmax(-1),
        lambda scores: (scores.softmax(-1) + 1e-8).log(),
        lambda scores: (scores + scores.detach().softmax(-1)).log_softmax(-1),
        lambda scores: (4.0 * scores.softmax(-1)).log_softmax(-1),
        lambda scores: scores.softmax(1).log_softmax(-1),
    ],
    ids=["once", "logarithm of probabilities", "added to scores", "sharpened", "over another dimension"],
)
def test_what_is_no_second_softmax_is_silent(score: Score) -> None:
    model = nn.Linear(12, 7)
    assert codes(alone(model, lambda: policy_loss(model, score))) == []


def drawn(model: nn.Module, *, as_logits: bool) -> Tensor:
    """A policy gradient on actions that are drawn from probabilities."""
    given = model(torch.randn(32, 12)).softmax(-1)
    policy = torch.distributions.Categorical(logits=given) if as_logits else torch.distributions.Categorical(given)
    loss: Tensor = -(policy.log_prob(policy.sample()) * torch.randn(32)).mean()
    return loss


def test_probabilities_as_the_logits_of_a_distribution_are_told() -> None:
    model = nn.Linear(12, 7)
    (found,) = alone(model, lambda: drawn(model, as_logits=True)).findings
    assert found.code == "GG652"
    assert found.where is not None
    assert "logits=given" in found.where.text
    assert codes(alone(model, lambda: drawn(model, as_logits=False))) == []


def pictures(move: Score, height: int) -> list[str]:
    model = nn.Conv2d(3, 5, 3, padding=1)

    def loss() -> Tensor:
        x = torch.randn(4, 3, height, 6)
        return F.cross_entropy(move(model(x)), x.argmax(1).reshape(-1))

    return codes(alone(model, loss))


@pytest.mark.parametrize("height", [4, 5], ids=["mixed", "along a row"])
def test_pictures_of_scores_that_are_viewed_are_told(height: int) -> None:
    assert pictures(lambda scores: scores.reshape(-1, 5), height) == ["GG654"]
    assert pictures(lambda scores: scores.permute(0, 2, 3, 1).reshape(-1, 5), height) == []
