"""Stage 7: the first loss against log V, and the loss recomputed from logits and targets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.callbacks.losses.reduction import ALLOWED_ABOVE, FirstLoss
from gpt_guard.callbacks.losses.scores import are_probabilities
from gpt_guard.catalogue import finding
from gpt_guard.checks.initial_loss.first_loss import cut, first_loss, scale_of_logits
from gpt_guard.checks.initial_loss.loss_lines import batch_shift, judge_form
from gpt_guard.checks.initial_loss.loss_probe import form_of_loss, project_loss
from gpt_guard.checks.runner.base import Stage, Subject
from gpt_guard.checks.runner.forward import call, takes_targets
from gpt_guard.checks.runner.perturb import probe_ids
from gpt_guard.hooks.isolation.preserve import quiet
from gpt_guard.records import CheckResult
from gpt_guard.records.render import number

CLEARLY_BELOW = 0.95
"""Share of log V that a trained model must be below: in any text, letter frequencies alone save more than 5 %."""


class InitialLossStage(Stage):
    """The form of the loss, the logits, the loss of an untrained model, and of a trained one where there is one.

    All in eval mode and without gradient.
    """

    number = 7
    name = "initial-loss"
    title = "Initial loss"
    after = ("shapes",)

    def missing(self, subject: Subject) -> str | None:
        """A model and a batch."""
        if subject.model is None:
            return "no model"
        return "no batch, and no data to cut one from" if subject.inputs is None else None

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        """One line per question."""
        model, inputs = subject.model, subject.inputs
        if model is None or inputs is None:
            return
        with quiet(model):
            yield self._scores(model, subject)
            yield self._form(model, subject)
            vocab = call(model, probe_ids(subject, 1, 2)).logits.size(-1)
            x, y = cut(*inputs, vocab, subject.block_size)
            yield self._fresh(model, x, y, subject)
            if subject.trained:
                yield self._trained(model, x, y, subject)

    def _scores(self, model: nn.Module, subject: Subject) -> CheckResult:
        title, expected = "raw scores", "logits, not probabilities"
        if not are_probabilities(call(model, probe_ids(subject)).logits):
            return self.passed(title, "logits", expected)
        form = form_of_loss(model, subject) if _has_loss(model, subject) else None
        if form is not None and form.key == "nll":
            return self.passed(title, f"probabilities, and the loss is {form.words}", expected)
        seen = "Each row of what the model returns lies between 0 and 1 and sums to 1: these are probabilities."
        return self.failed(title, "probabilities", expected, finding("GG652", seen, likely=["in_model"]))

    def _form(self, model: nn.Module, subject: Subject) -> CheckResult:
        title = "loss function"
        expected = f"mean cross entropy of position t and {'token t + 1' if subject.causal else 'its own target'}"
        if not _has_loss(model, subject):
            return self.skipped(title, "no loss of its own and no loss_fn: cross entropy is taken")
        form = form_of_loss(model, subject)
        wrong, notes = judge_form(form, subject)
        measured = form.words if form is not None else "not recognised"
        if wrong:
            return self.failed(title, measured, expected, [*wrong, *notes])
        return self.passed(title, measured, expected, notes=notes)

    def _fresh(self, model: nn.Module, x: Tensor, y: Tensor, subject: Subject) -> CheckResult:
        title = "loss before training"
        if not subject.trained:
            fresh = model
        elif subject.make_model is not None:
            fresh = subject.make_model()
        else:
            return self.skipped(title, "the model is trained, and there is no make_model to build a fresh one")
        result = self._loss_of(title, fresh, x, y, subject)
        if result.status == "failed" and fresh is model and subject.make_model is not None:
            # Weights that come from training look like this, too: then a fresh model shows that it is no more.
            anew = self._loss_of(title, subject.make_model(), x, y, subject)
            if anew.status == "passed" and result.findings[0].code == "GG651":
                said = f"{anew.measured}; the weights given come from training, it seems: {result.measured}"
                return anew.model_copy(update={"measured": said})
        return result

    def _loss_of(self, title: str, fresh: nn.Module, x: Tensor, y: Tensor, subject: Subject) -> CheckResult:
        first = next(fresh.parameters(), x)
        x, y = x.to(first.device), y.to(first.device)
        with quiet(fresh):
            found = first_loss(fresh, x, y, subject.ignore_index, int(subject.shifts_inside))
            if found is None:
                return self.skipped(title, "no target counts, or the loss is not finite")
            own = project_loss(fresh, x, y, subject.loss_fn)
            figure = found.loss if own is None else float(own.float().mean())
            return self._judge(title, fresh, subject, x, found, figure)

    def _judge(
        self, title: str, fresh: nn.Module, subject: Subject, x: Tensor, found: FirstLoss, own: float
    ) -> CheckResult:
        vocab = round(math.exp(found.log_vocab))
        facts: dict[str, Any] = {"initial_loss": own, "expected_loss": found.log_vocab}
        measured = f"{number(found.loss)}, logits have a std of {number(found.spread)}"
        if not math.isclose(own, found.loss, rel_tol=1e-2):
            measured += f"; the loss that is trained is {number(own)}"
        expected = f"log {vocab} = {number(found.log_vocab)}, from {number(found.lowest)} to {number(found.highest)}"
        if found.loss < found.lowest:
            return self._low(title, measured, expected, subject, found, facts)
        if not found.too_high:
            return self.passed(title, measured, expected, **facts)
        scale = scale_of_logits(fresh, x, vocab)
        # The same logits cost as much with any targets: it is their size. Otherwise it is these targets.
        large = found.even > found.log_vocab + ALLOWED_ABOVE
        likely = ["targets"] if not large else scale.likely if scale is not None else []
        seen = (
            f"An untrained model has a loss of {number(found.loss)}; log {vocab} is {number(found.log_vocab)}. "
            f"Its logits have a std of {number(found.spread)}, "
            f"which costs {number(found.even - found.log_vocab)} by itself. "
        )
        words = scale.words if scale is not None else ""
        return self.failed(title, measured, expected, finding("GG650", seen + words, likely=likely), **facts)

    def _low(
        self, title: str, measured: str, expected: str, subject: Subject, found: FirstLoss, facts: dict[str, Any]
    ) -> CheckResult:
        if found.prior <= found.loss + 0.1:
            known = "as low as the bias of the output layer makes it for any input"
            return self.passed(title, f"{measured}; {known}", expected, **facts)
        seen = (
            f"A model that should be untrained has a loss of {number(found.loss)}; guessing evenly costs "
            f"log V = {number(found.log_vocab)}."
        )
        likely = ["not_shifted"] if batch_shift(subject) == 0 and not subject.shifts_inside else ["not_fresh"]
        return self.failed(title, measured, expected, finding("GG651", seen, likely=likely), **facts)

    def _trained(self, model: nn.Module, x: Tensor, y: Tensor, subject: Subject) -> CheckResult:
        title = "loss of the trained model"
        found = first_loss(model, x, y, subject.ignore_index, int(subject.shifts_inside))
        if found is None:
            return self.skipped(title, "no target counts, or the loss is not finite")
        bound = CLEARLY_BELOW * found.log_vocab
        measured, expected = number(found.loss), f"below {number(bound)}, 95 % of log V"
        if found.loss < bound:
            return self.passed(title, measured, expected)
        above = found.loss > found.log_vocab + 0.1
        seen = f"The trained model has a loss of {number(found.loss)}; guessing evenly costs {number(found.log_vocab)}."
        likely = ["tokenizer", "shift"] if above else ["not_loaded", "not_learned"]
        repeating = first_loss(model, x, x, subject.ignore_index, 0)
        if subject.causal and repeating is not None and repeating.loss < bound:
            likely = ["shift"]
            seen += f" It repeats its input: with the inputs as targets its loss is {number(repeating.loss)}."
        return self.failed(title, measured, expected, finding("GG658", seen, likely=likely))


def _has_loss(model: nn.Module, subject: Subject) -> bool:
    if subject.loss_fn is not None:
        return True
    if not takes_targets(model):
        return False
    x = probe_ids(subject, 2)
    with torch.no_grad():
        return call(model, x, x).loss is not None
