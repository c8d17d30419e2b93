"""Training and evaluation mode: who set it last and where, and a way to set it and give it back."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn

from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.patches import Patch
from gpt_guard.records import SourceLine


class ModeLog:
    """The outermost `.train(mode)` calls on one model's modules; `.eval()` is `.train(False)`.

    `last` keeps the newest call on each module, by mode, the newest of all at the end. `changes` grows with every call,
    those on inner modules and gpt_guard's own included: while it stays, no call has set a mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._nested = False
        self.changes = 0
        self.last: dict[bool, dict[str, SourceLine | None]] = {True: {}, False: {}}

    def open(self) -> None:
        """Begin to notice."""
        TRAIN.add(self)

    def close(self) -> None:
        """Stop noticing; may run twice."""
        TRAIN.remove(self)

    def who(self, *, training: bool, of: str | None = None) -> tuple[str, SourceLine | None] | None:
        """Path and line of the last call that set this mode, on the module `of` or one that it is in.

        None if nobody called since entry; of any module where `of` is None.
        """
        for path, line in reversed(self.last[training].items()):
            if of is None or path in ("", of) or of.startswith(f"{path}."):
                return path, line
        return None

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Do not note the calls inside: they are gpt_guard's own."""
        nested, self._nested = self._nested, True
        try:
            yield
        finally:
            self._nested = nested

    def mode_begins(self, module: nn.Module, training: bool) -> bool:
        """Note an outermost call on a module of ours; True if it is one. `.train()` calls itself on each child."""
        if id(module) not in self._paths:
            return False
        self.changes += 1
        if self._nested:
            return False
        self._nested = True
        path, calls = self._paths[id(module)], self.last[bool(training)]
        calls.pop(path, None)
        calls[path] = user_line()
        return True

    def mode_ended(self) -> None:
        """The outermost call is over."""
        self._nested = False


def _around(original: Any, listeners: tuple[ModeLog, ...], module: nn.Module, mode: bool = True) -> Any:
    noted: list[ModeLog] = []
    try:
        # One after the other: a listener that halts must not leave those before it inside of a call.
        for log in listeners:
            if log.mode_begins(module, mode):
                noted.append(log)
        return original(module, mode)
    finally:
        for log in noted:
            log.mode_ended()


TRAIN = Patch(nn.Module, "train", _around)


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
