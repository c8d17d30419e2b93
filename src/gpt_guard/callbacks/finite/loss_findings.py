"""What FiniteGuard says of a bad loss: whose code made it, how many targets teach anything, which operations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.callbacks.finite.context import Context
from gpt_guard.callbacks.finite.first_seen import FirstSeen
from gpt_guard.callbacks.finite.forward_findings import GUARD, graph_shows, module_fields, module_name, shown_fields
from gpt_guard.callbacks.finite.state_findings import bad_before
from gpt_guard.callbacks.updates.findings import listed
from gpt_guard.catalogue import finding
from gpt_guard.hooks.autograd_graph.explain import Labels, Operation, explain, labels_of
from gpt_guard.hooks.autograd_graph.nodes import operations
from gpt_guard.hooks.tensors import walk
from gpt_guard.hooks.watch import Watch
from gpt_guard.hooks.weights import StateWatch, bad_state
from gpt_guard.records import Finding, Severity, TensorStats

# What the graph proves, under the names of this code's causes.
_KEYS = {
    "all_labels_ignored": "all_labels_ignored",
    "bad_target": "bad_target",
    "exp_overflow": "overflow",
    "log_of_zero": "log_of_zero",
    "log_or_div_zero": "division_by_zero",
    "overflow_half": "overflow",
}
_IGNORE_INDEX = -100  # of torch's cross_entropy, and the label that data collators write


def is_loss(watch: Watch, culprit: FirstSeen) -> bool:
    """Whether a bad output is a loss: a scalar of a loss module, one called so, or one the model itself computed."""
    if culprit.maker is None or culprit.receiver is not None or culprit.shown.shape != ():
        return False
    if isinstance(watch.tap.modules[culprit.maker], nn.modules.loss._Loss):
        return True
    return "loss" in culprit.shown.position or (culprit.maker == 0 and culprit.after is not None)


def left_out(found: Finding) -> Finding:
    """The same, worth knowing only: no backward was called on this loss."""
    return found.model_copy(
        update={
            "severity": Severity.INFO,
            "seen": f"{found.seen} No backward() was called on it: the loop has left this batch out.",
            "cause_id": "left out",
        }
    )


def loss_of_module(
    watch: Watch,
    culprit: FirstSeen,
    tensor: Tensor | None,
    masks: Sequence[str],
    here: dict[str, Any],
    *,
    diverging: bool,
) -> Finding:
    """The loss that a module returned is bad; `tensor` is None where it is no longer at hand."""
    assert culprit.maker is not None
    shown = culprit.shown
    kind = "NaN" if (shown.stats.nan if shown.stats else math.isnan(shown.high)) else "infinite"
    whose = "the model" if culprit.maker == 0 else module_name(watch, culprit.maker)
    after = "" if culprit.after is None else f", after {module_name(watch, culprit.after)} had returned a finite output"
    return _bad_loss(
        watch,
        f"The loss that {whose} returned is {kind}.",
        tensor,
        masks,
        evidence=shown_fields(shown),
        **module_fields(watch, culprit.maker),
        position=f"output{shown.position}",
        tensor_stats=shown.stats,
        origin=f"{module_name(watch, culprit.maker)} made it where it computes the loss{after}.",
        diverging=diverging,
        **here,
    )


def loss_outside(
    watch: Watch,
    value: float,
    loss: Tensor | None,
    stats: TensorStats | None,
    masks: Sequence[str],
    here: dict[str, Any],
    *,
    diverging: bool,
    why: str | None = None,
) -> Finding:
    """The loss is bad although everything was finite that the model was seen to give out; `why` not all of it was."""
    outputs = "Every watched module output" if watch.tap.insides_watched else "The model's output"
    outside = f"{outputs} was finite: the code between the model's output and backward() made it."
    return _bad_loss(
        watch,
        f"The loss that backward() was called on is {value}.",
        loss,
        masks,
        evidence={},
        tensor_stats=stats,
        origin=outside if why is None else f"{why}: the model made it, or the code between its output and backward().",
        first=[] if why is None else ["unseen"],
        diverging=diverging,
        **here,
    )


def _bad_loss(
    watch: Watch,
    seen: str,
    loss: Tensor | None,
    masks: Sequence[str],
    *,
    evidence: dict[str, Any],
    tensor_stats: TensorStats | None,
    diverging: bool,
    first: Sequence[str] = (),
    **fields: Any,
) -> Finding:
    labels = (labels_of(loss) if loss is not None else None) or _labels_given(watch)
    # Scaling and its removal put two operations of their own on top.
    made_by = operations(loss)[2 if watch.scaling else 0 :] if loss is not None else []
    if labels is not None and labels.supervised < labels.labels:
        evidence |= labels._asdict()
        if labels.supervised == 0:
            seen += f" 0 of {labels.labels} target positions are supervised (all are {labels.ignore_index})."
    operation = explain(loss) if loss is not None else None
    if operation is not None and operation.cause != "all_labels_ignored":
        seen += graph_shows(operation)
    if made_by:
        evidence["operations"] = made_by
    if masks:
        evidence["neg_inf_outputs"] = list(masks)
    shown = _shows(operation, labels, diverging=diverging)
    likely = [*first, *_likely(made_by, masks, tensor_stats)]
    if labels is None and not _classifies(watch, loss, made_by):
        # Without integer labels there is no ignore_index: it comes last.
        likely += ["own_loss_code", "division_by_zero", "bad_target", "log_of_zero", "overflow"]
    return finding(
        "GG102", seen, likely=likely, shown=shown, tensor=tensor_stats, evidence=evidence, guard=GUARD, **fields
    )


def _shows(operation: Operation | None, labels: Labels | None, *, diverging: bool) -> Iterable[str]:
    """The causes that the evidence points to, each with a test and a fix of its own."""
    if operation is not None:
        yield _KEYS.get(operation.cause, "own_loss_code")
    if labels is not None and labels.supervised == 0:
        yield "all_labels_ignored"
    if diverging:
        yield "diverged"


def _likely(made_by: Sequence[str], masks: Sequence[str], stats: TensorStats | None) -> Iterable[str]:
    if masks and "NllLoss" in made_by:
        yield "target_masked"
    if stats is not None and stats.dtype == "float16" and stats.pos_inf:
        yield "overflow"
    if any(name in ("Log", "Log2", "Log10", "Log1P") for name in made_by):
        yield "log_of_zero"
    if "Div" in made_by:
        yield "division_by_zero"
    if any(name in ("Exp", "Expm1") for name in made_by):
        yield "overflow"


def _classifies(watch: Watch, loss: Tensor | None, made_by: Sequence[str]) -> bool:
    """Whether the loss takes integer labels, as far as can be told: it does where neither graph nor inputs deny it."""
    if "NllLoss" in made_by or "NllLoss2D" in made_by:
        return True
    return loss is None and all(not tensor.is_floating_point() for _, tensor in walk(watch.tap.inputs))


def _labels_given(watch: Watch) -> Labels | None:
    """Integer inputs of the model that hold the ignored label, where the loss's own targets are out of reach."""
    for _, tensor in walk(watch.tap.inputs):
        if tensor.dtype is torch.int64 and tensor.numel() and bool((tensor == _IGNORE_INDEX).any()):
            return Labels(tensor.numel(), int((tensor != _IGNORE_INDEX).sum()), _IGNORE_INDEX)
    return None


