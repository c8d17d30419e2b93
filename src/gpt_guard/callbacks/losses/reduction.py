"""The number that a loss comes to: how it was reduced over all positions, and whether the first one is an odd one.

An untrained model guesses evenly: its mean cross entropy is log V, and what is above that has parts that explain it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.callbacks.call_issue import CallIssue
from gpt_guard.callbacks.losses.calls import ClassIds, reduction_of
from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.records import Severity
from gpt_guard.records.render import number

ALLOWED_ABOVE = 1.0
"""Nats above log V. Logits of standard deviation s cost s**2 / 2 (the mean of a log-normal distribution); an output
layer of variance 1/width (LeCun et al. 1998) on normalised states makes s = 1, half a nat. Twice that is allowed."""
ALLOWED_BELOW = 0.5
"""Nats below log V, and never more than half of log V. Weights of a tied embedding favour the current token, which is
the next one now and then: a few tenths of a nat in text."""
_SAMPLING = 4.0
"""Standard errors that a mean over few positions may be off."""
_IN_PLAY = 50.0
"""Scores so far below the largest are masked: rows of a padded vocabulary, set to -inf or -1e9."""
_SAME = 1e-5
_FAR_ABOVE = 1.5
"""Times log V: an untrained model that starts there spends its first steps on nothing but shrinking its logits."""
_ADDED = 0.5
"""Nats that smoothing or class weights add before they are what makes a loss odd, as much as is allowed below."""
_MOST_SCORES = 2**22
"""16 MB of float32 are looked at."""


class ReducedLoss(NamedTuple):
    """What a class loss came to: the sum over its positions, how many there are, and how many of them count."""

    total: float
    positions: int
    counted: int

    def over_all_positions(self, loss: float) -> bool:
        """Whether a loss is the sum divided by the number of all positions, of which some do not count."""
        if not 2 <= self.counted < self.positions or self.total == 0:
            return False
        return math.isclose(loss, self.total / self.positions, rel_tol=_SAME)

    def evidence(self, loss: float) -> dict[str, Any]:
        """The numbers behind a finding."""
        return {"loss": loss, "positions": self.positions, "counted": self.counted}


def reduced(call: FunctionCall, known: ClassIds) -> ReducedLoss | None:
    """Numbers of a call that gives no mean; None for one that does. Reads the result."""
    if reduction_of(call) == "mean":
        return None
    return ReducedLoss(float(call.result.detach().sum()), known.targets.numel(), int(known.counted.sum()))


def plain_sum(each: ReducedLoss, loss: float) -> Iterator[CallIssue]:
    """GG655 where the loss as a whole is the plain sum."""
    if each.counted < 2 or each.total == 0 or not math.isclose(loss, each.total, rel_tol=_SAME):
        return
    text = (
        f"The loss {number(loss)} is the sum over {each.counted} targets, {each.counted} times their mean "
        f"{number(each.total / each.counted)}: loss and gradients grow with the batch."
    )
    # A sum is a choice that a learning rate can make up for.
    yield CallIssue("GG655", text, ("sum",), Severity.INFO, each.evidence(loss))


def over_all_positions(each: ReducedLoss) -> CallIssue:
    """GG655 for a loss that is a mean over ignored positions as well."""
    loss = each.total / each.positions
    text = (
        f"The loss {number(loss)} is the sum over {each.counted} targets divided by {each.positions} positions, "
        f"ignored ones included; the mean over those that count is {number(each.total / each.counted)}."
    )
    return CallIssue("GG655", text, ("all_positions",), Severity.WARNING, each.evidence(loss))


def looks_untrained(model: nn.Module) -> bool:
    """Whether all normalisation layers have gains of exactly 1, as before any training; False without such layers."""
    norms = [each for each in model.modules() if "norm" in type(each).__name__.lower()]
    gains = [gain for each in norms for name, gain in each.named_parameters(recurse=False) if name == "weight"]
    return bool(gains) and all(bool((gain == 1).all()) for gain in gains)


def _output_weight(model: nn.Module, classes: int) -> tuple[str, float] | None:
    """Name and spread of the last layer's matrix with a row for each class; None without one."""
    found = None
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and isinstance(weight, Tensor) and weight.size(0) == classes:
            found = f"{path}.weight" if path else "weight", float(weight.detach().float().std())
    return found


