"""Stage 9: does every trainable parameter get a gradient that is there, finite and not zero?"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from gpt_guard.callbacks.gradients.missing import shown
from gpt_guard.checks.gradients.backward import Search, Task
from gpt_guard.checks.gradients.diagnosis import Diagnosis, diagnose, faults, notes
from gpt_guard.checks.runner.base import Stage, Subject
from gpt_guard.records import CheckResult
from gpt_guard.records.render import number

_NAMES = 3


class GradientsStage(Stage):
    """Present, finite and non-zero for each trainable parameter, by name and with the likely cause."""

    number = 9
    name = "gradients"
    title = "Gradients reach every trainable parameter"
    after = ("shapes",)

    def missing(self, subject: Subject) -> str | None:
        """A model and a batch."""
        if subject.model is None:
            return "no model"
        return "no batch, and no data to cut one from" if subject.inputs is None else None

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        """One line each for: in the graph, present, finite, not zero, and nothing trainable outside of the model."""
        model, task = subject.model, Task.of(subject)
        if model is None or task is None:
            return
        diagnosis = diagnose(model, task, subject.vocab_size, subject.optimizer)
        found = diagnosis.found
        if found is None:
            yield self.failed("trainable parameters", "0", "at least 1", diagnosis.graph)
            return
        yield self._presence(model, diagnosis, found)
        if diagnosis.nonfinite:
            yield self._finiteness(diagnosis, found)
        elif not diagnosis.graph:
            yield self._finiteness(diagnosis, found)
            yield self._size(diagnosis, found)
        yield self._registered(diagnosis)

    def _presence(self, model: nn.Module, diagnosis: Diagnosis, found: Search) -> CheckResult:
        total = len(found.first.norms)
        frozen = sum(not parameter.requires_grad for parameter in model.parameters())
        late = [name for name in found.late if found.first.norms[name] is None]
        measured = f"{total - len(found.missing)} of {total}" + (f", {frozen} more are frozen" if frozen else "")
        if late:
            measured += f"; {len(late)} only on other inputs ({shown(late, _NAMES)})"
        title, expected = "parameters with a gradient", f"all {total} that are trainable"
        wrong, worth_knowing = [*diagnosis.graph, *faults(diagnosis.missing)], notes(diagnosis.missing)
        if wrong:
            measured += f": none for {shown(found.missing, _NAMES)}" if found.missing else ""
            return self.failed(title, measured, expected, [*wrong, *worth_knowing], missing_gradients=found.missing)
        return self.passed(title, measured, expected, notes=worth_knowing, missing_gradients=found.missing)

    def _finiteness(self, diagnosis: Diagnosis, found: Search) -> CheckResult:
        first, title, measured = found.first, "gradient norm", number(found.first.norm)
        if diagnosis.nonfinite:
            measured += f" at a loss of {number(first.loss)}, {len(first.nonfinite)} of {len(first.norms)} not finite"
            return self.failed(title, measured, "finite", diagnosis.nonfinite, grad_norm=first.norm)
        if first.reached:
            most = max(first.norms, key=lambda name: first.norms[name] or 0.0)
            measured += f", largest {number(first.norms[most])} in {most}"
        return self.passed(title, measured, "finite", grad_norm=first.norm)

    def _size(self, diagnosis: Diagnosis, found: Search) -> CheckResult:
        first = found.first
        wrong, worth_knowing = faults(diagnosis.zero), notes(diagnosis.zero)
        zero = [name for name in first.norms if name in found.zero] if wrong else []
        late = [name for name in found.late if first.norms[name] == 0.0]
        measured = f"{len(zero)} of {len(first.norms) - len(found.missing)}"
        if late:
            measured += (
                f"; {len(late)} were zero at first, as zero-initialised factors make them ({shown(late, _NAMES)})"
            )
        if worth_knowing:
            measured += f"; {len(found.zero) - len(zero)} biases that cancel out"
        title, expected = "parameters whose gradient stays exactly zero", "0"
        if wrong:
            return self.failed(title, measured, expected, [*wrong, *worth_knowing])
        return self.passed(title, measured, expected, notes=worth_knowing)

    def _registered(self, diagnosis: Diagnosis) -> CheckResult:
        title, expected = "trainable tensors outside of parameters()", "0"
        if not diagnosis.hidden:
            return self.passed(title, "0", expected)
        count = sum(int(str(each.evidence["tensors"])) for each in diagnosis.hidden)
        where = shown([str(each.parameter) for each in diagnosis.hidden])
        return self.failed(title, f"{count}, in {where}", expected, diagnosis.hidden)
