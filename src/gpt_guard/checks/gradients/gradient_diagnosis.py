"""What is wrong with the gradients of a model on one batch, as findings by question."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.catalogue import finding
from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checks.gradients.backward import Pass, Task
from gpt_guard.checks.gradients.gradient_causes import missing_findings, zero_findings
from gpt_guard.checks.gradients.gradient_search import Search, search
from gpt_guard.checks.gradients.nonfinite import nonfinite_finding
from gpt_guard.hooks.isolation.preserve import preserved
from gpt_guard.hooks.unregistered import find_hidden
from gpt_guard.records import Finding, Severity
from gpt_guard.records.render import number


@dataclass
class Diagnosis:
    """What was found out about the gradients of a model on one batch: findings by question."""

    found: Search | None = None
    graph: list[Finding] = field(default_factory=list)
    missing: list[Finding] = field(default_factory=list)
    nonfinite: list[Finding] = field(default_factory=list)
    zero: list[Finding] = field(default_factory=list)
    hidden: list[Finding] = field(default_factory=list)

    @property
    def faults(self) -> list[Finding]:
        """All findings that fail the check."""
        every = (*self.graph, *self.nonfinite, *self.missing, *self.zero, *self.hidden)
        return [each for each in every if each.severity is not Severity.INFO]


def diagnose(
    model: nn.Module, task: Task, vocab_size: int | None = None, optimizer: Optimizer | None = None
) -> Diagnosis:
    """Look at the gradients of a model, and say why where they are not as they should be. State is as before.

    Errors of the model's own forward go through.
    """
    model = unwrap(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return Diagnosis(graph=[frozen_finding(model)])
    found = search(model, task, vocab_size)
    first = found.first
    diagnosis = Diagnosis(found, hidden=list(_hidden(model, task, first, optimizer)))
    if not math.isfinite(first.loss) or first.nonfinite:
        with preserved(model):
            if not model.training:
                model.train()
            diagnosis.nonfinite.append(nonfinite_finding(model, task, first))
    elif not first.has_graph or all(norm is None for norm in first.norms.values()):
        diagnosis.graph.append(_no_graph(found))
    elif first.norm == 0.0 and not found.reached:
        diagnosis.zero.append(_all_zero(task, first))
    else:
        diagnosis.missing += missing_findings(model, found)
        diagnosis.zero += zero_findings(model, found)
    return diagnosis


def frozen_finding(model: nn.Module) -> Finding:
    """GG310 for a model in which nothing is trainable."""
    count = sum(1 for _ in model.parameters())
    if count == 0:
        return finding("GG310", "The model has no parameters at all.", severity=Severity.ERROR)
    return finding("GG310", f"All {count} parameters of the model have requires_grad=False.", likely=["all_frozen"])


def _no_graph(found: Search) -> Finding:
    ran, alive = found.calls.unrecorded, found.calls.recorded
    enabled = torch.is_grad_enabled()
    likely = ["no_grad"] if (ran and not alive) or not enabled else ["detached_loss"]
    if found.first.has_graph:
        likely = ["frozen_path", "detached_loss"]
    graph = "a graph, but it leads to no trainable parameter" if found.first.has_graph else "no graph (grad_fn is None)"
    under = " All modules ran with gradients disabled." if ran and not alive else ""
    return finding("GG220", f"The loss is {number(found.first.loss)} and has {graph}.{under}", likely=likely)


def _all_zero(task: Task, first: Pass) -> Finding:
    supervised = int((task.y != task.ignore_index).sum())
    likely = ["loss_zero"] if first.loss == 0.0 or supervised == 0 else ["multiplied_away", "constant_output"]
    seen = (
        f"All {len(first.norms)} gradients are exactly zero at a loss of {number(first.loss)}, with {supervised} of "
        f"{task.y.numel()} targets that count."
    )
    return finding("GG201", seen, likely=likely, severity=Severity.ERROR)


def _hidden(model: nn.Module, task: Task, first: Pass, optimizer: Optimizer | None) -> Iterator[Finding]:
    """GG303 for each attribute with trainable tensors that the loss depends on and that nobody holds."""
    known: set[int] = {id(parameter) for parameter in model.parameters()}
    if optimizer is not None:
        known |= {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    if isinstance(task.loss_fn, nn.Module):
        known |= {id(parameter) for parameter in task.loss_fn.parameters()}
    foreign: list[Tensor] = [leaf for leaf in first.leaves if id(leaf) not in known]
    for hidden in find_hidden(model, foreign) if foreign else ():
        size = sum(tensor.numel() for tensor in hidden.tensors)
        yield finding(
            "GG303",
            f"The loss depends on {len(hidden.tensors)} trainable tensors ({hidden.shapes}; {size:,} elements) that "
            f"are not in model.parameters(). They are in attribute `{hidden.name}` ({hidden.kind}) of "
            f"{hidden.module_class}.",
            likely=["plain_tensor"] if "tensor" in hidden.kind or "Parameter" in hidden.kind else [],
            module=hidden.path,
            module_class=hidden.module_class,
            parameter=hidden.name,
            evidence={"attribute": hidden.name, "tensors": len(hidden.tensors), "shapes": hidden.shapes},
        )
