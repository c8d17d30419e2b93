"""Stage 9: does every trainable parameter get a gradient that is there, finite and not zero?"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from gpt_guard.checks.gradients.backward import Task
from gpt_guard.checks.gradients.gradient_causes import listed
from gpt_guard.checks.gradients.gradient_diagnosis import Diagnosis, diagnose
from gpt_guard.checks.gradients.gradient_search import Search
from gpt_guard.checks.runner.base import Stage, Subject
from gpt_guard.records import CheckResult, Severity
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
        model, inputs = subject.model, subject.inputs
        if model is None or inputs is None:
            return
        task = Task(*inputs, subject.loss_fn, subject.ignore_index)
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
        there = total - len(found.missing)
        measured = f"{there} of {total}" + (f", {frozen} more are frozen" if frozen else "")
        if late:
            measured += f"; {len(late)} only on other inputs ({listed(late, _NAMES)})"
        faults = [*diagnosis.graph, *(each for each in diagnosis.missing if each.severity is not Severity.INFO)]
        notes = [each for each in diagnosis.missing if each.severity is Severity.INFO]
        title, expected = "parameters with a gradient", f"all {total} that are trainable"
        if faults:
            named = f": none for {listed(found.missing, _NAMES)}" if found.missing else ""
            return self.failed(title, measured + named, expected, [*faults, *notes], missing_gradients=found.missing)
        return self.passed(title, measured, expected, notes=notes, missing_gradients=found.missing)

    def _finiteness(self, diagnosis: Diagnosis, found: Search) -> CheckResult:
        first, title = found.first, "gradient norm"
        present = [norm for norm in first.norms.values() if norm is not None]
        measured = number(first.norm)
        if diagnosis.nonfinite:
            bad = (
                f"{measured} at a loss of {number(first.loss)}, {len(first.nonfinite)} of {len(first.norms)} not finite"
            )
            return self.failed(title, bad, "finite", diagnosis.nonfinite, grad_norm=first.norm)
        if not any(present):
            return self.passed(title, measured, "finite", grad_norm=first.norm)
        most = max(first.norms, key=lambda name: first.norms[name] or 0.0)
        return self.passed(
            title, f"{measured}, largest {number(max(present))} in {most}", "finite", grad_norm=first.norm
        )

    def _size(self, diagnosis: Diagnosis, found: Search) -> CheckResult:
        first = found.first
        faults = [each for each in diagnosis.zero if each.severity is not Severity.INFO]
        notes = [each for each in diagnosis.zero if each.severity is Severity.INFO]
        with_gradient = len(first.norms) - len(found.missing)
        zero = [name for each in faults for name in first.norms if name in found.zero] if faults else []
        late = [name for name in found.late if first.norms[name] == 0.0]
        measured = f"{len(dict.fromkeys(zero))} of {with_gradient}"
        if late:
            measured += (
                f"; {len(late)} were zero at first, as zero-initialised factors make them ({listed(late, _NAMES)})"
            )
        if notes:
            measured += f"; {len(found.zero) - len(set(zero))} biases that cancel out"
        title, expected = "parameters whose gradient stays exactly zero", "0"
        if faults:
            return self.failed(title, measured, expected, [*faults, *notes])
        return self.passed(title, measured, expected, notes=notes)

    def _registered(self, diagnosis: Diagnosis) -> CheckResult:
        title, expected = "trainable tensors outside of parameters()", "0"
        if not diagnosis.hidden:
            return self.passed(title, "0", expected)
        count = sum(int(str(each.evidence["tensors"])) for each in diagnosis.hidden)
        where = listed([str(each.parameter) for each in diagnosis.hidden])
        return self.failed(title, f"{count}, in {where}", expected, diagnosis.hidden)
