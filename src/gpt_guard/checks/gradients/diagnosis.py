"""What is wrong with the gradients of a model on one batch, and why: findings by question."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.gradients.calls import within
from gpt_guard.callbacks.gradients.missing import SENTENCES, common_path, next_of, reasons, shown
from gpt_guard.catalogue import finding
from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checks.gradients.backward import Pass, Search, Task, search
from gpt_guard.hooks.autograd_graph.nodes import uses
from gpt_guard.hooks.isolation.preserve import preserved
from gpt_guard.hooks.tensors import readable
from gpt_guard.hooks.unregistered import find_hidden
from gpt_guard.records import Finding, Severity
from gpt_guard.records.render import number

_LISTED = 50
_SENTENCES = {
    **SENTENCES,
    "unused_layer": "never ran, on any input",
    "dead_branch": "never ran, although another of its kind in the same ModuleDict did",
}


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
        return faults((*self.graph, *self.nonfinite, *self.missing, *self.zero, *self.hidden))


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
            diagnosis.nonfinite.append(_nonfinite(model, task, first))
    elif not first.has_graph or len(first.missing) == len(first.norms):
        diagnosis.graph.append(_no_graph(found))
    elif first.norm == 0.0 and not found.reached:
        diagnosis.zero.append(_all_zero(task, first))
    else:
        diagnosis.missing += _missing(model, found)
        diagnosis.zero += _zero(model, found)
    return diagnosis


def faults(findings: Iterable[Finding]) -> list[Finding]:
    """Those that fail a check."""
    return [each for each in findings if each.severity is not Severity.INFO]


def notes(findings: Iterable[Finding]) -> list[Finding]:
    """Those that are only worth knowing."""
    return [each for each in findings if each.severity is Severity.INFO]


def about(
    model: nn.Module,
    code: str,
    seen: str,
    names: Sequence[str],
    likely: Iterable[str],
    *,
    severity: Severity = Severity.ERROR,
    cause_id: str | None = None,
    evidence: Mapping[str, Any] | None = None,
) -> Finding:
    """A finding about these parameters of the model, told of the innermost module that holds them all."""
    path = common_path(names)
    return finding(
        code,
        seen,
        likely=likely,
        severity=severity,
        module=path,
        module_class=type(model.get_submodule(path)).__name__,
        parameter=names[0] if len(names) == 1 else None,
        evidence={"parameters": list(names[:_LISTED]), "count": len(names), **(evidence or {})},
        cause_id=cause_id,
    )


def frozen_finding(model: nn.Module) -> Finding:
    """GG310 for a model in which nothing is trainable."""
    count = sum(1 for _ in model.parameters())
    if count == 0:
        return finding("GG310", "The model has no parameters at all.", severity=Severity.ERROR)
    return finding("GG310", f"All {count} parameters of the model have requires_grad=False.", likely=["all_frozen"])


def bad_parameter(model: nn.Module) -> str | None:
    """The first parameter that holds NaN or infinity."""
    for name, parameter in model.named_parameters():
        values = readable(parameter)
        if values is not None and not bool(torch.isfinite(values).all()):
            return name
    return None


def _no_graph(found: Search) -> Finding:
    ran, alive = found.calls.unrecorded, found.calls.recorded
    enabled = torch.is_grad_enabled()
    likely = ["no_grad"] if (ran and not alive) or not enabled else ["detached_loss"]
    if found.first.has_graph:
        likely = ["frozen_path", "detached_loss"]
        if all(leaf.dim() == 0 for leaf in found.first.leaves):  # a number that was made a tensor anew
            likely.reverse()
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
            module=hidden.module,
            module_class=hidden.module_class,
            parameter=hidden.name,
            evidence={"attribute": hidden.name, "tensors": len(hidden.tensors), "shapes": hidden.shapes},
        )


def _missing(model: nn.Module, found: Search) -> Iterator[Finding]:
    """GG202 for the parameters that no pass gave a gradient; one for what is broken, one for what is left out by name.

    The second is `info` only: a head per task, of which this batch is of one task, is no bug.
    """
    kinds = {name: _kind(model, found, name) for name in found.missing}
    for severity in (Severity.ERROR, Severity.INFO):
        chosen = {name: kind for name, kind in kinds.items() if (kind == "dead_branch") == (severity is Severity.INFO)}
        if not chosen:
            continue
        names, counts, trainable = list(chosen), Counter(chosen.values()), len(found.first.norms)
        seen = (
            f"{len(names)} of {trainable} trainable parameters got no gradient: {shown(names)}. "
            f"{reasons(chosen, _SENTENCES)}{_cuts(model, found, chosen)}"
        )
        likely = [kind for kind, _ in counts.most_common()]
        evidence = {"trainable": trainable, "why": dict(counts)}
        yield about(model, "GG202", seen, names, likely, severity=severity, cause_id=names[0], evidence=evidence)


def _kind(model: nn.Module, found: Search, name: str) -> str:
    path = _owner(model, name)
    if path in found.calls.recorded:
        # Whether the module has a part in the loss: something in it got a gradient. Of the model itself, of its own.
        works = any(other.startswith(f"{path}.") if path else "." not in other for other in found.reached)
        return "unused_parameter" if works else "graph_cut"
    if path in found.calls.unrecorded:
        return "no_grad"
    return "dead_branch" if _chosen_by_name(model, found, path) else "unused_layer"


def _owner(model: nn.Module, name: str) -> str:
    """Path of the module that uses a parameter: a ParameterList or ParameterDict only holds it."""
    path = name.rpartition(".")[0]
    while path and isinstance(model.get_submodule(path), (nn.ParameterList, nn.ParameterDict)):
        path = path.rpartition(".")[0]
    return path


def _chosen_by_name(model: nn.Module, found: Search, path: str) -> bool:
    """One of several of a kind in a ModuleDict, of which another ran: a head of another task, another language."""
    while path:
        parent, _, own = path.rpartition(".")
        container = model.get_submodule(parent)
        if isinstance(container, nn.ModuleDict):
            kind = type(container[own])
            same = (key for key, module in container.items() if key != own and type(module) is kind)
            return any(within(f"{parent}.{key}" if parent else key, found.calls.order) for key in same)
        path = parent
    return False


def _cuts(model: nn.Module, found: Search, kinds: Mapping[str, str]) -> str:
    """Between which two modules the graph ends, from the order of the calls; the first few such places."""
    cut = {_owner(model, name) for name, kind in kinds.items() if kind in ("graph_cut", "no_grad")}
    places: dict[str | None, str] = {}
    for path in found.calls.order:
        if path in cut:
            places[_next_alive(model, found, path)] = path  # the last one before each module that is alive
    ends = [
        f"between `{before or 'the model itself'}` and `{after}`"
        if after
        else f"after `{before or 'the model itself'}`"
        for after, before in places.items()
    ]
    return f" The graph ends {', '.join(ends[:3])}{', ...' if len(ends) > 3 else ''}." if ends else ""


def _next_alive(model: nn.Module, found: Search, path: str) -> str | None:
    """The first module called after this one whose parameters have a gradient."""
    return next_of({_owner(model, name) for name in found.reached}, list(found.calls.order), path)


def _zero(model: nn.Module, found: Search) -> Iterator[Finding]:
    """GG304 for the parameters whose gradient stayed exactly zero, `cancelled` ones as `info` only."""
    cancelled = [name for name in found.zero if _is_cancelled(name, found)]
    dead = [name for name in found.zero if name not in cancelled]
    if dead:
        cause, place = _zero_cause(model, found, dead)
        seen = (
            f"The gradient of {_count(dead)} is exactly zero on this batch, after training steps and on other inputs: "
            f"{shown(dead)}.{place}"
        )
        yield about(model, "GG304", seen, dead, [cause], cause_id=dead[0])
    if cancelled:
        seen = (
            f"The gradient of {_count(cancelled)} is exactly zero, while the weight beside it has one: "
            f"{shown(cancelled)}. The loss does not depend on such a bias."
        )
        yield about(model, "GG304", seen, cancelled, ["cancelled"], severity=Severity.INFO, cause_id=cancelled[0])


def _is_cancelled(name: str, found: Search) -> bool:
    """A bias whose own layer does learn: before a normalisation, of the keys, of logits that are compared."""
    path, _, own = name.rpartition(".")
    return "bias" in own and any(other.startswith(f"{path}.") and other != name for other in found.reached)


def _zero_cause(model: nn.Module, found: Search, names: list[str]) -> tuple[str, str]:
    """The likeliest cause, and where the gradient is lost, as far as the order of the calls tells."""
    paths = {_owner(model, name) for name in names}
    path = next((called for called in reversed(found.calls.order) if called in paths), None)
    if path is None:
        return "never_used", ""
    if any(name.rpartition(".")[0] == path for name in found.reached):
        # A layer whose bias learns and whose weight does not gets zeros in: the units before it are dead.
        return "dead_units", f" What goes into `{path}` is zero, for its other parameters have a gradient."
    after = _next_alive(model, found, path)
    where = f"between `{path}` and `{after}`" if after else f"after `{path}`"
    return "multiplied_by_zero", f" The module runs; what it gives is lost {where}."


def _count(names: list[str]) -> str:
    return f"{len(names)} trainable parameter{'s' if len(names) > 1 else ''}"


def _nonfinite(model: nn.Module, task: Task, first: Pass) -> Finding:
    """Was it a parameter, which module made it first, or was it the backward alone? Runs the forward again; reads."""
    if (bad := bad_parameter(model)) is not None:
        return finding(
            "GG105", f"Parameter `{bad}` holds NaN or infinity.", parameter=bad, module=bad.rpartition(".")[0]
        )
    if math.isfinite(first.loss):
        name = _first_backward(model, task, first.nonfinite)
        seen = f"The loss is {number(first.loss)}, and the gradient of {len(first.nonfinite)} of {len(first.norms)} "
        return finding("GG104", f"{seen}parameters is NaN or infinite.", parameter=name, module=name.rpartition(".")[0])
    with torch.no_grad(), _bad_outputs(model) as bad_outputs:
        task.loss(model)
    if bad_outputs:
        path = bad_outputs[0]
        seen = f"The loss is {number(first.loss)}; the first module that returned NaN or +inf is `{path}`."
        return finding("GG101", seen, module=path, module_class=type(model.get_submodule(path)).__name__)
    likely = ["all_labels_ignored"] if (task.y == task.ignore_index).all() else []
    return finding("GG102", f"The loss is {number(first.loss)}; every module returned finite values.", likely=likely)


def _first_backward(model: nn.Module, task: Task, names: list[str]) -> str:
    """The one whose gradient is computed first: the operations nearest to the loss have the highest numbers."""
    with torch.enable_grad():
        order = uses(task.loss(model))
    parameters = dict(model.named_parameters())
    return max(names, key=lambda name: max(order.get(id(parameters[name]), [-1])))


@contextmanager
def _bad_outputs(model: nn.Module) -> Iterator[list[str]]:
    """Paths of modules in the order in which they returned something bad; -inf alone is what a mask looks like."""
    bad: list[str] = []

    def watch(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tensors = output if isinstance(output, (tuple, list)) else [output]
            floats = [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
            if any(bool((t.isnan() | t.isposinf()).any()) for t in floats):
                bad.append(path)

        return hook

    handles = [module.register_forward_hook(watch(path)) for path, module in model.named_modules() if path]
    try:
        yield bad
    finally:
        for handle in handles:
            handle.remove()
