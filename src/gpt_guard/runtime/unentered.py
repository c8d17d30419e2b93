"""A Guardian that was made and never entered watches nothing: say so at the end, if its model was trained meanwhile."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch import nn

from gpt_guard.hooks.tensors import version_of

_LOGGER = logging.getLogger("gpt_guard")
NEVER_ENTERED = "everything: this Guardian was never entered"


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