class OutputsNotSeen(NamedTuple):
    """Modules whose outputs were not seen, by path (the empty one is the whole model), and why not, as a sentence."""

    paths: list[str]
    why: str


def verdict_on_loss(
    watch: Watch,
    state: StateWatch,
    context: Context,
    loss: Tensor,
    stats: TensorStats,
    untouched: dict[int, int],
    here: dict[str, Any],
) -> Iterator[Finding]:
    """What is said before a backward on such a loss; state that is bad where outputs are not seen explains it."""
    hidden = hidden_from(watch)
    for path in hidden.paths if hidden else ():
        bad = bad_state(watch.model.get_submodule(path), path, untouched, state.known)
        origin = f"{hidden.why if hidden else ''}: which module was the first to use it is not known."
        if bad is not None and (told := [*bad_before(watch, state, bad, origin, here)]):
            yield from told
            return
    value = loss.item() if loss.numel() == 1 else math.nan
    masks, diverging = context.mask_names(watch), context.diverging
    yield loss_outside(watch, value, loss, stats, masks, here, diverging=diverging, why=hidden.why if hidden else None)


def hidden_from(watch: Watch, *, late: bool = False) -> OutputsNotSeen | None:
    """What was not seen of the model before this backward; None where its own output was, or those of all its parts.

    Of a model that is called itself, the output is what counts: what went wrong inside shows in it. `late`: the
    backward is over, and whether a forward was missed before it is not known any more.
    """
    tap = watch.tap
    compiled = [path for path in tap.inside_compiled if path not in tap.names] + tap.compiled_later
    ignored = [tap.names[index] for index in sorted(tap.ignored)]
    if not tap.watching:
        return OutputsNotSeen([""], "Module outputs are not watched, as asked")
    if "" in compiled:
        return OutputsNotSeen([""], "What goes on inside of the model is not seen, since it is compiled in place")
    if "" in ignored:
        return OutputsNotSeen([""], "The model's output is not watched, as asked")
    # A second backward may go through a forward that was seen before the first.
    if not (late or watch.forwards or watch.since_step) and (tap.calls or not tap.order):
        return OutputsNotSeen([""], "No call of the model was seen before this backward")
    if not tap.calls and not tap.insides_watched:
        return OutputsNotSeen([""], "Only what the model itself returns is watched, as asked, and it was not called")
    if not tap.calls and (paths := compiled + ignored):
        return OutputsNotSeen(paths, f"What goes on inside of {listed(paths)} is not seen")
    return None
