"""TiedWeights: weights that should be one tensor and are two, and one tensor that is stepped as if it were two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.updates.findings import listed
from gpt_guard.callbacks.updates.sampling import address
from gpt_guard.catalogue import finding
from gpt_guard.hooks.tensors import version_of
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding, Moment, Observation, Severity


class _Stepped(NamedTuple):
    """Which optimizer stepped a parameter last, with which gradient; the gradient is only known by its place."""

    optimizer: int
    gradient: tuple[int, int]


class TiedWeights(Guard):
    """Looks at weights that are shared, or look as if they were to be, in the first inspected steps.

    Before the first step an output layer whose weight equals that of an embedding, element by element, and is another
    tensor: a copy that was to be a tie, since no initialisation draws the same numbers twice. Two parameters on one
    storage, each with a gradient and an optimizer state of its own. A parameter that two optimizers step with one and
    the same gradient; two that take turns, each after a backward of its own, are silent. Reads the device only to
    compare weights of one shape, once.
    """

    inspects: ClassVar[bool] = True

    judged_at: ClassVar[frozenset[Moment]] = frozenset()

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._clear()

    def _clear(self) -> None:
        self._stepped: dict[int, _Stepped] = {}
        self._shared: list[tuple[str, Tensor, set[int]]] = []
        self._looked = False

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._clear()
        self._find_shared()
        watch.groups_changed.append(self._find_shared)

    def _find_shared(self) -> None:
        watch, self._shared = self.watch, []
        held = [watch.held_by(index) for index in range(len(watch.optimizers))]
        for name, tensor in watch.tracked.items():
            optimizers = {index for index, own in enumerate(held) if name in own}
            if len(optimizers) > 1:
                self._shared.append((name, tensor, optimizers))

    def detach(self) -> None:
        self._clear()
        super().detach()

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Everything is told before the step that it is seen in."""
        return ()

    def _tell(self, findings: Iterable[Finding]) -> None:
        for found in findings:
            key = f"{found.code} {found.cause_id}"
            if key not in self._reported:
                self._reported.add(key)
                self.watch.submit(found)

    def after_backward(self) -> None:
        self._stepped.clear()

    def before_step(self, optimizer: Optimizer) -> None:
        if not self.watch.inspection.active:
            return
        if not self._looked:
            self._looked = True
            self._tell(self._copied())
            self._tell(self._on_one_storage())
        self._tell(self._twice(self.watch.index_of(optimizer)))

    def _copied(self) -> Iterator[Finding]:
        watch = self.watch
        modules = list(watch.model.named_modules())
        # A weight that is computed (spectral norm) is no parameter, and reading it may change the state that makes it.
        tables = [(path, m._parameters.get("weight")) for path, m in modules if isinstance(m, nn.Embedding)]
        for path, module in modules:
            weight = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
            if weight is None or not weight.requires_grad or not _comparable(weight):
                continue
            for other, table in tables:
                if table is None or table is weight or table.shape != weight.shape:
                    continue
                if not table.requires_grad or not _comparable(table):
                    continue
                if address(table) != address(weight) and torch.equal(table, weight) and _varied(table):
                    yield self._untied(path, other, weight)

    def _untied(self, path: str, other: str, weight: Tensor) -> Finding:
        return finding(
            "GG314",
            f"The weights of `{path}` and of the embedding `{other}` {list(weight.shape)} are equal, element by "
            "element, and are two tensors: from this step on they part.",
            likely=["copied"],
            step=self.watch.step,
            moment=Moment.BEFORE_STEP,
            module=path,
            module_class="Linear",
            parameter=f"{path}.weight" if path else "weight",
            cause_id=f"{path} {other}",
            guard=self.name,
            evidence={"embedding": other, "elements": weight.numel()},
        )

    def _on_one_storage(self) -> Iterator[Finding]:
        places: dict[tuple[int, int], list[str]] = {}
        for index in range(len(self.watch.optimizers)):
            for name, tensor in self.watch.held_by(index).items():
                at = address(tensor) if tensor.requires_grad else None
                if at is not None and name not in places.setdefault(at, []):
                    places[at].append(name)
        for names in places.values():
            if len(names) > 1:
                yield self._double(
                    names,
                    f"{len(names)} parameters in the optimizer are on one storage: {listed(names)}. Each has a "
                    "gradient and an optimizer state of its own, and all of them move the same numbers.",
                    "one_storage",
                )

    def _twice(self, index: int) -> Iterator[Finding]:
        """A parameter of two optimizers whose gradient is still the one that the other has applied."""
        for name, tensor, optimizers in self._shared:
            if index not in optimizers or tensor.grad is None:
                continue
            gradient = (id(tensor.grad), version_of(tensor.grad))
            last = self._stepped.get(id(tensor))
            self._stepped[id(tensor)] = _Stepped(index, gradient)
            if last is not None and last.optimizer != index and last.gradient == gradient:
                kinds = [type(self.watch.optimizers[each]).__name__ for each in sorted(optimizers)]
                yield self._double(
                    [name],
                    f"`{name}` is in {len(optimizers)} optimizers ({', '.join(kinds)}), and both step it with one "
                    "and the same gradient.",
                    "two_optimizers",
                )

    def _double(self, names: list[str], seen: str, cause: str) -> Finding:
        path, kind = self.watch.owner_of(names[0])
        return finding(
            "GG320",
            seen,
            likely=[cause],
            severity=Severity.WARNING,
            step=self.watch.step,
            moment=Moment.BEFORE_STEP,
            module=path,
            module_class=kind,
            parameter=names[0],
            cause_id=cause,
            guard=self.name,
            evidence={"parameters": list(names[:50]), "count": len(names)},
        )

    def state_dict(self) -> dict[str, Any]:
        return {"said": sorted(self._reported)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reported = set(state["said"])


def _comparable(weight: Tensor) -> bool:
    return type(weight) is nn.Parameter and not weight.is_meta and weight.numel() > 1


def _varied(weight: Tensor) -> bool:
    """Whether the elements differ: tensors that are filled with one number are equal without being copies."""
    low, high = weight.detach().aminmax()
    return bool(low != high)
