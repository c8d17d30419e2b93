"""Training and evaluation mode: set without calling what only bears the name of `train`, and given back."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn


class Marked(Protocol):
    """Whoever wants to know that what happens inside is evaluation."""

    evaluating: bool


@contextmanager
def evaluation_mode(model: nn.Module, mark: Marked | None = None) -> Iterator[None]:
    """Eval mode and no-grad inside; afterwards each module has the mode it had, parts frozen on purpose included."""
    before = [(module, module.training) for module in model.modules()]
    marked = mark.evaluating if mark is not None else False
    if mark is not None:
        mark.evaluating = True
    try:
        set_mode(model, training=False)
        with torch.no_grad():
            yield
    finally:
        # Through train() first: a model may do more there than set the flag (merge adapters, unfreeze statistics).
        if before[0][1]:
            set_mode(model, training=True)
        for module, training in before:
            module.training = training
        if mark is not None:
            mark.evaluating = marked


def set_mode(model: nn.Module, *, training: bool) -> None:
    """What `model.train(training)` does; where a `train` inside of it is a loop of the user's, only flags are set."""
    if all(train is None or sets_modes(train) for train in map(own_train, model.modules())):
        model.train(training)
        return
    for module in model.modules():
        module.training = training


def own_train(module: nn.Module) -> Any:
    """What a module, or a class of it below nn.Module that is none of torch's, has for `train`; None if neither has."""
    if "train" in vars(module):
        return vars(module)["train"]
    for kind in type(module).__mro__:
        if kind is nn.Module:
            return None
        if "train" in vars(kind):
            return None if kind.__module__.startswith("torch.") else vars(kind)["train"]
    return None


def sets_modes(train: Any) -> bool:
    """Whether a method by the name of `train` is nn.Module's one made to do more, and not a loop that trains.

    Many models have a `train(epochs)`. Taken for an override is what can be called with a mode alone, hands it on, and
    names nothing that a training step is made of.
    """
    if not isinstance(train, FunctionType):
        return False
    function = inspect.unwrap(train)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    names = set(function.__code__.co_names)
    if not parameters or not names & {"train", "eval", "training"} or names & {"backward", "step", "zero_grad"}:
        return False
    mode, *others = parameters
    if any(each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in others):
        return False
    if mode.name == "mode":
        return mode.default is mode.empty or isinstance(mode.default, bool)
    return "super" in names and (mode.kind is mode.VAR_POSITIONAL or isinstance(mode.default, bool))
