"""What each micro-batch counts for: divided twice, unequal means, and the right ways to do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Guardian, LossInputs, Severity
from gpt_guard.records import Finding

ROWS, WIDTH, CLASSES = 16, 6, 4
# Scores and labels, the number of micro-batches, and the targets of the whole step.
LossOf = Callable[[Tensor, Tensor, int, int], Tensor]


def accumulated(loss_of: LossOf, counted: Sequence[int], steps: int = 3) -> list[Finding]:
    """Micro-batches of 16 rows, of which so many count in each."""
    model = nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[LossInputs()], sinks=[], summary=False) as guardian:
        for _ in range(steps):
            optimizer.zero_grad()
            for count in counted:
                x = torch.randn(ROWS, WIDTH)
                y = x[:, :CLASSES].argmax(1)
                y[count:] = -100
                loss_of(model(x), y, len(counted), sum(counted)).backward()
            optimizer.step()
    return list(guardian.findings)


def plain(scores: Tensor, y: Tensor, micro_batches: int, _: int) -> Tensor:
    return F.cross_entropy(scores, y) / micro_batches


def summed_by_hand(scores: Tensor, y: Tensor, micro_batches: int, _: int) -> Tensor:
    total: Tensor = F.cross_entropy(scores, y, reduction="sum") / (y != -100).sum()
    return total / micro_batches


def log_probabilities(scores: Tensor, y: Tensor, micro_batches: int, _: int) -> Tensor:
    return F.nll_loss(scores.log_softmax(1), y) / micro_batches


def over_the_whole_step(scores: Tensor, y: Tensor, _: int, total: int) -> Tensor:
    return F.cross_entropy(scores, y, reduction="sum") / total


def weighed(scores: Tensor, y: Tensor, _: int, total: int) -> Tensor:
    return F.cross_entropy(scores, y) * ((y != -100).sum() / total)


@pytest.mark.parametrize("loss_of", [plain, summed_by_hand, log_probabilities])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_a_loss_that_is_divided_twice(loss_of: LossOf, micro_batches: int) -> None:
    (found,) = accumulated(lambda s, y, k, n: loss_of(s, y, k, n) / k, [ROWS] * micro_batches)
    assert (found.code, found.severity, found.step) == ("GG240", Severity.WARNING, 0)
    assert f"divided by {micro_batches} twice" in found.seen
    assert found.evidence["factor"] == pytest.approx(1 / micro_batches**2, rel=1e-3)
    assert found.where is not None


@pytest.mark.parametrize("loss_of", [plain, summed_by_hand, log_probabilities])
@pytest.mark.parametrize("counted", [(2, 3, 14, 16), (4, 6), (16, 16, 8)])
def test_means_over_different_numbers_of_targets(loss_of: LossOf, counted: tuple[int, ...]) -> None:
    (found,) = accumulated(loss_of, counted, steps=1)
    assert (found.code, found.severity, found.step) == ("GG239", Severity.INFO, 0)
    assert found.evidence["counted"] == list(counted)
    assert found.evidence["ratio"] == pytest.approx(max(counted) / min(counted))
    assert f"weights {counted[0] / sum(counted):.3g}"[:11] in found.seen


def test_of_several_such_steps_loop_order_tells() -> None:
    assert accumulated(plain, (2, 3, 14, 16)) == []


def test_a_shorter_last_window_has_such_a_factor_by_chance() -> None:
    model = nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guardian(model, optimizer, guards=[LossInputs()], sinks=[], summary=False) as guardian:
        for window in (4, 4, 2):
            optimizer.zero_grad()
            for _ in range(window):
                x = torch.randn(ROWS, WIDTH)
                (F.cross_entropy(model(x), x[:, :CLASSES].argmax(1)) / 4).backward()
            optimizer.step()
    assert guardian.findings == ()


@pytest.mark.parametrize(
    ("loss_of", "counted"),
    [
        (plain, (16, 16, 16)),
        (plain, (16, 14, 12)),
        (plain, (16,)),
        (weighed, (2, 3, 14, 16)),
        (lambda s, y, k, n: over_the_whole_step(s, y, k, n), (2, 3, 14, 16)),
        # A weight of the loss, and a second one beside it.
        (lambda s, y, k, n: 0.5 * plain(s, y, k, n), (16, 16, 16, 16)),
        (lambda s, y, k, n: plain(s, y, k, n) / k + s.square().mean(), (16, 16)),
        (lambda s, y, k, n: (F.cross_entropy(s, y) + F.cross_entropy(s * 2, y)) / k / 2, (2, 14)),
        (lambda s, y, k, n: F.cross_entropy(s, y, weight=torch.ones(CLASSES)) / k / k, (16, 16)),
    ],
)
def test_the_right_ways_are_left_alone(loss_of: LossOf, counted: tuple[int, ...]) -> None:
    assert [each.code for each in accumulated(loss_of, counted) if each.code in ("GG240", "GG239")] == []


def test_what_is_computed_for_a_metric_is_no_part_of_it() -> None:
    def with_a_metric(scores: Tensor, y: Tensor, micro_batches: int, _: int) -> Tensor:
        with torch.no_grad():
            F.cross_entropy(scores[:4], y[:4])
        return F.cross_entropy(scores, y) / micro_batches**2

    assert [each.code for each in accumulated(with_a_metric, [ROWS, ROWS])] == ["GG240"]
