"""Does a saved optimizer state fit an optimizer? It has no names, so order, counts and shapes must tell."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.checkpoint.fingerprint import plain_name, unwrap
from gpt_guard.checkpoint.match import Clue
from gpt_guard.records.render import printable

SHAPED = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
    | {"sum", "prev", "step_size"}
)
"""State of torch's own optimizers that has its parameter's shape; other optimizers keep what they like."""

TELLING = frozenset(["betas", "momentum", "rho", "alpha", "lambd", "lr_decay", "etas", "history_size"])
"""Settings by which torch's optimizers can be told apart; the rest are shared or differ by torch version."""


def parameter_names(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[list[list[str]]]:
    """Return the model's name for each parameter, by optimizer and group; "" for one the model does not have."""
    names = {id(parameter): plain_name(name) for name, parameter in unwrap(model).named_parameters()}
    return [
        [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def misfits(
    state: Mapping[str, Any], saved_names: list[list[str]] | None, names: list[list[str]], optimizer: Optimizer
) -> list[Clue]:
    """Return what does not fit, most telling first; reads nothing but shapes."""
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(_is_group(group) for group in groups):
        return [Clue("kind", "this is no optimizer state: it has no list of param_groups with their params")]
    ours = optimizer.param_groups
    if len(groups) != len(ours):
        return [Clue("groups", f"{len(groups)} param groups in the checkpoint, {len(ours)} in the optimizer")]
    counts = [(len(theirs["params"]), len(group["params"])) for theirs, group in zip(groups, ours, strict=True)]
    if wrong := [index for index, (there, here) in enumerate(counts) if there != here]:
        there, here = counts[wrong[0]]
        same = sum(there for there, _ in counts) == sum(here for _, here in counts)
        text = f"param group {wrong[0]} has {there} parameters in the checkpoint, {here} in the optimizer"
        return [Clue("groups" if same else "count", text)]
    return [*_kind(groups, optimizer), *_order(saved_names, names), *_shapes(state, groups, optimizer)]


def move_to_parameters(optimizer: Optimizer) -> None:
    """Move state to its parameter's device where `load_state_dict` did not: optimizers that override it.

    `step` stays where torch put it: on the CPU, or on the device for capturable and fused optimizers.
    """
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor) and isinstance(state, dict):
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step" and value.device != parameter.device:
                    state[key] = value.to(parameter.device)


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), list)


def _kind(groups: list[Any], optimizer: Optimizer) -> Iterator[Clue]:
    for theirs, ours in zip(groups, optimizer.param_groups, strict=True):
        there, here = TELLING & theirs.keys(), TELLING & ours.keys()
        if there != here:
            text = (
                f"the state is that of an optimizer with {', '.join(sorted(there)) or 'fewer settings'}; "
                f"{type(optimizer).__name__} has {', '.join(sorted(here)) or 'none of these'}"
            )
            yield Clue("kind", text)
            return


def _order(saved: list[list[str]] | None, names: list[list[str]]) -> Iterator[Clue]:
    if saved is None:
        return
    pairs = [
        (group, index, there, here)
        for group, (theirs, ours) in enumerate(zip(saved, names, strict=False))
        for index, (there, here) in enumerate(zip(theirs, ours, strict=False))
        if there != here
    ]
    # Another name at a place is a renamed module; the same names at other places are another order.
    if pairs and sorted(itertools.chain(*saved)) == sorted(itertools.chain(*names)):
        group, index, there, here = pairs[0]
        yield Clue(
            "order",
            f"parameter {index} of group {group} is {printable(there)} in the checkpoint, {here} in the optimizer",
        )


def _shapes(state: Mapping[str, Any], groups: list[Any], optimizer: Optimizer) -> Iterator[Clue]:
    kept = state.get("state")
    if not isinstance(kept, Mapping):
        yield Clue("kind", "this is no optimizer state: `state` is missing")
        return
    for index, (theirs, ours) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for place, (key, parameter) in enumerate(zip(theirs["params"], ours["params"], strict=True)):
            entry = kept.get(key) if isinstance(key, (int, str)) else None
            for name, value in entry.items() if isinstance(entry, Mapping) else ():
                if name in SHAPED and isinstance(value, Tensor) and value.shape != parameter.shape:
                    there, here = list(value.shape), list(parameter.shape)
                    text = f"{name} of parameter {place} in group {index} is {there}, its parameter {here}"
                    yield Clue("shapes", text)
                    return
