"""Stage 9: does every trainable parameter get a gradient that is there, finite and not zero?"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from gpt_guard.callbacks.gradients.missing import shown
from gpt_guard.checks.gradients.backward import Search, Task
from gpt_guard.checks.gradients.diagnosis import Diagnosis, diagnose, faults, notes
from gpt_guard.checks.runner.base import BATCH, MODEL, Stage, Subject
from gpt_guard.records import CheckResult
from gpt_guard.records.render import number

_NAMES = 3


class GradientsStage(Stage):
    """Present, finite and non-zero for each trainable parameter, by name and with the likely cause."""

    number = 9
    name = "gradients"
    title = "Gradients reach every trainable parameter"
    after = ("shapes",)
    needs = (MODEL, BATCH)

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        """One line each for: in the graph, present, finite, not zero, and nothing trainable outside of the model."""
        model, task = MODEL(subject), Task(*BATCH(subject), subject.loss_fn, subject.ignore_index)
        diagnosis = diagnose(model, task, subject.vocab_size, subject.optimizer)
        found = diagnosis.found
        if found is None:
            yield self.line("trainable parameters", "0", "at least 1", diagnosis.graph)
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
        if wrong and found.missing:
            measured += f": none for {shown(found.missing, _NAMES)}"
        return self.line(title, measured, expected, [*wrong, *worth_knowing], missing_gradients=found.missing)

    def _finiteness(self, diagnosis: Diagnosis, found: Search) -> CheckResult:
        first, title, measured = found.first, "gradient norm", number(found.first.norm)
        if diagnosis.nonfinite:
            measured += f" at a loss of {number(first.loss)}, {len(first.nonfinite)} of {len(first.norms)} not finite"
        elif first.reached:
            most = max(first.norms, key=lambda name: first.norms[name] or 0.0)
            measured += f", largest {number(first.norms[most])} in {most}"
        return self.line(title, measured, "finite", diagnosis.nonfinite, grad_norm=first.norm)

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
        return self.line(title, measured, expected, [*wrong, *worth_knowing])

    def _registered(self, diagnosis: Diagnosis) -> CheckResult:
        title, expected = "trainable tensors outside of parameters()", "0"
        if not diagnosis.hidden:
            return self.line(title, "0", expected)
        count = sum(int(str(each.evidence["tensors"])) for each in diagnosis.hidden)
        where = shown([str(each.parameter) for each in diagnosis.hidden])
        return self.line(title, f"{count}, in {where}", expected, diagnosis.hidden)
