"""Bench: one recipe set up to be run, traced and without leaving anything behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.hooks.backward import unnoticed
from gpt_guard.hooks.capture.execution_context import Ambient, surrounded_by
from gpt_guard.hooks.compiled import is_compiled_wrapper
from gpt_guard.records import OperationSeen
from gpt_guard.replaying.isolation import set_aside
from gpt_guard.replaying.original import is_compiled, unwrapped
from gpt_guard.replaying.preserve import untouched
from gpt_guard.replaying.recipe import Recipe
from gpt_guard.replaying.trace import Trace


class Seen(NamedTuple):
    """What one run has shown: whether the tensor went bad again, in words what was compared, and what made it so.

    `place` tells that `said` holds a place that is certain although no operation could be named.
    """

    reproduced: bool
    said: str
    operation: OperationSeen | None = None
    place: bool = False


class Bench:
    """Runs parts of a step, all of them within one time limit.

    `notes` gathers what may make a difference, `own` the state that the forward keeps for itself, `random` the
    operations without a fixed order of summation.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        limit_s: float | None,
        changing: Collection[Tensor] = (),
        live: bool = False,
    ) -> None:
        self.model = model
        self.plain = unwrapped(model)
        self.recipe = recipe
        self.notes: list[str] = []
        self.own: list[str] = []
        self.random: set[str] = set()
        self._ends = None if limit_s is None else time.monotonic() + limit_s
        self._changing = changing
        self._live = live
        self._compiled = is_compiled(model)
        if self._compiled:
            self.notes.append("The model runs compiled and was run again eagerly: rounding and random numbers differ.")

    @property
    def given(self) -> Any:
        """All that the step was called with."""
        recipe, loss = self.recipe, self.recipe.loss
        return recipe.args, recipe.kwargs, () if loss is None else (loss.args, loss.kwargs)

    def call(self) -> Any:
        """Run the forward: the model, or the loss function that calls it."""
        recipe = self.recipe
        if recipe.loss is not None and recipe.loss.calls_model:
            return recipe.loss.function(*recipe.loss.args, **recipe.loss.kwargs)
        return self.plain(*recipe.args, **recipe.kwargs)

    @property
    def starts(self) -> Ambient:
        """The surroundings in which `call` begins."""
        loss = self.recipe.loss
        return loss.ambient if loss is not None and loss.calls_model else self.recipe.ambient

    @contextmanager
    def traced(self, ambient: Ambient, watcher: Callable[[Any], None] | None = None) -> Iterator[Trace]:
        """Inside, everything is as it was then and every operation is seen; afterwards nothing has happened.

        `watcher` is called with what each `backward()` inside is called on, before it.
        """
        left = None if self._ends is None else max(self._ends - time.monotonic(), 0.0)
        # The paths that a person knows: those of the model as given, without what torch.compile puts around it.
        named = self.plain if is_compiled_wrapper(self.model) else self.model
        with ExitStack() as undo:
            undo.enter_context(unnoticed(watcher))
            if self._compiled:
                undo.enter_context(torch.compiler.set_stance("force_eager"))
            undo.enter_context(set_aside(ambient.saved))
            held = untouched(
                self.plain, self.notes, self.own, changing=self._changing, given=self.given, live=self._live
            )
            undo.enter_context(held)
            undo.enter_context(surrounded_by(self.model, ambient))
            loss = self.recipe.loss
            trace = Trace(named, limit_s=left, given=None if loss is None else loss.named())
            undo.callback(lambda: self.random.update(trace.nondeterministic))
            with trace:
                yield trace
