"""Stage 7: the first loss against log V, and the loss recomputed from logits and targets."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gpt_guard.callbacks.losses.reduction import ALLOWED_ABOVE, FirstLoss, loss_parts
from gpt_guard.callbacks.losses.scores import are_probabilities
from gpt_guard.catalogue import finding
from gpt_guard.checks.initial_loss.loss_forms import Form, form_of_loss, output_layer
from gpt_guard.checks.initial_loss.pull import judge_pull, pull
from gpt_guard.checks.runner.base import BATCH, MODEL, Stage, Subject
from gpt_guard.checks.runner.forward import call, project_loss, takes_targets
from gpt_guard.checks.runner.perturb import probe_ids
from gpt_guard.checks.tokenizer.vocabulary import special_id
from gpt_guard.hooks.isolation.preserve import preserved, quiet
from gpt_guard.records import CheckResult, Finding, Severity
from gpt_guard.records.render import number

CLEARLY_BELOW = 0.95
"""Share of log V that a trained model must be below: in any text, letter frequencies alone save more than 5 %."""
_LARGE, _GROWN = 1.5, 2.0
"""Times the std of variance 1/width, and times the RMS 1 of a normalised state."""
VERY_MANY = 2**31
_MOST_SCORES = 2**24
_MOST_POSITIONS = 128
"""Bounds on what is computed at once, for time and for memory: 64 MB of float32 logits."""
_CODES = {
    **dict.fromkeys(("softmax_twice", "probability"), "GG652"),
    **dict.fromkeys(("targets_transposed", "logits_transposed", "viewed"), "GG654"),
    **dict.fromkeys(("sum", "sum_over_time", "sum_over_batch", "all_positions"), "GG655"),
    **dict.fromkeys(("negated", "unnormalised", "squared"), "GG656"),
    **dict.fromkeys(("bits", "accumulation", "factor", "perplexity"), "GG659"),
}
"""What each form of loss is called where it is not the right one; the form's key is the cause, but for these two."""
_CAUSES = {"softmax_twice": "in_loss", "probability": "log"}


