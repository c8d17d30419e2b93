"""FirstLook: what a careful reader of the model and its optimizer would query before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.first_look.oddity import Oddity, together
from gpt_guard.callbacks.first_look.optimizers import odd_rates, odd_settings, setting
from gpt_guard.callbacks.first_look.structure import is_plain_loss, odd_modules
from gpt_guard.catalogue import finding
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Observation, Severity


class FirstLook(Guard):
    """Looks once, on entry, at the settings of parameter groups and modules; runs no forward and reads no tensor.

    A warning is a setting far from what trainings are known to use, or one that cannot do what it is for; what is
    only rare is worth knowing. Two settings take the first steps to judge: a learning rate, which the loop may still
    change, and `maximize=True`, which is odd beside a loss of torch's own.
    """

    inspects: ClassVar[bool] = True

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._clear()

    def _clear(self) -> None:
        self._rates: dict[int, list[list[float]]] = {}
        self._loss: str | None = None

    def attach(self, watch: Watch) -> None:
        """Look; what is found is told at once."""
        super().attach(watch)
        self._clear()
        watch.inspection.on_end(self._judge_rates)
        self._submit(together(odd_modules(watch.model)))
        for index, optimizer in enumerate(watch.optimizers):
            self._submit(odd_settings(optimizer, index))

    def detach(self) -> None:
        self._clear()
        super().detach()

    def before_backward(self, loss: Tensor) -> None:
        """Note which of torch's losses it is; reads the loss where an optimizer maximises."""
        maximised = any(group.get("maximize") for each in self.watch.optimizers for group in each.param_groups)
        if self.watch.inspection.active and maximised and loss.numel() == 1:
            name = is_plain_loss(loss.grad_fn)
            # The sign of a factor in front of it is that of the whole.
            self._loss = name if name is not None and float(loss.detach()) > 0 else None

    def before_step(self, optimizer: Optimizer) -> None:
        """Tell of an optimizer that makes a loss of torch's own larger."""
        name, self._loss = self._loss, None
        if name is None:
            return
        index = self.watch.index_of(optimizer)
        own = {id(each) for each in self.watch.parameters.values()}
        for place, group in enumerate(optimizer.param_groups):
            # An input that is moved to fool the model is meant to raise its loss.
            if group.get("maximize") and any(id(each) in own for each in group["params"]):
                text = f"maximize is True, and what backward() was called on is a loss ({name}), which is to fall"
                self._submit([setting(optimizer, index, place, "maximize", text, Severity.WARNING)])
                return

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Note the rates; they are judged once the inspected steps are over."""
        if self.watch.inspection.active and not seen.skipped:
            self._rates.setdefault(seen.optimizer, []).append(list(seen.lr))
        return ()

    def _judge_rates(self) -> None:
        for index, rates in self._rates.items():
            self._submit(odd_rates(self.watch.optimizers[index], index, rates))
        self._rates.clear()

    def _submit(self, found: Iterable[Oddity]) -> None:
        for each in found:
            cause = f"{each.key} {each.place}"
            if cause in self._told:
                continue
            self._told.add(cause)
            self.watch.submit(
                finding(
                    each.code,
                    each.text,
                    shown=[each.key],
                    severity=each.severity,
                    step=self.watch.step,
                    module=each.module,
                    module_class=each.module_class,
                    cause_id=cause,
                    evidence=each.evidence or {},
                    guard=self.name,
                )
            )

    def state_dict(self) -> dict[str, Any]:
        return {"told": sorted(self._told)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._told = set(state["told"])
