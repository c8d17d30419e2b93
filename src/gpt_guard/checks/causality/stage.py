"""Stage 8: a position sees only what came before it, and a row only itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpt_guard.callbacks.probes.findings import likely_rows
from gpt_guard.catalogue import finding
from gpt_guard.checks.causality.leaks import SEEDS, FutureLeak, TokenChanges, input_gradients, prefixes, train_briefly
from gpt_guard.checks.runner.base import MODEL, VOCABULARY, Need, Stage, Subject, vocabulary
from gpt_guard.checks.runner.forward import loss_of
from gpt_guard.checks.runner.perturb import precise, probe_ids, widened
from gpt_guard.checks.tokenizer.vocabulary import special_id
from gpt_guard.hooks.isolation.compare import difference, rounding
from gpt_guard.hooks.isolation.preserve import preserved, quiet
from gpt_guard.hooks.modes import set_mode
from gpt_guard.records import CheckResult, Finding
from gpt_guard.records.render import number

_SOFT = 1e-3
"""A gradient below this share of the largest one gets past a mask rather than through none."""
_SUFFIX, _ROWS = "suffix change", "rows are independent"


class CausalityStage(Stage):
    """Suffix change, gradient to the embedded inputs, both again after a few training steps, and independence of rows.

    All in eval mode, each forward with the same random numbers; weights of half precision are widened to float32 where
    the model can run like that. Every row is changed and every row is looked at.
    """

    number = 8
    name = "causality"
    title = "Causality and independence of rows"
    after = ("shapes",)
    needs = (
        MODEL,
        VOCABULARY,
        Need(lambda subject: (vocabulary(subject) or 0) > 1 or None, "a vocabulary of one id cannot be changed"),
    )

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        """One line per question; what cannot be asked says why."""
        if subject.causal:
            yield from (lines := list(self.causal(subject)))
            asked = bool(lines) and all(line.status == "passed" for line in lines)
        else:
            asked = False
            yield self.skipped(_SUFFIX, "causal=False: the model may see both sides")
            changes = _changes(subject)
            with precise(changes.model, changes.x):
                yield self._padding(changes, subject)
        yield from (lines := list(self.independence(subject)))
        changes = _changes(subject)
        if asked and all(line.status == "passed" for line in lines):
            with precise(changes.model, changes.x):
                yield from self._in_training(changes)

    def causal(self, subject: Subject, *, trained: bool = True) -> Iterator[CheckResult]:
        """The lines about the future; with `trained` also after a few training steps."""
        changes = _changes(subject)
        if changes.x.size(1) < 2:
            yield self.skipped(_SUFFIX, "rows of one token have no suffix")
            return
        with precise(changes.model, changes.x):
            if (why := _incomparable(changes)) is not None:
                yield self.skipped(_SUFFIX, why)
            else:
                yield from self._causal(changes, subject, trained)

    def independence(self, subject: Subject) -> Iterator[CheckResult]:
        """The line about rows."""
        changes = _changes(subject)
        with precise(changes.model, changes.x):
            why = _incomparable(changes)
            yield self.skipped(_ROWS, why) if why is not None else self._rows(changes)

    def _causal(self, changes: TokenChanges, subject: Subject, trained: bool) -> Iterator[CheckResult]:
        first = self._suffix(_SUFFIX, changes)
        yield first
        second = self._gradient("gradient to the embedded inputs", changes, first.findings)
        yield second
        if "failed" in (first.status, second.status):
            return
        yield self._cut(changes)
        if trained:
            yield self._trained(changes, subject)
        if batch_norms := [module for module in changes.model.modules() if isinstance(module, _BatchNorm)]:
            # All else stays in eval mode: dropout's random numbers would be those of other tokens.
            with preserved(changes.model):
                title = "suffix change, BatchNorm in training mode"
                yield self._suffix(title, changes, ["batch_norm"], training=batch_norms)

    def _suffix(
        self, title: str, changes: TokenChanges, likely: Sequence[str] = (), *, training: Iterable[nn.Module] = ()
    ) -> CheckResult:
        with quiet(changes.model):
            for module in training:
                module.training = True
            found = changes.suffix()
            leak = changes.look_into(found) if found.leaks else None
        rows, length = changes.x.shape
        asked = f"{SEEDS} suffixes behind {', '.join(map(str, prefixes(length)))} tokens, {rows} rows"
        measured = f"logits before it change by {number(found.size)} ({asked})"
        expected = f"at most {number(found.allowed)}, rounding"
        if leak is None:
            return self.line(title, measured, expected)
        seen = (
            f"Position {found.position} of row {found.row} sees {leak.distances}: its logits change by "
            f"{number(found.size)} when only tokens from {found.prefix} on change (the largest logit is "
            f"{number(found.scale)})."
        )
        return self.line(title, measured, expected, leak.finding(seen, likely))

    def _gradient(
        self, title: str, changes: TokenChanges, known: Sequence[Finding] = (), likely: Sequence[str] = ()
    ) -> CheckResult:
        found = input_gradients(changes.model, changes.x)
        if found.strength is None:
            return self.skipped(title, found.why_not)
        expected = "0 from every later token"
        if (leak := found.leak) is None:
            return self.line(title, f"0, seen from positions {', '.join(map(str, found.positions))}", expected)
        reader, source, share = leak
        measured = f"{number(share)} of the largest, from token {source} to position {reader}"
        if known:
            return self.line(title, measured, expected, known)  # one leak, seen in two ways
        seen = (
            f"The logits at position {reader} have a gradient to the embedding of token {source}: "
            f"{number(share)} of the largest one."
        )
        return self.line(title, measured, expected, _look_closer(changes, *leak).finding(seen, likely))

    def _cut(self, changes: TokenChanges) -> CheckResult:
        title = "prefix alone"
        with quiet(changes.model):
            other = replace(changes, seed=changes.seed + 1)
            if float(difference(changes.logits(changes.x), other.logits(changes.x)).max()) > 0:
                return self.skipped(title, "the logits are random in eval mode: see the stage for validation")
            try:
                found = changes.cut()
            except Exception as error:  # a model of one length only: the stage for shapes says so
                return self.skipped(title, f"shorter rows are not taken: {type(error).__name__}")
            turned = found.leaks and changes.turned()
        lengths = ", ".join(map(str, prefixes(changes.x.size(1))))
        measured = f"its logits change by {number(found.size)} when the row is cut behind it (lengths {lengths})"
        expected = f"at most {number(found.allowed)}, rounding"
        if not found.leaks:
            return self.line(title, measured, expected)
        seen = (
            f"Position {found.position} of row {found.row}: its logits change by {number(found.size)} when the row of "
            f"{changes.x.size(1)} is cut behind {found.prefix} tokens (the largest logit is {number(found.scale)})."
        )
        likely = ["reversed_positions"] if turned else ["length"]
        return self.line(title, measured, expected, finding("GG648", seen, likely=likely))

    def _in_training(self, changes: TokenChanges) -> Iterator[CheckResult]:
        """The future and other rows once more in training mode, dropout and BatchNorm aside: they are as they are."""
        title, model = "in training mode", changes.model
        with preserved(model), torch.no_grad():
            set_mode(model, training=True)
            for module in model.modules():
                if isinstance(module, (_BatchNorm, nn.modules.dropout._DropoutNd)):
                    module.training = False
            one, other = changes.logits(changes.x), changes.logits(changes.x)
            if one.shape != other.shape or one.dim() != 3 or float(difference(one, other).max()) > rounding(one):
                yield self.skipped(title, "two calls with the same seed do not agree")
                return
            future, rows = changes.suffix(), changes.rows()
        expected = f"at most {number(future.allowed)}, rounding"
        measured = f"earlier logits change by {number(future.size)}, those of other rows by {number(rows.size)}"
        found = []
        if future.leaks:
            seen = (
                f"In training mode position {future.position} of row {future.row} changes by {number(future.size)} "
                f"when only tokens from {future.prefix} on change; in eval mode it does not."
            )
            found.append(finding("GG660", seen, likely=["training_mode"]))
        if rows.leaks:
            seen = (
                f"In training mode the logits of row {rows.row} change by {number(rows.size)} when all other rows "
                f"change; in eval mode they do not."
            )
            found.append(finding("GG661", seen, likely=["training_mode"]))
        yield self.line(title, measured, expected, found)

    def _trained(self, changes: TokenChanges, subject: Subject) -> CheckResult:
        title, model, x = "after 8 training steps", changes.model, changes.x
        targets = x if subject.shifts_inside else x.roll(-1, 1)

        def loss() -> Tensor:
            return loss_of(model, x, targets, subject.loss_fn, subject.ignore_index)

        with preserved(model, subject.optimizer):
            try:
                why_not = train_briefly(model, loss)
            except Exception as error:  # whether it can be trained is asked by the stages for gradients and overfitting
                why_not = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if why_not:
                return self.skipped(title, f"the model could not be trained: {why_not}")
            if (why := _incomparable(changes)) is not None:
                return self.skipped(title, why)
            result = self._suffix(title, changes, ["zero_init"])
            if result.status == "failed":
                return result
            gradient = self._gradient(title, changes, likely=["zero_init"])
        return gradient if gradient.status == "failed" else result

    def _rows(self, changes: TokenChanges) -> CheckResult:
        model, x = changes.model, changes.x
        with quiet(model):
            found = changes.rows()
            # Dropout that is active by mistake stays in its place when rows move.
            reseeded = replace(changes, seed=changes.seed + 1)
            still = float(difference(changes.logits(x), reseeded.logits(x)).max()) == 0
            if still and not found.leaks and (moved := changes.moved_rows()).leaks:
                found = moved
            blame = changes.leaking_module(found) if found.leaks else None
            who = changes.readers() if found.leaks and not found.moved else {}
        what = "the rows change places" if found.moved else "all other rows change"
        measured = f"a row's logits change by {number(found.size)} when {what}"
        expected = f"at most {number(found.allowed)}, rounding"
        if not found.leaks:
            places = ", or change places" if still else ""
            return self.line(_ROWS, f"{measured}{places} ({x.size(0)} rows)", expected)
        reacts = "; ".join(f"row {row} reacts to {', '.join(map(str, others))}" for row, others in who.items())
        seen = f"The logits of row {found.row} change by {number(found.size)} when {what}"
        seen += f" (the largest logit is {number(found.scale)}){f': {reacts}' if reacts else ''}."
        likely = likely_rows(model, blame, "moved" if found.moved else "others")
        fields: dict[str, Any] = blame.named if blame is not None else {}
        return self.line(_ROWS, measured, expected, finding("GG661", seen, likely=likely, **fields))

    def _padding(self, changes: TokenChanges, subject: Subject) -> CheckResult:
        title = "padding is masked"
        pad = special_id(subject, "pad")
        if pad is None:
            return self.skipped(title, "no padding id is known: give pad_id")
        with quiet(changes.model):
            found = changes.padding(pad.id)
        how = f"{found.padding} tokens of padding (id {pad.id}, {pad.source}) behind {found.real} real ones"
        measured = f"logits of real tokens change by {number(found.change)} with {how}"
        expected = f"at most {number(found.allowed)}, rounding"
        if found.change <= found.allowed:
            return self.line(title, measured, expected)
        seen = f"With {how} the logits of the real tokens change by {number(found.change)}."
        likely = ["mask_sense"] if found.mask_given else ["not_masked"]
        return self.line(title, measured, expected, finding("GG662", seen, likely=likely))


def _changes(subject: Subject) -> TokenChanges:
    return TokenChanges(MODEL(subject), probe_ids(subject), VOCABULARY(subject), subject.seed, subject.pad_id)


def _incomparable(changes: TokenChanges) -> str | None:
    """Why two calls of a model cannot be compared; None where they can."""
    with quiet(changes.model):
        one, other = changes.logits(changes.x), changes.logits(changes.x)
    if one.dim() != 3 or one.shape[:2] != changes.x.shape:
        return f"logits are {list(one.shape)}, not [B, T, V]"
    if not bool(one.isfinite().all()):
        return "the logits are not finite"
    if float(difference(one, other).max()) > rounding(one):
        return "the same input with the same seed gives other logits at every call: see the stage for validation"
    return None


def _look_closer(changes: TokenChanges, reader: int, source: int, share: float) -> FutureLeak:
    """Look into a leak that only the gradient shows in float64, where it is no longer below rounding.

    Not asked in float64 from the start: what a model computes in float32 inside would be taken for a leak.
    """
    with widened(changes.model, changes.x, torch.float64) as runs:
        if runs:
            with quiet(changes.model):
                found = changes.suffix()
                if found.leaks:
                    return changes.look_into(found)
    pairs = frozenset({(reader, source)})
    return FutureLeak(None, pairs, ["soft_mask"] if share < _SOFT else [], changes.x.size(1))
