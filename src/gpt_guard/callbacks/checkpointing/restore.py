"""RestoreWatch: whether what is loaded into the model and its optimizer restores what it should."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.catalogue import finding
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.restoring import RestoreHooks
from gpt_guard.hooks.tensors import is_sharded
from gpt_guard.records import Finding, Moment, Observation, Severity
from gpt_guard.records.render import number, some

if TYPE_CHECKING:
    from gpt_guard.hooks.watch import Watch

_HARDLY_ANY = 0.1
"""Share of the given names. An adapter, or a body without its head, fits whole or nearly so."""
_RATES = ("lr", "initial_lr")


class RestoreWatch(Guard):
    """Looks at each `load_state_dict` of the model, of its direct parts and of the optimizers.

    Told are a snapshot that was never a copy (GG730), a load with `strict=False` of which hardly anything fits (GG731),
    optimizer state that goes to other parameters (GG732), hyperparameters that were replaced (GG733) and state on
    another device than its parameter (GG734), on entry as well. What is loaded before the Guardian is entered is not
    seen. Compares names and addresses; reads no value.
    """

    judged_at = frozenset[Moment]()

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._hooks: RestoreHooks | None = None
        self._loading = ""
        self._given: list[str] = []
        self._unfit: Finding | None = None
        self._asked_at: int | None = None
        # The names of the model state that was loaded last, in the order in which it was saved.
        self._saved_order: list[str] = []

    def attach(self, watch: Watch) -> None:
        super().attach(watch)
        self._clear()
        self._hooks = RestoreHooks(self)
        self._hooks.open(watch.model, watch.optimizers)
        for optimizer in watch.optimizers:
            self._compare_devices(optimizer)

    def detach(self) -> None:
        if self._hooks is not None:
            self._hooks.close()
        self._clear()
        super().detach()

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """Nothing: each load is judged when it is made."""
        return ()

    def blind_spots(self) -> Iterable[str]:
        names = [] if self._hooks is None else self._hooks.unhooked
        return [f"what is loaded into {name}: its class has no hooks for that" for name in names]

    # The model.

    def state_asked_for(self) -> None:
        """Note when a snapshot may have been taken."""
        if self._asked_at is None:
            self._asked_at = self.watch.step

    def model_loads(self, path: str, given: Mapping[str, Any]) -> None:
        """Look at what is given before it is copied."""
        self._loading, self._given, self._unfit = path, list(given), None
        if not path:
            self._saved_order = list(given)
        tensors = dict(self.watch.model.get_submodule(path).named_parameters())
        live = [name for name, own in tensors.items() if _is_same(given.get(name), own)]
        steps = None if self._asked_at is None else self.watch.step - self._asked_at
        if tensors and len(live) == len(tensors) and steps:
            self._tell(
                "GG730",
                f"All {len(live)} parameters that are loaded{f' into `{path}`' if path else ''} are the model's own "
                f"tensors: each is copied onto itself. state_dict() was first asked for at step {self._asked_at}, and "
                f"{steps} steps have changed it since.",
                likely=["reference"],
                evidence={"tensors": len(live), "asked_at": self._asked_at},
            )

    def model_loaded(self, path: str, missing: list[str], unexpected: list[str]) -> None:
        """Look at how much of it did fit."""
        if path != self._loading:
            # A part, while the model as a whole is loaded.
            return
        given, self._given = self._given, []
        fits = len(given) - len(unexpected)
        if not given or not unexpected or not missing or fits >= _HARDLY_ANY * len(given):
            return
        own = list(self.watch.model.get_submodule(path).state_dict(keep_vars=True))
        prefix = _prefix(given, own)
        where = f" into `{path}`" if path else ""
        text = (
            f"{fits} of {len(given)} given names fit{where} with strict=False: {len(missing)} are missing "
            f"({some(missing, 2)}) and {len(unexpected)} unexpected ({some(unexpected, 2)})."
        )
        # With strict=True torch raises next, and says as much.
        self._unfit = self._made("GG731", f"{text} {prefix}".strip(), likely=["prefix"] if prefix else _nested(given))

    def before_backward(self, loss: Tensor) -> None:
        self._tell_unfit()

    def finish(self) -> Iterable[Finding]:
        if sys.exc_info()[0] is None:
            self._tell_unfit()
        return ()

    def _tell_unfit(self) -> None:
        if self._unfit is not None:
            unfit, self._unfit = self._unfit, None
            self.watch.submit(unfit)

    # The optimizers.

    def optimizer_loads(self, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
        """Compare what is given with what the optimizer has."""
        groups = given.get("param_groups")
        if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
            return
        pairs = list(zip(optimizer.param_groups, groups, strict=True))
        self._compare_settings(optimizer, pairs)
        self._compare_order(optimizer, pairs, given)

    def optimizer_loaded(self, optimizer: Optimizer) -> None:
        """Look at where the state lies now."""
        self._compare_devices(optimizer)

    def _compare_settings(self, optimizer: Optimizer, pairs: Sequence[tuple[dict[str, Any], Any]]) -> None:
        changes = [f"{key} {_shown(old)} -> {_shown(new)}" for key, old, new in _replaced(pairs)]
        if changes:
            changes = list(dict.fromkeys(changes))
            self._tell(
                "GG733",
                f"load_state_dict of {type(optimizer).__name__} replaced {some(changes, 6)}: what was given to the "
                f"constructor is gone.",
                evidence={"changes": changes[:20]},
            )

    def _compare_order(
        self, optimizer: Optimizer, pairs: Sequence[tuple[dict[str, Any], Any]], given: Mapping[str, Any]
    ) -> None:
        if not given.get("state"):
            return
        for number_of, (own, saved) in enumerate(pairs):
            now = [self.watch.name_of(each) or "" for each in own["params"]]
            names, exact = saved.get("param_names"), True
            if names is None:
                exact, names = False, [name for name in self._saved_order if name in set(now)]
            elif "param_names" in own:
                now = list(own["param_names"])
            swapped = [(was, name) for was, name in zip(names, now, strict=False) if was != name]
            if len(names) != len(now) or sorted(names) != sorted(now) or not swapped:
                continue
            shapes = {name: tuple(each.shape) for name, each in self.watch.tracked.items()}
            fitting = [(was, name) for was, name in swapped if shapes.get(was) == shapes.get(name)]
            if fitting:
                self._tell_order(optimizer, number_of, names, now, swapped, exact=exact)

    def _tell_order(
        self,
        optimizer: Optimizer,
        group: int,
        names: Sequence[str],
        now: Sequence[str],
        swapped: Sequence[tuple[str, str]],
        *,
        exact: bool,
    ) -> None:
        was, name = swapped[0]
        known = "The state says" if exact else "The model state that was loaded before says"
        self._tell(
            "GG732",
            f"{len(swapped)} of {len(now)} parameters of group {group} stand in another place than when the state of "
            f"{type(optimizer).__name__} was saved: place {list(names).index(was)} was `{was}` and is `{name}` now. "
            f"{known} in which order they were.",
            likely=["reordered"],
            severity=Severity.ERROR if exact else Severity.WARNING,
            parameter=name,
            evidence={"swapped": [list(pair) for pair in swapped[:20]], "count": len(swapped)},
        )

    def _compare_devices(self, optimizer: Optimizer) -> None:
        if not type(optimizer).__module__.startswith("torch.optim"):
            # Some keep their state elsewhere on purpose.
            return
        far = [
            (self.watch.name_of(tensor) or "a tensor", key, value)
            for tensor, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor) and value.dim() and value.device != tensor.device
        ]
        if far:
            name, key, value = far[0]
            parameters = len({each for each, _, _ in far})
            device = self.watch.tracked[name].device if name in self.watch.tracked else "another device"
            self._tell(
                "GG734",
                f"`{key}` of `{name}` is on {value.device} and the parameter on {device}; so it is with {parameters} "
                f"of {len(optimizer.state)} parameters.",
                parameter=name if name in self.watch.tracked else None,
                evidence={"parameters": parameters, "device": str(value.device)},
            )

    def _tell(self, code: str, seen: str, **fields: Any) -> None:
        self.watch.submit(self._made(code, seen, **fields))

    def _made(self, code: str, seen: str, **fields: Any) -> Finding:
        where = user_line()
        place: dict[str, Any] = {
            "step": self.watch.step,
            "guard": self.name,
            "where": where,
            "cause_id": f"{code} {where or ''}",
        }
        return finding(code, seen, **place, **fields)


def _is_same(given: Any, own: Tensor) -> bool:
    """Whether a tensor is another one's memory; sharded and other tensors without an address of their own are not."""
    if not isinstance(given, Tensor) or given.layout is not torch.strided or is_sharded(given):
        return False
    if not given.numel() or given.is_meta or given.shape != own.shape:
        return False
    return given is own or given.data_ptr() == own.data_ptr() != 0