class InitialLossStage(Stage):
    """The form of the loss, the logits, the loss of an untrained model, and of a trained one where there is one.

    All in eval mode and without gradient.
    """

    number = 7
    name = "initial-loss"
    title = "Initial loss"
    after = ("shapes",)
    needs = (MODEL, BATCH)

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        """One line per question."""
        model, inputs = MODEL(subject), BATCH(subject)
        with quiet(model):
            yield self._scores(model, subject)
            yield self._form(model, subject)
            vocab = call(model, probe_ids(subject, 1, 2)).logits.size(-1)
            x, y = _cut(*inputs, vocab, subject.block_size)
            yield self._fresh(model, x, y, subject)
            if subject.trained:
                yield self._trained(model, x, y, subject)

    def _scores(self, model: nn.Module, subject: Subject) -> CheckResult:
        title, expected = "raw scores", "logits, not probabilities"
        if not are_probabilities(call(model, probe_ids(subject)).logits):
            return self.line(title, "logits", expected)
        form = form_of_loss(model, subject) if _has_loss(model, subject) else None
        if form is not None and form.key == "nll":
            return self.line(title, f"probabilities, and the loss is {form.words}", expected)
        seen = "Each row of what the model returns lies between 0 and 1 and sums to 1: these are probabilities."
        return self.line(title, "probabilities", expected, finding("GG652", seen, likely=["in_model"]))

    def _form(self, model: nn.Module, subject: Subject) -> CheckResult:
        title = "loss function"
        expected = f"mean cross entropy of position t and {'token t + 1' if subject.causal else 'its own target'}"
        if not _has_loss(model, subject):
            return self.skipped(title, "no loss of its own and no loss_fn: cross entropy is taken")
        form = form_of_loss(model, subject)
        if (pulled := _pulled(model, subject, form)) is not None:
            return self.line(title, form.words if form is not None else "not recognised", expected, pulled)
        if form is None:
            seen = "The loss is none of the known functions of the returned logits and the targets."
            return self.line(title, "not recognised", expected, finding("GG656", seen, likely=["own_loss"]))
        found = [one for one in (_wrong_form(form, subject), _wrong_pairs(form, subject)) if one is not None]
        found.sort(key=lambda one: one.severity is not Severity.ERROR)
        return self.line(title, form.words, expected, found)

    def _fresh(self, model: nn.Module, x: Tensor, y: Tensor, subject: Subject) -> CheckResult:
        if not subject.trained:
            fresh = model
        elif subject.make_model is not None:
            fresh = subject.make_model()
        else:
            why = "the model is trained, and there is no make_model to build a fresh one"
            return self.skipped("loss before training", why)
        result = self._untrained(fresh, x, y, subject)
        if result.status == "failed" and fresh is model and subject.make_model is not None:
            # Weights that come from training look like this, too: then a fresh model shows that it is no more.
            anew = self._untrained(subject.make_model(), x, y, subject)
            if anew.status == "passed" and result.findings[0].code == "GG651":
                measured = f"{anew.measured}; the weights given come from training, it seems: {result.measured}"
                return anew.model_copy(update={"measured": measured})
        return result

    def _untrained(self, fresh: nn.Module, x: Tensor, y: Tensor, subject: Subject) -> CheckResult:
        title, wrong = "loss before training", None
        first = next(fresh.parameters(), x)
        x, y = x.to(first.device), y.to(first.device)
        with quiet(fresh):
            found = _first_loss(fresh, x, y, subject.ignore_index, int(subject.shifts_inside))
            if found is None:
                return self.skipped(title, "no target counts, or the loss is not finite")
            own = project_loss(fresh, x, y, subject.loss_fn)
            loss = found.loss if own is None else float(own.float().mean())
            measured = f"{number(found.loss)}, logits have a std of {number(found.spread)}"
            if not math.isclose(loss, found.loss, rel_tol=1e-2):
                measured += f"; the loss that is trained is {number(loss)}"
            if found.loss >= found.lowest:
                wrong = _too_high(fresh, x, found) if found.too_high else None
            elif found.prior <= found.loss + 0.1:
                measured += "; as low as the bias of the output layer makes it for any input"
            else:
                wrong = _too_low(found, subject)
        low, high, log_vocab = number(found.lowest), number(found.highest), found.log_vocab
        expected = f"log {round(math.exp(log_vocab))} = {number(log_vocab)}, from {low} to {high}"
        return self.line(title, measured, expected, wrong, initial_loss=loss, expected_loss=log_vocab)

    def _trained(self, model: nn.Module, x: Tensor, y: Tensor, subject: Subject) -> CheckResult:
        title = "loss of the trained model"
        found = _first_loss(model, x, y, subject.ignore_index, int(subject.shifts_inside))
        if found is None:
            return self.skipped(title, "no target counts, or the loss is not finite")
        bound = CLEARLY_BELOW * found.log_vocab
        measured, expected = number(found.loss), f"below {number(bound)}, 95 % of log V"
        if found.loss < bound:
            return self.line(title, measured, expected)
        above = found.loss > found.log_vocab + 0.1
        seen = f"The trained model has a loss of {number(found.loss)}; guessing evenly costs {number(found.log_vocab)}."
        likely = ["tokenizer", "shift"] if above else ["not_loaded", "not_learned"]
        repeating = _first_loss(model, x, x, subject.ignore_index, 0)
        if subject.causal and repeating is not None and repeating.loss < bound:
            likely = ["shift"]
            seen += f" It repeats its input: with the inputs as targets its loss is {number(repeating.loss)}."
        return self.line(title, measured, expected, finding("GG658", seen, likely=likely))


def _has_loss(model: nn.Module, subject: Subject) -> bool:
    if subject.loss_fn is not None:
        return True
    if not takes_targets(model):
        return False
    x = probe_ids(subject, 2)
    with torch.no_grad():
        return call(model, x, x).loss is not None


