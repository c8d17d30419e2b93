"""Stage 8: a position sees only what came before it, and a row only itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpt_guard.callbacks.probes.findings import likely_rows
from gpt_guard.catalogue import finding
from gpt_guard.checks.causality import leaks, rows
from gpt_guard.checks.causality.leak_finding import look_closer, look_into
from gpt_guard.checks.causality.padding import change_padding
from gpt_guard.checks.runner.base import Stage, Subject
from gpt_guard.checks.runner.forward import loss_of
from gpt_guard.checks.runner.perturb import precise, probe_ids, repeatable, vocabulary
from gpt_guard.checks.tokenizer.vocabulary import special_id
from gpt_guard.hooks.isolation.compare import difference, rounding
from gpt_guard.hooks.isolation.preserve import preserved, quiet
from gpt_guard.records import CheckResult, Finding
from gpt_guard.records.render import number


class CausalityStage(Stage):
    """Suffix change, gradient to the embedded inputs, both again after a few training steps, and independence of rows.

    All in eval mode, each forward with the same random numbers; weights of half precision are widened to float32 where
    the model can run like that. Every row is changed and every row is looked at.
    """

    number = 8
    name = "causality"
    title = "Causality and independence of rows"
    after = ("shapes",)

    def missing(self, subject: Subject) -> str | None:
        """A model, and ids to ask it with."""
        if subject.model is None:
            return "no model"
        vocab = vocabulary(subject)
        if vocab is None:
            return "neither a batch nor vocab_size tells which ids the model takes"
        return "a vocabulary of one id cannot be changed" if vocab < 2 else None

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        """One line per question; what cannot be asked says why."""
        model, vocab = subject.model, vocabulary(subject)
        if model is None or vocab is None:
            return
        if subject.causal:
            yield from self.causal(subject)
        else:
            yield self.skipped("suffix change", "causal=False: the model may see both sides")
            with precise(model, probe_ids(subject)):
                yield self._padding(model, probe_ids(subject), vocab, subject)
        yield from self.independence(subject)

    def causal(self, subject: Subject, *, trained: bool = True) -> Iterator[CheckResult]:
        """The lines about the future; with `trained` also after a few training steps."""
        model, vocab = subject.model, vocabulary(subject)
        if model is None or vocab is None:
            return
        x = probe_ids(subject)
        if x.size(1) < 2:
            yield self.skipped("suffix change", "rows of one token have no suffix")
            return
        with precise(model, x):
            if (why := self._incomparable(model, x, subject.seed)) is not None:
                yield self.skipped("suffix change", why)
            else:
                yield from self._causal(model, x, vocab, subject, trained)

    def independence(self, subject: Subject) -> Iterator[CheckResult]:
        """The line about rows."""
        model, vocab = subject.model, vocabulary(subject)
        if model is None or vocab is None:
            return
        x = probe_ids(subject)
        with precise(model, x):
            if (why := self._incomparable(model, x, subject.seed)) is not None:
                yield self.skipped("rows are independent", why)
            else:
                yield self._rows(model, x, vocab, subject)

    def _incomparable(self, model: nn.Module, x: Tensor, seed: int) -> str | None:
        forward = repeatable(model, seed)
        with quiet(model):
            one, other = forward(x), forward(x)
        if one.dim() != 3 or one.shape[:2] != x.shape:
            return f"logits are {list(one.shape)}, not [B, T, V]"
        if not bool(one.isfinite().all()):
            return "the logits are not finite"
        if float(difference(one, other).max()) > rounding(one):
            return "the same input with the same seed gives other logits at every call: see the stage for validation"
        return None

    def _causal(
        self, model: nn.Module, x: Tensor, vocab: int, subject: Subject, trained: bool
    ) -> Iterator[CheckResult]:
        first = self._suffix("suffix change", model, x, vocab, subject)
        yield first
        second = self._gradient("gradient to the embedded inputs", model, x, vocab, subject, first.findings)
        yield second
        if "failed" in (first.status, second.status):
            return
        if trained:
            yield self._trained(model, x, vocab, subject)
        if batch_norms := [module for module in model.modules() if isinstance(module, _BatchNorm)]:
            # All else stays in eval mode: dropout's random numbers would be those of other tokens.
            with preserved(model):
                title = "suffix change, BatchNorm in training mode"
                yield self._suffix(title, model, x, vocab, subject, ["batch_norm"], training=batch_norms)

    def _suffix(
        self,
        title: str,
        model: nn.Module,
        x: Tensor,
        vocab: int,
        subject: Subject,
        likely: Sequence[str] = (),
        *,
        training: Iterable[nn.Module] = (),
    ) -> CheckResult:
        forward = repeatable(model, subject.seed)
        with quiet(model):
            for module in training:
                module.training = True
            found = leaks.change_suffix(forward, x, vocab, subject.seed, subject.pad_id)
            leaked = look_into(model, forward, x, vocab, found, subject.seed) if found.leaks else None
        lengths = ", ".join(map(str, leaks.prefixes(x.size(1))))
        asked = f"{leaks.SEEDS} suffixes behind {lengths} tokens, {x.size(0)} rows"
        measured = f"logits before it change by {number(found.change)} ({asked})"
        expected = f"at most {number(found.allowed)}, rounding"
        if leaked is None:
            return self.passed(title, measured, expected)
        seen = (
            f"Position {found.position} of row {found.row} sees {leaked.distances}: its logits change by "
            f"{number(found.change)} when only tokens from {found.prefix} on change (the largest logit is "
            f"{number(found.scale)})."
        )
        return self.failed(title, measured, expected, leaked.finding(seen, likely))

    def _gradient(
        self,
        title: str,
        model: nn.Module,
        x: Tensor,
        vocab: int,
        subject: Subject,
        known: Sequence[Finding] = (),
        likely: Sequence[str] = (),
    ) -> CheckResult:
        with quiet(model):
            found = leaks.reach(model, x)
        if found.strength is None:
            return self.skipped(title, found.why_not)
        expected = "0 from every later token"
        if (leak := found.leak) is None:
            return self.passed(title, f"0, seen from positions {', '.join(map(str, found.positions))}", expected)
        reader, source, share = leak
        measured = f"{number(share)} of the largest, from token {source} to position {reader}"
        if known:
            return self.failed(title, measured, expected, known)  # one leak, seen in two ways
        seen = (
            f"The logits at position {reader} have a gradient to the embedding of token {source}: "
            f"{number(share)} of the largest one."
        )
        leaked = look_closer(model, x, vocab, subject.seed, leak, subject.pad_id)
        return self.failed(title, measured, expected, leaked.finding(seen, likely))

    def _trained(self, model: nn.Module, x: Tensor, vocab: int, subject: Subject) -> CheckResult:
        title = "after 8 training steps"
        targets = x if subject.shifts_inside else x.roll(-1, 1)

        def loss() -> Tensor:
            return loss_of(model, x, targets, subject.loss_fn, subject.ignore_index)

        with preserved(model, subject.optimizer):
            try:
                why_not = leaks.train_briefly(model, loss)
            except Exception as error:  # whether it can be trained is asked by the stages for gradients and overfitting
                why_not = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if why_not:
                return self.skipped(title, f"the model could not be trained: {why_not}")
            if (why := self._incomparable(model, x, subject.seed)) is not None:
                return self.skipped(title, why)
            result = self._suffix(title, model, x, vocab, subject, ["zero_init"])
            if result.status == "failed":
                return result
            gradient = self._gradient(title, model, x, vocab, subject, likely=["zero_init"])
        return gradient if gradient.status == "failed" else result

    def _rows(self, model: nn.Module, x: Tensor, vocab: int, subject: Subject) -> CheckResult:
        title = "rows are independent"
        forward = repeatable(model, subject.seed)
        with quiet(model):
            found = rows.change_rows(forward, x, vocab, subject.seed, subject.pad_id)
            # Dropout that is active by mistake stays in its place when rows move.
            still = float(difference(forward(x), repeatable(model, subject.seed + 1)(x)).max()) == 0
            if still and not found.leaks and (moved := rows.move_rows(forward, x)).leaks:
                found = moved
            blame = rows.leaking_module(model, forward, found) if found.leaks else None
            who = rows.readers(forward, x, vocab, subject.seed) if found.leaks and found.how == "others" else {}
        what = "all other rows change" if found.how == "others" else "the rows change places"
        measured = f"a row's logits change by {number(found.change)} when {what}"
        expected = f"at most {number(found.allowed)}, rounding"
        if not found.leaks:
            places = ", or change places" if still else ""
            return self.passed(title, f"{measured}{places} ({x.size(0)} rows)", expected)
        reacts = "; ".join(f"row {row} reacts to {', '.join(map(str, others))}" for row, others in who.items())
        seen = f"The logits of row {found.row} change by {number(found.change)} when {what}"
        likely = likely_rows(model, blame, found.how)
        fields: dict[str, Any] = blame.named if blame is not None else {}
        seen += f" (the largest logit is {number(found.scale)}){f': {reacts}' if reacts else ''}."
        told = finding("GG661", seen, likely=likely, **fields)
        return self.failed(title, measured, expected, told)

    def _padding(self, model: nn.Module, x: Tensor, vocab: int, subject: Subject) -> CheckResult:
        title = "padding is masked"
        pad = special_id(subject, "pad")
        if pad is None:
            return self.skipped(title, "no padding id is known: give pad_id")
        with quiet(model):
            found = change_padding(model, x, vocab, pad.id, subject.seed)
        how = f"{found.padding} tokens of padding (id {pad.id}, {pad.source}) behind {found.real} real ones"
        measured = f"logits of real tokens change by {number(found.change)} with {how}"
        expected = f"at most {number(found.allowed)}, rounding"
        if found.change <= found.allowed:
            return self.passed(title, measured, expected)
        seen = f"With {how} the logits of the real tokens change by {number(found.change)}."
        likely = ["mask_sense"] if found.mask_given else ["not_masked"]
        return self.failed(title, measured, expected, finding("GG662", seen, likely=likely))
