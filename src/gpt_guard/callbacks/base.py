"""Guard: the one class to subclass for a check of your own, and the contract that it validates.

A guard measures in the moment methods (tensors stay on the device: `self.watch.ledger.put(name, scalar)`) and judges
in `judge`, where it sees floats only. Guardian calls it, reads the ledger once per step, and decides what to do with
what it finds.
"""

from __future__ import annotations

import difflib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from gpt_guard.records import Finding, Moment, Observation

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from gpt_guard.hooks.watch import Watch


class Guard(ABC):
    """One idea that judges observations and yields findings.

    Guardian calls `attach` on entry and `detach` on every way out; in between `before_backward`, `after_backward`,
    `before_step` and `after_step` run at their moments and may put device scalars into `self.watch.ledger`; `judge`
    runs at the moments in `judged_at` with what the one host read of the step brought. A guard never raises its
    findings: it yields them. A guard that fails itself is named, switched off, and training goes on.

    Subclasses are checked when they are defined: a method that looks like a misspelt moment, or takes other arguments
    than the contract says, is a TypeError that names both.
    """

    judged_at: ClassVar[frozenset[Moment]] = frozenset({Moment.BEFORE_STEP})
    inspects: ClassVar[bool] = False
    """True for a guard that only acts in inspected steps: from two steps after them, no moment of it is called."""
    _watch: Watch | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_contract(cls)

    @property
    def name(self) -> str:
        """The name under which logs and summaries list this guard."""
        return type(self).__name__

    @property
    def watch(self) -> Watch:
        """What this guard may look at while attached. Raises RuntimeError outside of a Guardian."""
        if self._watch is None:
            raise RuntimeError(f"{self.name} is not attached: use it as Guardian(model, optimizer, guards=[...])")
        return self._watch

    def attach(self, watch: Watch) -> None:
        """Runs on entry; override to register hooks of your own, and call `super().attach(watch)` first."""
        self._watch = watch

    def detach(self) -> None:
        """Runs on every way out, also after a failed entry; must undo `attach` and may run twice."""
        self._watch = None

    def before_backward(self, loss: Tensor) -> None:
        """Runs before `loss.backward()` does anything; `loss` is what backward was called on, unscaled."""

    def after_backward(self) -> None:
        """Runs after a `backward()` that reached this model's parameters, before anything clips the gradients."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Runs before `optimizer.step()` changes anything; the host read follows directly."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Runs after `optimizer.step()`; what is put into the ledger here is read under this step's number."""

    @abstractmethod
    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Yield what is wrong in what was seen; floats only, no device access."""

    def companions(self) -> Iterable[Guard]:
        """Guards that Guardian is to use beside this one, as this one was told to."""
        return ()

    def finish(self) -> Iterable[Finding]:
        """Runs once at exit, still attached: yield what can only be said at the end."""
        return ()

    def blind_spots(self) -> Iterable[str]:
        """Name what this guard was asked to watch and cannot see; listed in the summary and the report."""
        return ()

    def fingerprint(self) -> dict[str, str]:
        """Digests by name that say what this run belongs to; they go into the report."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Plain floats, strings, lists and dicts that let this guard go on after a resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


_CONTRACT = {
    name: list(inspect.signature(member).parameters)
    for name, member in vars(Guard).items()
    if inspect.isfunction(member) and not name.startswith("_")
}


def _check_contract(cls: type[Guard]) -> None:
    for name, member in vars(cls).items():
        if name.startswith("_") or not inspect.isfunction(member):
            continue
        if name in _CONTRACT:
            expected = _CONTRACT[name]
            if len(inspect.signature(member).parameters) != len(expected):
                raise TypeError(
                    f"{cls.__qualname__}.{name}{inspect.signature(member)} cannot be called: Guard.{name} takes "
                    f"({', '.join(expected)})"
                )
        elif meant := difflib.get_close_matches(name, _CONTRACT, n=1, cutoff=0.85):
            raise TypeError(
                f"{cls.__qualname__}.{name} is not a method Guardian calls; did you mean {meant[0]}? "
                f"(A helper of your own should start with an underscore.)"
            )
