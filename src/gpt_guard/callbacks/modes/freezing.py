"""FreezeInTrain: a part that only the model's own `train()` freezes, in a loop that has not called it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.updates.findings import listed
from gpt_guard.catalogue import finding
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation


class FreezeInTrain(Guard):
    """Asks modules with a `train()` of their own, in the first inspected step, what that would freeze.

    It is called with the mode that the module is in anyway; flags, modes and whatever else it sets are put back. Told
    are parameters that train now and would not after that call. A model whose `train()` has been called has nothing
    to change and is silent. Runs once after the first step of each inspected stretch; reads nothing from the device.
    """

    inspects: ClassVar[bool] = True

    def __init__(self) -> None:
        self._said = False
        self._asked = False
        self._due: list[Finding] = []

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._asked, self._due = False, []
        watch.inspection.on_begin(self._ask_again)

    def _ask_again(self) -> None:
        self._asked = False

    def before_step(self, optimizer: Optimizer) -> None:
        if self._asked or self._said or not self.watch.inspection.active:
            return
        self._asked = True
        own = [(path, each) for path, each in self.watch.model.named_modules() if has_own_train(each)]
        if own:
            with self.watch.inspection.probing("train() called again"), self.watch.modes.ignoring():
                self._ask(own)

    def _ask(self, own: list[tuple[str, nn.Module]]) -> None:
        trained = {name for name, each in self.watch.parameters.items() if each.requires_grad and each.grad is not None}
        for path, module in own:
            module.train(module.training)
            frozen = [name for name in sorted(trained) if not self.watch.parameters[name].requires_grad]
            if frozen:
                self._due.append(self._finding(path, module, frozen))
                return

    def _finding(self, path: str, module: nn.Module, frozen: list[str]) -> Finding:
        kind = type(module).__name__
        return finding(
            "GG511",
            f"`{path or 'the model'}` ({kind}) has a train() of its own that freezes {len(frozen)} parameters "
            f"({listed(frozen)}); they have gradients in this step, so it has not been called.",
            likely=["not_called"],
            step=self.watch.step,
            moment=Moment.BEFORE_STEP,
            module=path,
            module_class=kind,
            parameter=frozen[0],
            evidence={"parameters": list(frozen[:50]), "count": len(frozen)},
            guard=self.name,
        )

    def judge(self, seen: Observation) -> Iterable[Finding]:
        due, self._due = self._due, []
        for found in due:
            self._said = True
            yield found

    def state_dict(self) -> dict[str, Any]:
        return {"said": self._said}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._said = bool(state["said"])


def has_own_train(module: nn.Module) -> bool:
    """Whether a class below nn.Module, that is none of torch's, defines `train`."""
    for kind in type(module).__mro__:
        if kind is nn.Module:
            return False
        if "train" in vars(kind):
            return not kind.__module__.startswith("torch.")
    return False
