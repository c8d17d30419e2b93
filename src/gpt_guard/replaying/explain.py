"""What is said about the origin of non-finite values: an operation that made them, or a tensor that was bad before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from gpt_guard.catalogue.operation_causes import likely
from gpt_guard.hooks.frames import running_calls
from gpt_guard.hooks.tensors import walk
from gpt_guard.records import Operand, OperationSeen
from gpt_guard.replaying import rules_elementwise, rules_layers
from gpt_guard.replaying.failed_operation import Evidence, FailedOperation, Rule
from gpt_guard.replaying.operations import EMPTY, FILLS, word_for
from gpt_guard.replaying.places import OperationPlace
from gpt_guard.replaying.rules_backward import backward, name_of
from gpt_guard.replaying.values import be, count, many, measure

_MOST_OPERANDS = 6
_RULES = {**rules_elementwise.RULES, **rules_layers.RULES}
_PARTS = {"self": "input", "src": "input", "mat1": "left", "mat2": "right", "attn_mask": "mask", "attn_bias": "mask"}
LeafKind = Literal["parameter", "buffer", "input", "constant"]
_WORDS: dict[LeafKind, str] = {
    "parameter": "parameter {} was non-finite before any operation ran",
    "buffer": "buffer {} was non-finite before any operation ran",
    "input": "{}, a part of the batch, was non-finite before any operation ran",
    "constant": "{} was non-finite before any operation ran",
}
_CAUSES: dict[LeafKind, tuple[str, ...]] = {
    "parameter": ("parameter_poisoned", "uninitialised", "lr_too_high"),
    "buffer": ("buffer_bad", "uninitialised"),
    "input": ("bad_batch", "uninitialised"),
    "constant": ("bad_constant", "bad_batch", "uninitialised"),
}
# A tensor with a history was computed by the model, in the part of the step that is not traced.
_COMPUTED = ("bad_constant", "lr_too_high")


def explained(case: FailedOperation) -> OperationSeen:
    """The operation in words, with its place, its inputs, the evidence and the causes that fit, likeliest first."""
    found = _evidence(case)
    name = word_for(case.op.base) if case.node is None else name_of(case)
    name = "logdet" if case.of_determinant else name
    return OperationSeen(
        name=name,
        aten=case.op.aten if case.node is None else f"{case.op.aten} in {case.node}",
        phase=case.phase,
        module=case.place.module,
        module_class=case.place.module_class,
        where=case.place.line,
        operands=tuple(_operands(case, found)),
        output=measure(case.result.tensor),
        shows=found.shows,
        causes=likely(found.causes),
    )


def _evidence(case: FailedOperation) -> Evidence:
    if case.node is not None and (found := _asked(backward, case)) is not None:
        return found
    if case.op.base in EMPTY:
        return Evidence("memory that was never written was read", ("uninitialised",))
    if case.of_determinant:
        return Evidence("the logarithm of a determinant that is negative", ("log_of_negative",))
    if case.op.base in FILLS and case.node is None:
        return _fill(case)
    rules = _RULES.get(case.op.base, ())
    if case.op.base.startswith("_scaled_dot_product"):
        rules = (rules_layers.attention,)
    for rule in dict.fromkeys((*rules, *rules_layers.FOR_ALL)):
        if (found := _asked(rule, case)) is not None:
            return found
    return Evidence(f"{word_for(case.op.base)} of finite values", ("own_formula",))


def _asked(rule: Rule, case: FailedOperation) -> Evidence | None:
    """What a rule finds; nothing where it was not written for this kind of tensor: the place is the same without it."""
    try:
        return rule(case)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None


def _fill(case: FailedOperation) -> Evidence:
    bad = count(~torch.isfinite(case.out))
    kind, key = ("NaN", "filled") if case.result.flags.nan else ("an infinity", "mask_used")
    return Evidence(f"{word_for(case.op.base)} wrote {kind} on purpose, {many(bad, 'time')}", (key,))


def _operands(case: FailedOperation, found: Evidence) -> list[Operand]:
    hazard = case.forward.hazard if case.node is not None and case.forward is not None else None
    listed = [hazard.operand] if hazard is not None else []
    for name, value in case.bound.items():
        shown = name if case.node is None else f"{name} of {case.op.base}"
        part = _part(case, name) if case.node is None else shown
        if isinstance(value, Tensor):
            listed.append(Operand(name=part, tensor=measure(value), facts=found.facts.get(name, ())))
        elif isinstance(value, (list, tuple)) and value and all(isinstance(each, Tensor) for each in value):
            listed += [Operand(name=f"{part}[{i}]", tensor=measure(each)) for i, each in enumerate(value)]
        elif isinstance(value, float) or (isinstance(value, int) and name in ("other", "exponent", "value")):
            listed.append(Operand(name=part, value=float(value)))
    return listed[:_MOST_OPERANDS]


def _part(case: FailedOperation, name: str) -> str:
    if name == "other" and case.op.base in ("div", "fmod", "remainder"):
        return "divisor"
    return _PARTS.get(name, name)


def deliberate(case: FailedOperation) -> tuple[bool, str | None]:
    """Whether non-finite values were made on purpose, as a mask is, and the key of the cause if they go wrong."""
    flags = case.result.flags
    if case.node is not None or case.op.base in EMPTY or case.of_determinant:
        return False, None
    if case.op.base in FILLS:
        return True, "filled" if flags.nan else None
    if flags.nan:
        return False, None
    if any(isinstance(value, float) and not math.isfinite(value) for value in case.bound.values()):
        return True, None
    if case.position > 0:
        # Statistics beside the result, such as the logsumexp of an attention row without a key.
        return True, None
    if flags.only_neg_inf:
        if case.op.base == "add" and rules_elementwise.adds_least(case):
            return True, "two_masks_added"
        if case.op.base in ("mul", "_to_copy") and _is_mask(case.out):
            return True, "mask_beyond_dtype"
        if case.op.base == "log" and _is_indicator(case):
            return True, None
    return False, None


def _is_mask(values: Tensor) -> bool:
    """Whether all that is finite has one value, as in a mask of 0 and -inf, or of -inf only."""
    finite = values[torch.isfinite(values)]
    return not finite.numel() or bool((finite == finite.flatten()[0]).all())


def _is_indicator(case: FailedOperation) -> bool:
    """Whether the input holds only 0 and 1, both of them, and is no probability that was rounded."""
    values = case.optional("self")
    if values is None or case.behind("self", rules_elementwise.PROBABILITIES) is not None:
        return False
    ones = values == 1
    return bool(((values == 0) | ones).all()) and bool(ones.any())


class Leaves:
    """The names under which a model holds its tensors, found by their storage, so that a view has the name too.

    `given` are those that a function outside of the model was called with, by names such as "`target` of rmse".
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Tensor] | None = None) -> None:
        self._known: dict[int, tuple[LeafKind, str, Tensor]] = {}
        for name, buffer in model.named_buffers():
            self._add("buffer", name, buffer)
        for name, parameter in model.named_parameters():
            self._add("parameter", name, parameter)
            if parameter.grad is not None:
                self._add("constant", f"the gradient of {name}", parameter.grad)
        for name, tensor in (given or {}).items():
            if _key(tensor) not in self._known:
                self._add("input", name, tensor)
        self._given = frozenset(given or ())
        self._model = model

    def _add(self, kind: LeafKind, name: str, tensor: Tensor) -> None:
        if (key := _key(tensor)) is not None:
            self._known[key] = kind, name, tensor

    def name(self, tensor: Tensor) -> tuple[LeafKind, str, Tensor]:
        """What a tensor is, by which name, and the whole tensor where this one is a view of a named one."""
        known = self._known.get(_key(tensor) or 0)
        if known is not None:
            return known
        for call in reversed(running_calls()):
            for position, given in walk(call.inputs or ()):
                if _key(given) == _key(tensor):
                    return "input", _position(position), given
        return "constant", f"a tensor of shape {list(tensor.shape)}", tensor

    def seen(self, tensor: Tensor, place: OperationPlace | None) -> OperationSeen:
        """What is said about a tensor that was bad from the start; `place` is where it was first read."""
        kind, name, whole = self.name(tensor)
        stats = measure(whole)
        owner = name.rpartition(".")[0] if kind in ("parameter", "buffer") else None
        shown = f"{name} of the model" if kind == "input" and name not in self._given else name
        return OperationSeen(
            kind=kind,
            name=name,
            module=owner if owner is not None else place.module if place and kind == "constant" else None,
            module_class=self._class_of(owner) if owner is not None else None,
            where=place.line if place else None,
            operands=(Operand(name=name, tensor=stats),),
            output=stats,
            shows=f"{_WORDS[kind].format(shown)}: {stats.bad} of {many(stats.numel, 'element')}",
            causes=likely(_COMPUTED if kind == "constant" and tensor.requires_grad else _CAUSES[kind]),
        )

    def written_past_torch(self, tensor: Tensor, place: OperationPlace) -> OperationSeen:
        """What is said about a tensor that an operation wrote and something else wrote to afterwards."""
        stats = measure(tensor)
        bad = f"{stats.bad} of {many(stats.numel, 'element')} {be(stats.bad)}"
        name = f"a tensor of shape {list(tensor.shape)}"
        return OperationSeen(
            kind="constant",
            name=name,
            module=place.module,
            module_class=place.module_class,
            where=place.line,
            operands=(Operand(name=name, tensor=stats),),
            output=stats,
            shows=f"{name} was written to past torch: {bad} non-finite",
            causes=likely(("written_unseen", "uninitialised")),
        )

    def _class_of(self, path: str) -> str | None:
        try:
            return type(self._model.get_submodule(path)).__name__
        except AttributeError:
            return None


def _key(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:
        return None


def _position(position: str) -> str:
    """`[0][1]` is the second positional argument, `[1]['x']` the one by keyword."""
    return f"input{position[3:]}" if position.startswith(("[0]", "[1]")) else f"input{position}"