def first_loss(call: FunctionCall, known: ClassIds, model: nn.Module) -> Iterator[CallIssue]:
    """GG627 where the first loss of a run is far above log C, with what explains it. Reads scores and result.

    A warning where the model starts untrained and its logits alone are the reason; else worth knowing.
    """
    found = _parts(known) if call.kind == "cross_entropy" else None
    if found is None:
        return
    weights, smoothing = call.get("weight") is not None, float(call.get("label_smoothing", 0.0))
    loss = float(call.result.detach()) if reduction_of(call) == "mean" else found.loss
    added = loss - found.loss if weights or smoothing else 0.0
    dear = loss > found.log_vocab + ALLOWED_ABOVE and added > _ADDED
    # Confident logits that are right are a model that comes from training.
    high = found.loss > found.highest
    if not (high or dear) or not math.isfinite(loss):
        return
    classes = round(math.exp(found.log_vocab))
    text = f"The first loss is {number(loss)}; an even guess among {classes} classes costs {number(found.log_vocab)}."
    given = [f"label_smoothing={smoothing:g}"] * (smoothing > 0) + ["class weights"] * weights
    likely: list[str] = ["smoothing"] * (smoothing > 0) + ["weights"] * weights
    if given:
        without = "which explains it" if not high else "which does not explain it alone"
        text += f" With {' and '.join(given)}, {without}: without, it is {number(found.loss)}."
    large = found.even > found.log_vocab + ALLOWED_ABOVE
    text += f" The logits have a standard deviation of {number(found.spread)}."
    likely = likely if not high else ["scale" if large else "other_task", *likely]
    evidence: dict[str, Any] = {"loss": loss, "expected": found.log_vocab, "plain": found.loss, "spread": found.spread}
    severity = Severity.INFO
    far = high and large and found.loss > _FAR_ABOVE * found.log_vocab
    # Scores without such a matrix are similarities, of a batch with itself perhaps, with a temperature of their own.
    if far and looks_untrained(model) and (output := _output_weight(model, classes)) is not None:
        severity = Severity.WARNING
        text += f" The model starts untrained (the gains of its norms are all 1), and `{output[0]}` has a std of "
        text += f"{number(output[1])}."
    yield CallIssue("GG627", text, tuple(likely), severity, evidence)


def _parts(known: ClassIds) -> FirstLoss | None:
    rows = known.scores.detach().movedim(known.dim, -1).reshape(-1, known.classes)
    counts = known.counted.reshape(-1)
    if rows.size(0) != counts.numel() or known.classes < 2:
        return None
    most = max(1, _MOST_SCORES // known.classes)
    chosen = counts.nonzero()[:most, 0]
    targets = known.targets.reshape(-1)[chosen].long()
    in_range = bool(((targets >= 0) & (targets < known.classes)).all())
    return loss_parts(rows[chosen].float(), targets) if in_range else None


class FirstLoss(NamedTuple):
    """Mean cross entropy and what it is made of, in nats.

    `even` is the loss that these logits have with targets drawn evenly, `prior` the loss of their mean over all
    positions, which knows frequencies but not the input; `spread` is the standard deviation over the classes.
    """

    loss: float
    even: float
    prior: float
    spread: float
    positions: int
    log_vocab: float

    @property
    def sampling(self) -> float:
        """How far the mean may be off because the positions are few."""
        return _SAMPLING * self.spread / math.sqrt(max(1, self.positions))

    @property
    def too_high(self) -> bool:
        """True where the loss is above what chance explains, or the logits are too large for any targets."""
        return max(self.loss - self.sampling, self.even) > self.log_vocab + ALLOWED_ABOVE

    @property
    def highest(self) -> float:
        """Above this the logits are too large, or wrong."""
        return self.log_vocab + ALLOWED_ABOVE + self.sampling

    @property
    def lowest(self) -> float:
        """Below this the model knows what it cannot know."""
        return self.log_vocab - min(ALLOWED_BELOW + self.sampling, 0.5 * self.log_vocab)


def loss_parts(logits: Tensor, targets: Tensor) -> FirstLoss | None:
    """Cross entropy of logits `[N, V]` against ids `[N]`, all of which count; None if it is not finite.

    Reads the device.
    """
    if not targets.numel() or not bool(logits.isfinite().any(-1).all()):
        return None
    normaliser = logits.logsumexp(-1)
    in_play = logits > logits.amax(-1, keepdim=True) - _IN_PLAY
    even, spread = _even(logits, in_play)
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    prior = logits.mean(0, keepdim=True).log_softmax(-1)[0]
    values = (
        (normaliser - chosen).mean(),
        (normaliser - even).mean(),
        -prior[targets].mean(),
        spread.mean(),
    )
    loss, of_even, of_mean, std = torch.stack(values).tolist()
    if not math.isfinite(loss):
        return None
    return FirstLoss(loss, of_even, of_mean, std, targets.numel(), math.log(logits.size(-1)))


def _even(logits: Tensor, in_play: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each row's scores that are in play."""
    count = in_play.sum(-1).clamp_min(1)
    mean = logits.masked_fill(~in_play, 0.0).sum(-1) / count
    apart = (logits - mean.unsqueeze(-1)).masked_fill(~in_play, 0.0)
    return mean, (apart.square().sum(-1) / count).sqrt()
