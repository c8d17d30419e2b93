"""Stage 12: evaluation gives one answer, leaves the model alone, and differs from training where it should."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.callbacks.modes.sensitive import described, sensitive_modules
from gpt_guard.catalogue import finding
from gpt_guard.checks.runner.base import MODEL, VOCABULARY, Stage, Subject
from gpt_guard.checks.runner.perturb import other_ids, probe_ids, repeatable
from gpt_guard.hooks.isolation.compare import (
    FirstDifference,
    difference,
    everything,
    first_difference,
    rounding,
    traced,
)
from gpt_guard.hooks.isolation.preserve import quiet
from gpt_guard.hooks.unregistered import modules_in, plain_attributes
from gpt_guard.records import CheckResult, Severity
from gpt_guard.records.render import number

_KERNEL = 1e-4
"""A difference below this share of the logits' size comes from the order of additions, not from dropout."""
_NOISE = frozenset({"rand", "randn", "rand_like", "randn_like", "bernoulli", "bernoulli_", "multinomial", "normal_"})
_DROPOUT = frozenset({"dropout", "dropout1d", "dropout2d", "alpha_dropout", "scaled_dot_product_attention"})


class ValidationStage(Stage):
    """Two eval passes agree, eval mode reaches every module, nothing is written, and what the mode changes is known.

    Without gradient. What the user's own validation loop does is not seen here: Guardian watches that.
    """

    number = 12
    name = "validation"
    title = "Validation behaviour"
    after = ("shapes",)
    needs = (MODEL, VOCABULARY)

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        """One line per question."""
        model, x, vocab = MODEL(subject), probe_ids(subject), VOCABULARY(subject)
        with quiet(model):
            mode = self._mode(model, x, subject.seed)
            yield mode
            model.eval()
            yield self._state(model, x, vocab, subject.seed)
            agree = self._twice(model, x, subject.seed, ["mode"] if mode.status == "failed" else [])
            yield agree
        if agree.status == "failed":
            yield self.skipped("training mode", "two eval passes differ already")
        else:
            yield self._training(model, x, subject.seed)

    def _mode(self, model: nn.Module, x: Tensor, seed: int) -> CheckResult:
        title, expected = "eval mode", "all modules, also after a forward"
        total = sum(1 for _ in model.modules())
        for when, likely in (("model.eval()", "override"), ("a forward in eval mode", "inside_forward")):
            if when != "model.eval()":
                repeatable(model, seed)(x)
            left = [path for path, module in model.named_modules() if module.training]
            # A module whose mode changes nothing may ignore it; the model itself is what code asks.
            still = [each for each in sensitive_modules(model) if each.path in left]
            if still or "" in left:
                names = described(still) or "the model itself"
                seen = f"After {when} {len(left)} of {total} modules are in training mode: {names}."
                path = still[0].path if still else ""
                kind = type(model.get_submodule(path)).__name__
                found = finding("GG665", seen, likely=[likely], module=path, module_class=kind)
                return self.line(title, f"{len(left)} of {total} modules still train", expected, found)
        return self.line(title, f"reaches {total} modules", expected)

    def _state(self, model: nn.Module, x: Tensor, vocab: int, seed: int) -> CheckResult:
        title, expected = "parameters and buffers", "unchanged by an eval pass"
        forward = repeatable(model, seed)
        forward(x)  # tables that are made at the first forward, as for rotary embeddings, are made now
        kept = {name: tensor.detach().clone() for name, tensor in _tensors(model)}
        forward(other_ids(x, vocab, torch.Generator().manual_seed(seed)) if vocab > 1 else x)
        changed = [name for name, tensor in _tensors(model) if name not in kept or _differs(kept[name], tensor)]
        if not changed:
            return self.line(title, f"{len(kept)} unchanged", expected)
        name = changed[0]
        path = name.rpartition(".")[0]
        place = {"module": path, "module_class": type(model.get_submodule(path)).__name__, "parameter": name}
        seen = f"An eval pass changed {len(changed)} of {len(kept)} tensors: {', '.join(changed[:4])}."
        if not any(each in model.state_dict() for each in changed):
            # What no checkpoint holds is a cache, and the model's own business.
            note = finding("GG664", seen, likely=["cache"], severity=Severity.INFO, **place)
            return self.line(title, f"{len(changed)} unsaved buffers change", expected, note)
        buffer = "cache" if "cache" in name.lower() else "statistics"
        likely = "in_place" if name in dict(model.named_parameters()) else buffer
        return self.line(title, f"{len(changed)} changed", expected, finding("GG664", seen, likely=[likely], **place))

    def _twice(self, model: nn.Module, x: Tensor, seed: int, likely: list[str]) -> CheckResult:
        title = "two eval passes"
        one, other = repeatable(model, seed)(x), repeatable(model, seed + 1)(x)
        change, allowed = float(difference(one, other).max()), rounding(one)
        measured, expected = f"logits differ by {number(change)}", f"at most {number(allowed)}, rounding"
        if change <= allowed:
            return self.line(title, measured, expected)
        blame = first_difference(
            model,
            traced(model, lambda: repeatable(model, seed)(x)),
            traced(model, lambda: repeatable(model, seed + 1)(x)),
            everything,
        )
        same_seed = float(difference(one, repeatable(model, seed)(x)).max())
        hidden = _unregistered_modules(model)
        share = change / _largest(one)
        likely = [*likely, *_likely_noise(blame, random=same_seed <= allowed, hidden=bool(hidden), share=share)]
        seen = f"In eval mode the logits of one batch differ by {number(change)}, {number(share)} of the largest."
        if hidden:
            seen += f" `{hidden[0]}` holds modules that are not registered, and that eval() does not reach."
        fields: dict[str, Any] = blame.named if blame is not None else {}
        return self.line(title, measured, expected, finding("GG663", seen, likely=likely, **fields))

    def _training(self, model: nn.Module, x: Tensor, seed: int) -> CheckResult:
        title, expected = "training mode", "differs only by dropout, BatchNorm and the like"
        with quiet(model):
            settled = repeatable(model, seed)(x)
            one = traced(model, lambda: repeatable(model, seed)(x))
            model.train()
            active = repeatable(model, seed)(x)
            known = sensitive_modules(model)
            if settled.shape != active.shape:
                return self.line(title, f"logits {list(active.shape)} in place of {list(settled.shape)}", expected)
            change = float(difference(settled, active).max())
            if change <= rounding(settled):
                silent = f"though there is {described(known, 2)}" if known else "as nothing depends on it"
                return self.line(title, f"the same logits, {silent}", expected)
            other = traced(model, lambda: repeatable(model, seed)(x))
        blame = first_difference(model, one, other, everything)
        measured = f"logits differ by {number(change)}"
        explained = next((each for each in known if blame is None or _covers(each.path, blame.path)), None)
        if blame is None or explained is not None or _asks_for_mode(blame.module):
            how = described([explained], 1) if explained is not None else f"`{blame.path}`" if blame else "dropout"
            return self.line(title, f"{measured}, first at {how}", expected)
        seen = f"Between eval and training mode the logits differ by {number(change)}."
        note = finding("GG666", seen, likely=["own_branch"], **blame.named)
        return self.line(title, f"{measured}, first at `{blame.path}`", expected, note)


