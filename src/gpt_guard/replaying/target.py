"""Target: the tensor that a finding is about, and how it is recognised when the step runs again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from gpt_guard.hooks.tensors import looks_bad, walk
from gpt_guard.records import Finding, Moment

_OF = re.compile(r"(?P<kind>input|output)(?P<position>.*?) of (?P<module>the model|\S+)$")


class Target(NamedTuple):
    """What must go bad again: an output or an input of a module, the loss, or the gradient of a parameter.

    `module` is a path, "" for the model itself; `position` is where in the output, or among the arguments, it sat.
    """

    kind: Literal["output", "input", "loss", "gradient"]
    module: str = ""
    position: str = ""
    parameter: str = ""

    def __str__(self) -> str:
        owner = f"`{self.module}`" if self.module else "the model"
        if self.kind == "gradient":
            return f"the gradient of `{self.parameter}`"
        return "the loss" if self.kind == "loss" else f"{self.kind}{self.position} of {owner}"

    @property
    def where(self) -> str:
        """The same as the `position` of a finding that names another module."""
        return f"{self.kind}{self.position} of {self.module or 'the model'}"


def target_of(finding: Finding) -> Target | None:
    """The tensor that a finding is about; None if no forward or backward of the model has made it.

    A batch that was bad from the start and parameters that a step has poisoned have nothing to be run again.
    """
    if finding.code == "GG104" and finding.parameter is not None:
        made = finding.moment in (None, Moment.AFTER_BACKWARD)
        return Target("gradient", finding.module or "", parameter=finding.parameter) if made else None
    if finding.code not in ("GG101", "GG102"):
        return None
    position = finding.position or ""
    if (named := _OF.match(position)) is not None:
        path = "" if named["module"] == "the model" else named["module"]
        return Target("input" if named["kind"] == "input" else "output", path, named["position"])
    if position.startswith("output"):
        return Target("output", finding.module or "", position.removeprefix("output"))
    return Target("loss") if finding.code == "GG102" else None


class Enough(BaseException):
    """The tensor was seen to go bad again: the rest of the forward need not run. Never leaves this package."""


class Sighting:
    """Looks at one module's inputs or outputs while the step runs again.

    `tensor` is the first bad one; `last` the last finite one at this position, None if the module was not called.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.tensor: Tensor | None = None
        self.last: Tensor | None = None

    @contextmanager
    def watching(self, module: nn.Module | None) -> Iterator[None]:
        """Look while inside."""
        handle: Any = None
        if module is not None and self._target.kind == "output":
            handle = module.register_forward_hook(self._returned)
        elif module is not None and self._target.kind == "input":
            handle = module.register_forward_pre_hook(self._called, with_kwargs=True)
        try:
            yield
        except Enough:
            pass
        finally:
            if handle is not None:
                handle.remove()

    def _called(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._look({**dict(enumerate(args)), **kwargs})

    def _returned(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self._look(output)

    def _look(self, value: Any) -> None:
        # What is computed here is no part of the step.
        with _disable_current_modes():
            for position, tensor in walk(value):
                if position != self._target.position:
                    continue
                if looks_bad(tensor) is not None:
                    self.tensor = tensor
                    raise Enough
                self.last = tensor
