"""One recipe set up to be run by this process: traced, and without leaving anything behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from gpt_guard.hooks.backward import unnoticed
from gpt_guard.hooks.capture.execution_context import ExecutionContext, put_into
from gpt_guard.hooks.compiled import is_compiled_in_place, is_compiled_wrapper
from gpt_guard.hooks.tensors import is_sharded
from gpt_guard.replaying.isolation import outside_the_loop, untouched
from gpt_guard.replaying.recipe import Recipe
from gpt_guard.replaying.trace import Trace

_MOST_WRAPPERS = 4


class StepRunner:
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

    def parameter(self, name: str) -> nn.Parameter | None:
        """The parameter of this name."""
        return dict(self.model.named_parameters(remove_duplicate=False)).get(name)

    def call(self) -> Any:
        """Run the forward: the model, or the loss function that calls it."""
        recipe = self.recipe
        if recipe.loss is not None and recipe.loss.calls_model:
            return recipe.loss.function(*recipe.loss.args, **recipe.loss.kwargs)
        return self.plain(*recipe.args, **recipe.kwargs)

    @property
    def starts(self) -> ExecutionContext:
        """The surroundings in which `call` begins."""
        loss = self.recipe.loss
        return loss.context if loss is not None and loss.calls_model else self.recipe.context

    @contextmanager
    def traced(self, context: ExecutionContext, watcher: Callable[[Any], None] | None = None) -> Iterator[Trace]:
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
            undo.enter_context(outside_the_loop(context.saved))
            held = untouched(
                self.plain, self.notes, self.own, changing=self._changing, given=self.given, live=self._live
            )
            undo.enter_context(held)
            undo.enter_context(put_into(self.model, context))
            loss = self.recipe.loss
            trace = Trace(named, limit_s=left, given=None if loss is None else loss.named())
            undo.callback(lambda: self.random.update(trace.nondeterministic))
            with trace:
                yield trace


def unwrapped(model: nn.Module) -> nn.Module:
    """The plain module behind `torch.compile`, DataParallel and DistributedDataParallel; the model itself otherwise."""
    for _ in range(_MOST_WRAPPERS):
        inner: nn.Module | None = None
        if is_compiled_wrapper(model):
            inner = model.get_submodule("_orig_mod")
        elif isinstance(model, (DataParallel, DistributedDataParallel)):
            inner = model.module
        if inner is None:
            break
        model = inner
    return model


def is_compiled(model: nn.Module) -> bool:
    """Whether any part of the model runs compiled: the replay runs it eagerly."""
    return any(is_compiled_wrapper(module) or is_compiled_in_place(module) for module in model.modules())


def why_not(model: nn.Module) -> str | None:
    """Why this model cannot be run by one process alone, as a sentence; None if it can."""
    if any(is_sharded(parameter) for parameter in model.parameters()):
        return "Not replayed: the parameters are sharded, and a forward of one process alone would wait for the others."
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return "Not replayed: the model is sharded, and a forward of one process alone would wait for the others."
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    waits = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if waits and several and torch.distributed.get_world_size() > 1:
        return "Not replayed: SyncBatchNorm waits for all processes, and only this one has failed."
    return None


def module_at(model: nn.Module, path: str) -> nn.Module | None:
    """The module at a path of the model as it was given; the plain module for the model itself."""
    if not path:
        return unwrapped(model)
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