def _covers(path: str, blamed: str) -> bool:
    return path == blamed or blamed.startswith(f"{path}.") or path.rpartition(".")[0] == blamed


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _differs(before: Tensor, now: Tensor) -> bool:
    if before.shape != now.shape or before.dtype != now.dtype:
        return True
    return float(difference(before, now).max()) > 0 if before.numel() else False


def _largest(logits: Tensor) -> float:
    return max(float(logits.abs().max()), torch.finfo(torch.float32).tiny)


def _likely_noise(blame: FirstDifference | None, *, random: bool, hidden: bool, share: float) -> list[str]:
    """Cause keys of GG663, the likeliest first. `random`: with the same seed two passes do agree."""
    if not random:
        return ["kernel", "state"] if share < _KERNEL else ["state"]
    if hidden:
        return ["unregistered", "functional"]
    # What forward itself calls says more than what it inherits.
    for names in (_in_forward(blame), _names(type(blame.module)) if blame is not None else frozenset()):
        if names & _DROPOUT:
            return ["functional", "noise"]
        if names & _NOISE:
            return ["noise", "functional"]
    return ["functional", "noise"]


def _in_forward(blame: FirstDifference | None) -> frozenset[str]:
    forward = getattr(type(blame.module), "forward", None) if blame is not None else None
    return frozenset(_in_code(forward.__code__)) if isinstance(forward, FunctionType) else frozenset()


def _asks_for_mode(module: nn.Module) -> bool:
    """True where a method of the module's class reads `training`: its own code says that the mode matters."""
    return "training" in _names(type(module))


def _unregistered_modules(model: nn.Module) -> list[str]:
    """Attributes that hold mode-sensitive modules in a plain list, tuple or dict, where `eval()` does not go."""
    known = {id(module) for module in model.modules()}
    return [
        name
        for name, value, *_ in plain_attributes(model)
        if any(id(inner) not in known and sensitive_modules(inner) for inner in modules_in(value))
    ]


def _names(kind: type) -> frozenset[str]:
    """Names of attributes and functions in the methods of a class, torch's own classes left out."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("torch."):
            break
        for method in vars(base).values():
            if isinstance(method, FunctionType):
                found |= _in_code(method.__code__)
    return frozenset(found)


def _in_code(code: CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*(_in_code(each) for each in inner))