def _cut(x: Tensor, y: Tensor, vocab: int, longest: int | None) -> tuple[Tensor, Tensor]:
    """As much of a batch as is computed at once."""
    length = min(x.size(1), _MOST_POSITIONS, longest or x.size(1))
    rows = max(1, min(x.size(0), _MOST_SCORES // max(1, vocab * length)))
    return x[:rows, :length], y[:rows, :length]


def _first_loss(model: nn.Module, x: Tensor, y: Tensor, ignore_index: int, shift: int) -> FirstLoss | None:
    """Cross entropy of logits `[B, T, V]` against targets `shift` positions later; None if it is not finite."""
    logits = call(model, x).logits.float()
    logits, y = logits[:, : logits.size(1) - shift], y[:, shift:].long()
    counts = (y != ignore_index) & (y >= 0) & (y < logits.size(-1))
    return loss_parts(logits[counts], y[counts])


def _too_high(model: nn.Module, x: Tensor, found: FirstLoss) -> Finding:
    """GG650, with what the size of the logits comes from."""
    vocab = round(math.exp(found.log_vocab))
    words, causes = _size_of_logits(model, x, vocab)
    # The same logits cost as much with any targets: it is their size. Otherwise it is these targets.
    large = found.even > found.log_vocab + ALLOWED_ABOVE
    seen = (
        f"An untrained model has a loss of {number(found.loss)}; log {vocab} is {number(found.log_vocab)}. "
        f"Its logits have a std of {number(found.spread)}, "
        f"which costs {number(found.even - found.log_vocab)} by itself. {words}"
    )
    return finding("GG650", seen, likely=causes if large else ["targets"])


def _size_of_logits(model: nn.Module, x: Tensor, vocab: int) -> tuple[str, list[str]]:
    """The output layer's std and width and what enters it in words, and the cause keys; nothing if there is none."""
    weight, entering = output_layer(model, x, vocab)
    if weight is None:
        return "", []
    std, width = float(weight.detach().float().std()), weight.size(1)
    tied = any(isinstance(module, nn.Embedding) and module.weight is weight for module in model.modules())
    words = f"The output layer's weights have a std of {std:.3g} at width {width}{', tied to the embedding' * tied}"
    words += f", what enters it has an RMS of {entering:.3g}." if entering is not None else "."
    likely = ["tied_std" if tied else "head_std"] if std * width**0.5 > _LARGE else []
    if entering is not None and entering > _GROWN:
        likely.append("no_final_norm")
    return words, [*likely, "scale"]


def _too_low(found: FirstLoss, subject: Subject) -> Finding:
    seen = (
        f"A model that should be untrained has a loss of {number(found.loss)}; guessing evenly costs "
        f"log V = {number(found.log_vocab)}."
    )
    likely = "not_shifted" if _batch_shift(subject) == 0 and not subject.shifts_inside else "not_fresh"
    return finding("GG651", seen, likely=[likely])


def _wrong_form(form: Form, subject: Subject) -> Finding | None:
    """What is to be said of a recognised form beside its shift."""
    seen = f"The loss is {form.words}, for every set of targets that was tried."
    if form.left_out is not None:
        return _left_out(form.left_out, subject)
    if (code := _CODES.get(form.key)) is None:
        return None
    if code == "GG656":
        return finding(code, seen, shown=[form.key], severity=Severity.ERROR)
    severity = {"severity": Severity.WARNING} if form.key == "perplexity" else {}
    return finding(code, seen, likely=[_CAUSES.get(form.key, form.key)], **severity)


def _pulled(model: nn.Module, subject: Subject, form: Form | None) -> Finding | None:
    """What the loss asks of the logits, where its value is no known function: some positions, others, or less."""
    if form is not None and form.key not in ("term", "weighted"):
        return None
    x = probe_ids(subject)
    vocab = min(subject.vocab_size or VERY_MANY, call(model, x[:1, :2]).logits.size(-1))
    y = torch.randint(vocab, tuple(x.shape), generator=torch.Generator().manual_seed(subject.seed)).to(x.device)
    with preserved(model):
        found = pull(model, x, y, subject.loss_fn)
    return judge_pull(found) if found is not None else None


def _left_out(target: int, subject: Subject) -> Finding | None:
    pad = special_id(subject, "pad")
    if pad is not None and pad.id == target:
        return None
    tokens = subject.tokenizer.tokens if subject.tokenizer is not None else ()
    token = f", the token {tokens[target]!r}" if target < len(tokens) else ""
    seen = f"Targets of {target}{token} are left out of the loss."
    # A character, or another id than the known padding, is an ordinary token: it will never be learned.
    sure = pad is not None or (target < len(tokens) and len(tokens[target]) == 1)
    return finding("GG657", seen, likely=["ignore_index"], severity=Severity.ERROR if sure else Severity.WARNING)


def _wrong_pairs(form: Form, subject: Subject) -> Finding | None:
    """GG653 where batch and loss together do not shift by one; an encoder's targets stand where they are."""
    if not subject.causal:
        return None
    if (own := _batch_shift(subject)) is None:
        if form.key != "shift":
            return None
        return finding("GG653", f"The loss pairs {form.words}.", likely=["backward" if form.shift < 0 else "roll"])
    total = own + form.shift
    if total == 1:
        return None
    likely = "backward" if form.shift < 0 else {0: "no_shift", 2: "double_shift"}.get(total, "roll")
    seen = (
        f"In the batch y is x shifted by {own}, and the loss shifts by {form.shift} more: position t is compared with "
        f"token t{total:+d}."
    )
    return finding("GG653", seen, likely=[likely])


def _batch_shift(subject: Subject) -> int | None:
    """By how many positions y is ahead of x, of 0, 1, 2 and -1; None where the batch does not tell."""
    if subject.batch is None:
        return None
    x, y = subject.batch
    if x.shape != y.shape or x.dim() != 2 or x.size(1) < 4:
        return None
    fits = [shift for shift in (1, 0, 2, -1) if _matches(x, y, shift, subject.ignore_index)]
    return fits[0] if len(fits) == 1 else None


def _matches(x: Tensor, y: Tensor, shift: int, ignore_index: int) -> bool:
    length = x.size(1)
    ahead, targets = x[:, max(0, shift) : length + min(0, shift)], y[:, max(0, -shift) : length - max(0, shift)]
    counted = targets != ignore_index
    return bool(counted.any()) and bool((ahead == targets)[counted].all())