def _replaced(pairs: Iterable[tuple[dict[str, Any], Any]]) -> Iterator[tuple[str, Any, Any]]:
    for own, saved in pairs:
        # The rate of a schedule under way is to be restored: what it began with is what was asked for.
        scheduled = saved.get("initial_lr") == own.get("initial_lr", own.get("lr"))
        for key, old in own.items():
            if key in ("params", "param_names") or key not in saved or (scheduled and key in _RATES):
                continue
            new = saved[key]
            if isinstance(old, (int, float, tuple, list)) and isinstance(new, (int, float, tuple, list)) and old != new:
                yield key, old, new


def _shown(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _prefix(given: Sequence[str], own: Sequence[str]) -> str:
    """A sentence about the prefix with which, or without which, the names would fit."""
    for longer, shorter, sentence in (
        (given, own, "The given names begin with `{}`, and fit without it."),
        (own, given, "The model's names begin with `{}`, and the given ones do not."),
    ):
        known = set(shorter)
        found = {name[: -len(end)] for name in longer for end in _ends(name) if end in known}
        for prefix in sorted(found, key=len):
            if sum(name.removeprefix(prefix) in known for name in longer if name.startswith(prefix)) * 2 > len(longer):
                return sentence.format(prefix)
    return ""


def _ends(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[place:]) for place in range(1, len(parts)))


def _nested(given: Sequence[str]) -> list[str]:
    return ["nested"] if {"model", "state_dict", "model_state_dict", "module"} & set(given) else ["other_architecture"]
