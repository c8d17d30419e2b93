"""Stage 13: a checkpoint's file against the model, and what saving and loading this model would lose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.catalogue import finding
from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checkpoint.fingerprint.record import SHORT, config_finding
from gpt_guard.checkpoint.read import Stored, take_apart
from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.checkpoint.weights import fit_weights, leaves, listing, non_finite
from gpt_guard.checks.checkpoint.belonging import config_of, differing, file_misfit, fingerprint_findings, same_answers
from gpt_guard.checks.checkpoint.optimizer_reload import optimizer_reload, with_state
from gpt_guard.checks.checkpoint.reload import reload, unsaved_in_use
from gpt_guard.checks.gradients.backward import Task
from gpt_guard.checks.runner.base import Need, Stage, Subject, vocabulary
from gpt_guard.checks.runner.perturb import probe_ids
from gpt_guard.errors import CheckpointError
from gpt_guard.records import CheckResult, Finding, Severity
from gpt_guard.records.render import printable

_SAME = "the same logits, bit for bit"


class CheckpointStage(Stage):
    """What the file holds, whether it fits, whether it belongs; then save, load and compare, model and optimizer."""

    number = 13
    name = "checkpoint"
    title = "Checkpoint"
    needs = (
        Need(lambda subject: "checkpoint" not in subject.unusable or None, "its file cannot be used"),
        Need(
            lambda subject: (subject.model is not None or subject.payload is not None) or None,
            "neither a model nor a checkpoint was given",
        ),
    )

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        model, optimizer = subject.model, subject.optimizer
        if subject.payload is not None:
            stored = self._taken_apart(subject)
            if isinstance(stored, Finding):
                yield self.line("file", "no weights in it", "a dict with the model's weights", stored)
            else:
                yield self._file(stored)
                yield self._finite(stored, model)
                yield from self._fingerprint(stored, subject)
                if model is not None:
                    fitting = self._fits(model, stored, subject)
                    yield fitting
                    if fitting.status == "passed":  # otherwise the weights have shown it already
                        yield from self._config(model, stored, subject)
                    if optimizer is not None and stored.optimizers:
                        yield self._optimizer_in_file(model, optimizer, stored)
        if model is not None:
            yield self._reload(model, subject)
            if optimizer is not None:
                yield self._optimizer(model, optimizer, Task.of(subject))

    def _taken_apart(self, subject: Subject) -> Stored | Finding:
        path = subject.paths.get("checkpoint", Path("the checkpoint"))
        try:
            return take_apart(path, subject.payload, Reporter(lambda found: None))
        except CheckpointError as error:
            return error.finding

    def _file(self, stored: Stored) -> CheckResult:
        parts = [f"{len(stored.weights)} weights"]
        parts += [name for name in ("optimizers", "schedulers", "scalers") if getattr(stored, name)]
        parts += ["config"] if stored.config is not None else []
        step = f"step {stored.step}" if stored.step is not None else "no step"
        return self.line("file", f"{step}; {', '.join(parts)}", checkpoint_step=stored.step)

    def _finite(self, stored: Stored, model: nn.Module | None) -> CheckResult:
        title, expected = "finite", "no NaN or infinity"
        # -inf alone in a buffer is an attention mask; without the model it is not known which entries are buffers.
        masks = (name for name, _ in unwrap(model).named_buffers()) if model is not None else iter(stored.weights)
        spoiled = non_finite(stored.weights, frozenset(masks))
        if spoiled:
            seen = f"{len(spoiled)} of {len(stored.weights)} tensors are not finite: {listing(spoiled)}"
            counts = {name: count.model_dump() for name, count in list(spoiled.items())[:200]}
            found = finding(
                "GG706", seen, likely=["saved_bad"], parameter=next(iter(spoiled)), evidence={"non_finite": counts}
            )
            return self.line(title, f"{len(spoiled)} tensors are not", expected, found)
        moments = non_finite(dict(leaves([state.get("state") for state in stored.optimizers])))
        if moments:
            seen = f"{len(moments)} tensors of the optimizer state are not finite: {listing(moments)}"
            found = finding("GG706", seen, likely=["optimizer"], cause_id="optimizer")
            return self.line(title, f"{len(moments)} optimizer tensors are not", expected, found)
        return self.line(title, "all weights", expected)

    def _fingerprint(self, stored: Stored, subject: Subject) -> Iterator[CheckResult]:
        title, expected = "fingerprint", "as recorded when it was saved"
        agreed, found = fingerprint_findings(stored, subject)
        wrong = [one for one in found if one.severity is Severity.ERROR]
        if wrong:
            yield self.line(title, f"{len(wrong)} parts differ", expected, wrong)
        elif agreed:
            digest = (stored.stamp.parts.get("tokenizer") or "")[:SHORT]
            shown = f"{', '.join(agreed)} agree{'' if len(agreed) > 1 else 's'}" + (f" ({digest})" if digest else "")
            yield self.line(title, shown, expected, found)
        else:
            yield self.line(title, "none to compare", findings=found)

    def _fits(self, model: nn.Module, stored: Stored, subject: Subject) -> CheckResult:
        title, expected = "fits the model", "every name and shape"
        reporter = Reporter(lambda found: None)
        try:
            found = fit_weights(unwrap(model), stored, config_of(subject), True, reporter)
        except CheckpointError as error:
            lists = error.finding.evidence
            counts = {"missing": "missing", "unexpected": "unexpected", "sizes": "of another size"}
            measured = [f"{len(lists[key])} {word}" for key, word in counts.items() if lists.get(key)]  # type: ignore[arg-type]  # lists and dicts by fit_weights
            return self.line(title, ", ".join(measured) or "it does not", expected, error.finding)
        return self.line(title, f"{found.total} of {found.total} names", expected, reporter.findings)

    def _config(self, model: nn.Module, stored: Stored, subject: Subject) -> Iterator[CheckResult]:
        title, expected = "config", "the saved one, or one that changes no answer"
        changes = differing(stored, subject)
        if changes is None:
            return
        if not changes:
            yield self.line(title, "as saved", expected)
            return
        changed = ", ".join(
            f"{printable(key)} was {printable(a)}, is {printable(b)}" for key, (a, b) in changes.items()
        )
        found = config_finding(f"config of the checkpoint {stored.path}", changes)
        same = same_answers(stored, model, subject.config, _ids(subject), subject.seed)
        if same:
            yield self.line(title, f"{changed}: the same logits", expected)
        elif same is None:
            note = found.model_copy(update={"severity": Severity.WARNING})
            yield self.line(title, f"{changed}: no model could be built to compare", expected, note)
        else:
            yield self.line(title, f"{changed}: other logits", expected, found)

    def _reload(self, model: nn.Module, subject: Subject) -> CheckResult:
        title, x = "save and load", _ids(subject)
        if x is None:
            return self.skipped(title, "neither a batch nor a vocabulary size is known")
        done = reload(model, subject.make_model, x, subject.seed) if subject.make_model is not None else None
        if done is None or not done.rebuilt:
            found = unsaved_in_use(model, x, subject.seed)
            if found is not None:
                return self.line(title, "logits depend on what is not saved", _SAME, found)
            return self.skipped(title, "nothing tells how to build the model anew; all it computes with is saved")
        if done.finding is not None:
            return self.line(title, _measured(done.apart, done.finding), _SAME, done.finding)
        if not done.repeatable:
            return self.skipped(title, "the model's logits differ between two eval passes by themselves")
        rounding = f" within rounding ({done.apart:.1g})" if done.apart else ""
        return self.line(title, f"{done.names} entries, equal logits{rounding}", _SAME)

    def _optimizer_in_file(self, model: nn.Module, optimizer: Optimizer, stored: Stored) -> CheckResult:
        title, expected = "optimizer state in the file", "that of this optimizer"
        found = file_misfit(stored, model, optimizer)
        return self.line(title, "fits" if found is None else "does not fit", expected, found)

    def _optimizer(self, model: nn.Module, optimizer: Optimizer, task: Task | None) -> CheckResult:
        title, expected = "optimizer save and load", "the same values, each on its parameter's device"
        why = with_state(model, optimizer, task)
        if why is not None:
            return self.skipped(title, why)
        count, found = optimizer_reload(optimizer)
        return self.line(title, "not the same" if found else f"{count} state tensors equal", expected, found)


def _ids(subject: Subject) -> Tensor | None:
    return probe_ids(subject) if vocabulary(subject) is not None else None


def _measured(apart: float, found: Finding) -> str:
    if found.code != "GG720" or not apart:
        return "it cannot be loaded again"
    return f"logits differ by up to {apart:.3g}"
