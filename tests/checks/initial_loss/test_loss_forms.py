"""The form of a loss: every wrong one is named, every right one passes, others are noted."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.callbacks.losses.scores import are_probabilities
from gpt_guard.checks.initial_loss.loss_forms import Form, Probe, recognise

from ..small_gpt import GPT, ShiftsInside, V, ask_stage, batch, line
from ..variants import MoE

Loss = Callable[[Tensor, Tensor], Tensor]


def ce(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


ask = partial(ask_stage, "initial-loss")


RIGHT: dict[str, tuple[Loss, str]] = {
    "plain": (ce, "cross entropy"),
    "class second": (lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y), "cross entropy"),
    "log_softmax and nll": (lambda logits, y: F.nll_loss(logits.log_softmax(-1).transpose(1, 2), y), "cross entropy"),
    "softmax of the log": (lambda logits, y: ce(logits.log_softmax(-1), y), "cross entropy"),
    "label smoothing": (lambda logits, y: ce(logits, y, label_smoothing=0.1), "label smoothing 0.1"),
    "z-loss": (
        lambda logits, y: ce(logits, y) + 1e-2 * logits.logsumexp(-1).square().mean(),
        "does not depend on the targets",
    ),
    "class weights": (lambda logits, y: ce(logits, y, weight=torch.linspace(0.2, 2, V)), "weight for each class"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_forms_pass_and_are_recognised(name: str) -> None:
    loss_fn, words = RIGHT[name]
    report = ask(loss_fn=loss_fn)
    assert report.passed, report
    assert not report.findings
    assert words in line(report, "loss function").measured


WRONG: dict[str, tuple[Loss, str, str]] = {
    "softmax twice": (lambda logits, y: ce(logits.softmax(-1), y), "GG652", "calls softmax before"),
    "no log": (lambda logits, y: F.nll_loss(logits.softmax(-1).transpose(1, 2), y), "GG652", "nll_loss is fed"),
    "double shift": (lambda logits, y: ce(logits[:, :-1], y[:, 1:]), "GG653", "Shifted twice"),
    "backward shift": (lambda logits, y: ce(logits[:, 1:], y[:, :-1]), "GG653", "the wrong way"),
    "targets transposed": (lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.t().flatten()), "GG654", "[T, B]"),
    "logits transposed": (
        lambda logits, y: F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), y.flatten()),
        "GG654",
        "logits were transposed",
    ),
    "viewed": (lambda logits, y: F.cross_entropy(logits.reshape(y.size(0), V, -1), y), "GG654", "view or reshape"),
    "viewed back": (
        lambda logits, y: F.cross_entropy(logits.transpose(1, 2).reshape(-1, V), y.flatten()),
        "GG654",
        "view or reshape",
    ),
    "sum": (lambda logits, y: ce(logits, y, reduction="sum"), "GG655", "reduction='sum'"),
    "sum over time": (lambda logits, y: ce(logits, y, reduction="sum") / y.size(0), "GG655", "averaged over samples"),
    "sum over rows": (lambda logits, y: ce(logits, y, reduction="sum") / y.size(1), "GG655", "averaged over positions"),
}


@pytest.mark.parametrize(
    "kind", [GPT, lambda: GPT().bfloat16(), lambda: zero_head()], ids=["float32", "bfloat16", "zero"]
)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_forms_are_named(name: str, kind: Callable[[], GPT]) -> None:
    loss_fn, code, cause = WRONG[name]
    report = ask(kind(), loss_fn=loss_fn)
    assert line(report, "loss function").status == "failed"
    assert [found.code for found in report.findings] == [code]
    assert cause in report.findings[0].causes[0]


def zero_head() -> GPT:
    model = GPT(tie=False)
    nn.init.zeros_(model.head.weight)
    return model


NOTED: dict[str, tuple[Loss, str, str]] = {
    "bits": (lambda logits, y: ce(logits, y) / math.log(2), "GG659", "in bits"),
    "accumulation": (lambda logits, y: ce(logits, y) / 8, "GG659", "micro-batches"),
    "factor": (lambda logits, y: 0.3 * ce(logits, y), "GG659", "constant factor"),
    "perplexity": (lambda logits, y: ce(logits, y).exp(), "GG659", "perplexity"),
    "an id left out": (lambda logits, y: ce(logits, y, ignore_index=5), "GG657", "ignore_index"),
    "focal": (
        lambda logits, y: (lambda p: -((1 - p) ** 2 * p.log()).mean())(logits.softmax(-1).gather(-1, y[..., None])),
        "GG656",
        "of its own kind",
    ),
}


@pytest.mark.parametrize("name", NOTED)
def test_forms_that_may_be_meant_are_notes(name: str) -> None:
    loss_fn, code, cause = NOTED[name]
    report = ask(loss_fn=loss_fn)
    assert report.passed
    assert [found.code for found in report.findings] == [code]
    assert cause in report.findings[0].causes[0]


def test_an_id_left_out_is_right_for_padding_and_wrong_for_another() -> None:
    def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
        return ce(logits, y, ignore_index=5)

    assert not ask(loss_fn=loss_fn, pad_id=5).findings
    report = ask(loss_fn=loss_fn, pad_id=0)
    assert not report.passed
    assert "Targets of 5" in report.findings[0].seen


def test_ignored_labels_do_not_count() -> None:
    x, y = batch()
    y[:, ::4] = -100
    assert ask(batch=(x, y)).passed
    report = ask(batch=(x, y), loss_fn=lambda logits, y: ce(logits, y, reduction="sum") / y.numel())
    assert [found.code for found in report.findings] == ["GG655"]
    assert "denominator" in report.findings[0].causes[0]


def test_another_label_may_be_the_ignored_one() -> None:
    x, y = batch()
    y[:, ::4] = -1
    report = ask(batch=(x, y), ignore_index=-1, loss_fn=lambda logits, y: ce(logits, y, ignore_index=-1))
    assert report.passed, report
    assert not report.findings


def test_targets_that_are_not_shifted_at_all() -> None:
    x, _ = batch()
    report = ask(batch=(x, x))
    assert [found.code for found in report.findings] == ["GG653"]
    assert "Not shifted at all" in report.findings[0].causes[0]


def test_labels_that_are_shifted_in_the_batch_and_inside() -> None:
    report = ask(ShiftsInside())
    assert [found.code for found in report.findings] == ["GG653"]
    assert "Shifted twice" in report.findings[0].causes[0]
    assert "t+2" in report.findings[0].seen


class Probabilities(GPT):
    def logits(self, idx: Tensor) -> Tensor:
        return super().logits(idx).softmax(-1)


class RightProbabilities(Probabilities):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.nll_loss(logits.log().flatten(0, 1), targets.flatten())


def test_a_model_that_returns_probabilities() -> None:
    report = ask(Probabilities())
    assert [found.code for found in report.findings] == ["GG652"]
    assert "forward ends in softmax" in report.findings[0].causes[0]
    assert ask(RightProbabilities()).passed
    assert are_probabilities(torch.randn(3, 4, 5).softmax(-1))
    assert not are_probabilities(torch.randn(3, 4, 5).log_softmax(-1))


def test_a_loss_that_balances_experts_is_recognised() -> None:
    report = ask(MoE())
    assert "does not depend on the targets" in line(report, "loss function").measured


def test_a_probe_that_cannot_tell_forms_apart_takes_the_right_one() -> None:
    logits, targets = torch.zeros(2, 3, 5, dtype=torch.double), torch.zeros(2, 3, dtype=torch.long)
    found = recognise(Probe(logits, [targets], [math.log(5)], 1e-4), lambda _: math.log(5))
    assert found == Form("plain", "cross entropy")
