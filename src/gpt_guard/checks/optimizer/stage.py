"""Stage 10: does the optimizer hold exactly the trainable parameters, and does a step change each of them?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.gradients.missing import shown
from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checks.gradients.backward import Task, trainable
from gpt_guard.checks.gradients.diagnosis import diagnose, frozen_finding
from gpt_guard.checks.optimizer.coverage import cover, coverage_findings, rate_findings, rates
from gpt_guard.checks.optimizer.steps import StepFindings, default_optimizer, take_steps
from gpt_guard.checks.runner.base import MODEL, Stage, Subject
from gpt_guard.hooks.autograd_graph.nodes import leaves
from gpt_guard.hooks.isolation.preserve import preserved
from gpt_guard.hooks.optimizer import innermost
from gpt_guard.records import CheckResult
from gpt_guard.records.render import learning_rates, number

_NAMES = 3
_STEP = "parameters that a step changes"


class OptimizerStage(Stage):
    """Covers exactly the trainable parameters, lr above 0, a step changes each, frozen ones stay, tied ones once."""

    number = 10
    name = "optimizer"
    title = "The optimizer changes every trainable parameter"
    after = ("shapes",)
    needs = (MODEL,)

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        """What the optimizer holds and its lr, where one was given; then what its steps change."""
        model = unwrap(MODEL(subject))
        task = Task.of(subject)
        optimizer: Optimizer | None = innermost(subject.optimizer) if subject.optimizer is not None else None
        if optimizer is None:
            yield self.skipped("parameters in the optimizer", "no optimizer was given")
        else:
            yield self._coverage(model, optimizer, task)
        if not trainable(model):
            if optimizer is None:
                yield self.line("trainable parameters", "0", "at least 1", frozen_finding(model))
            return
        if optimizer is not None:
            rate = self._rate(optimizer)
            yield rate
            if rate.status == "failed":
                return
        if task is None:
            yield self.skipped(_STEP, "no batch, and no data to cut one from")
        elif optimizer is not None and not cover(model, optimizer).trains:
            yield self.skipped(_STEP, "the optimizer holds nothing of this model that is trainable")
        else:
            yield from self._steps(model, optimizer, task, subject.vocab_size)

    def _coverage(self, model: nn.Module, optimizer: Optimizer, task: Task | None) -> CheckResult:
        covered = cover(model, optimizer, _reached(model, task))
        total = len(trainable(model))
        measured = f"{total - len(covered.uncovered)} of {total}"
        if covered.strange:
            measured += f", and {len(covered.strange)} tensors that are not the model's"
        if covered.twice:
            measured += f"; twice: {shown(covered.twice, _NAMES)}"
        elif covered.ties:
            ties = [" = ".join(names) for names in covered.ties.values()]
            measured += f"; tied, and held once: {'; '.join(ties[:3])}{'; ...' if len(ties) > 3 else ''}"
        title, expected = "parameters in the optimizer", f"all {total} that are trainable, each once"
        return self.line(title, measured, expected, coverage_findings(model, covered))

    def _rate(self, optimizer: Optimizer) -> CheckResult:
        title, found = "learning rate", list(rate_findings(optimizer))
        known = rates(optimizer)
        if known is None and not found:
            return self.skipped(title, f"{type(optimizer).__name__} chooses its own")
        measured = learning_rates(known or ())
        if not found and 0 in (known or ()):
            measured += "; a scheduler raises it from 0"
        return self.line(title, measured, "above 0 in each group", found)

    def _steps(
        self, model: nn.Module, given: Optimizer | None, task: Task, vocab_size: int | None
    ) -> Iterator[CheckResult]:
        # A default one is made inside: it may switch embeddings to dense gradients.
        with preserved(model, given):
            optimizer = given if given is not None else default_optimizer(model)
            waiting = any(
                group.get("lr") != group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups
            )
            steps = take_steps(model, optimizer, task)
            judge = StepFindings(model, optimizer, steps)
            found = list(judge.judge())
            wrong_size = None if waiting else judge.size()
            frozen = sum(not parameter.requires_grad for parameter in model.parameters())
            by = type(optimizer).__name__ + ("" if given is not None else " at lr 1e-3, for none was given")
        if judge.idle or steps.bad_gradient:
            found += diagnose(model, task, vocab_size, given).faults
        total = len(judge.parameters)
        measured, expected = f"{len(steps.moved & judge.parameters.keys())} of {total} by {by}", f"all {total}"
        if not found:
            if judge.idle:
                measured += f"; {shown(judge.idle, _NAMES)} had no gradient to move by"
            if swallowed := [name for name in judge.swallowed if name not in steps.moved]:
                measured += f"; {shown(swallowed, _NAMES)} stood still, as their dtype rounds"
        yield self.line(_STEP, measured, expected, found)
        if frozen and not steps.frozen_moved and not any(each.code == "GG106" for each in found):
            yield self.line("frozen parameters that a step changes", f"0 of {frozen}", "0")
        if not steps.bad_gradient and steps.broken is None:
            yield self.line(
                "size of the first step",
                f"{number(steps.ratio)} of the weights, at most {number(steps.largest)}",
                "far below the weights' own size, 1e-3 or so",
                wrong_size,
                update_size=steps.ratio,
                update_max=steps.largest,
            )


def _reached(model: nn.Module, task: Task | None) -> list[Tensor]:
    """The tensors that this loss trains."""
    if task is None:
        return []
    with preserved(model), torch.enable_grad():
        return leaves(task.loss(model))
