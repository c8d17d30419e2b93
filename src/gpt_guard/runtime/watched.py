"""What one Guardian watches, held weakly: one that was left keeps nothing alive, one never entered says so."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gpt_guard.catalogue import finding
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.scaler import checked_scaler
from gpt_guard.hooks.tensors import version_of
from gpt_guard.records import Finding, Moment
from gpt_guard.runtime import arguments

_LOGGER = logging.getLogger("gpt_guard")
NEVER_ENTERED = "everything: this Guardian was never entered"


class Watched:
    """Model, optimizers, scheduler and scaler, checked. Raises GuardUsageError for one that cannot be watched."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None, scheduler: Any, scaler: Any
    ) -> None:
        optimizers = arguments.checked_optimizers(optimizer)
        self.model = weakref.ref(arguments.checked_model(model))
        self._optimizers = [weakref.ref(each) for each in optimizers]
        self.scheduler = arguments.weak(arguments.checked_scheduler(scheduler))
        self.scaler = arguments.weak(checked_scaler(scaler))

    @property
    def count(self) -> int:
        """How many optimizers there are."""
        return len(self._optimizers)

    def alive(self) -> tuple[nn.Module, list[Optimizer]]:
        """Model and optimizers. Raises GuardUsageError if one of them is gone."""
        model = self.model()
        optimizers = [each() for each in self._optimizers]
        if model is None or any(each is None for each in optimizers):
            raise GuardUsageError(
                "the model or an optimizer of this Guardian no longer exists, and a Guardian keeps none of them alive: "
                "make a new Guardian, and give what is made inside of its call a name before, as a ModuleList of two "
                "models"
            )
        return model, [each for each in optimizers if each is not None]

    def adopt(self, optimizer: Optimizer) -> bool:
        """Take in an optimizer that steps parameters of the model which none of the known ones holds."""
        model, known = self.alive()
        held = {id(tensor) for each in known for group in each.param_groups for tensor in group["params"]}
        own = {id(parameter) for parameter in model.parameters()} - held
        if not any(id(tensor) in own for group in optimizer.param_groups for tensor in group["params"]):
            return False
        self._optimizers.append(weakref.ref(optimizer))
        return True

    def parts(self) -> dict[str, Any]:
        """All of it, under the names by which a checkpoint takes it."""
        model, optimizers = self.alive()
        return {
            "model": model,
            "optimizer": optimizers[0] if len(optimizers) == 1 else optimizers or None,
            "scheduler": self.scheduler() or None,
            "scaler": self.scaler(),
        }


def adopted(optimizer: Optimizer, step: int) -> Finding:
    """GG907: it was not given, and is watched from here on."""
    tensors = sum(len(group["params"]) for group in optimizer.param_groups)
    return finding(
        "GG907",
        f"{type(optimizer).__name__} ({tensors} tensors) steps the model and was not given: it is watched from now on.",
        step=step,
        moment=Moment.BEFORE_STEP,
        where=user_line(),
        cause_id=f"{type(optimizer).__name__} {step}",
    )


def warn_if_trained(guardian: object, model: nn.Module) -> weakref.finalize[Any, Any]:
    """Warn once when the Guardian is gone, or at exit, if parameters were written to since; `detach()` calls it off.

    Reads version counters, no values; holds neither of the two.
    """
    return weakref.finalize(guardian, _tell, weakref.ref(model), _writes(model))


def _tell(model: weakref.ref[nn.Module], before: int) -> None:
    trained = model()
    if trained is not None and _writes(trained) > before:
        _LOGGER.warning(
            "A Guardian of %s was made and never entered, and the model's parameters have changed since: nothing of it "
            "was watched. Put the loop inside `with guardian:`, or call guardian.start() before it.",
            type(trained).__name__,
        )


def _writes(model: nn.Module) -> int:
    return sum(version_of(parameter) for parameter in model.parameters())
