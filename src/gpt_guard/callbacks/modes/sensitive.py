"""Which modules behave differently in training mode, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd


class Sensitive(NamedTuple):
    """A module whose mode matters: its path, and how it differs (`Dropout p=0.2`).

    `buffers` tells that a forward in training mode changes its running statistics, whatever else is done.
    """

    path: str
    module: nn.Module
    how: str
    buffers: bool


def sensitive_modules(model: nn.Module, allow: Iterable[str] = ()) -> list[Sensitive]:
    """The modules of a model whose mode changes what they compute, without those whose path matches `allow`.

    A module of an unknown class counts if one of its methods asks for `self.training` and it holds a probability
    between 0 and 1 under a name that says dropout (`dropout`, `p`, `drop_prob`, ...), itself or in its `config`:
    attention written by hand has one.
    """
    patterns = tuple(allow)
    return [
        Sensitive(path, module, how, _keeps_statistics(module))
        for path, module in model.named_modules()
        if (how := _how(module)) and not any(fnmatchcase(path, pattern) for pattern in patterns)
    ]


def _how(module: nn.Module) -> str | None:
    kind = type(module).__name__
    if isinstance(module, _DropoutNd):
        return f"{kind} p={module.p:g}" if module.p > 0 else None
    if isinstance(module, _NormBase):
        return kind if _keeps_statistics(module) else None
    if isinstance(module, nn.RReLU):
        return kind if module.lower < module.upper else None
    if isinstance(module, nn.MultiheadAttention):
        return f"{kind} dropout={module.dropout:g}" if module.dropout > 0 else None
    if isinstance(module, nn.RNNBase):
        return f"{kind} dropout={module.dropout:g}" if module.dropout > 0 and module.num_layers > 1 else None
    if type(module).__module__.startswith("torch.nn."):
        return None
    return next((f"{kind} {name}={value:g}" for name, value in _probabilities(module)), None)


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.track_running_stats and module.running_mean is not None


def _probabilities(module: nn.Module) -> Iterator[tuple[str, float]]:
    for name in _dropout_names(type(module)):  # type: ignore[arg-type]  # mypy takes Module's own __hash__ for its class's
        for holder in (module, getattr(module, "config", None)):
            value = vars(holder).get(name) if hasattr(holder, "__dict__") else None
            if isinstance(value, float) and 0.0 < value < 1.0:
                yield name, value


@cache
def _dropout_names(kind: type[nn.Module]) -> tuple[str, ...]:
    """Attribute names that say dropout, used in the methods of a class that also ask for `self.training`."""
    names: set[str] = set()
    asks = False
    for base in kind.__mro__:
        if base.__module__.startswith("torch."):
            break
        for method in vars(base).values():
            if isinstance(method, FunctionType) and method.__name__ not in ("train", "eval"):
                used = set(method.__code__.co_names)
                asks = asks or "training" in used
                names |= {name for name in used if name == "p" or "drop" in name.lower()}
    return tuple(sorted(names)) if asks else ()


def cumulative_norms(modules: Iterable[Sensitive]) -> set[str]:
    """Paths of the normalisations that average over all batches alike: their momentum is None."""
    return {each.path for each in modules if each.buffers and getattr(each.module, "momentum", 0.0) is None}


def recomputing_statistics(training: Iterable[Sensitive], usual: set[str]) -> bool:
    """Whether running statistics are being computed anew: momentum is None for the time being, as by `update_bn`."""
    return bool(cumulative_norms(training) - usual)


def set_one_by_one(model: nn.Module) -> bool:
    """Whether a model in eval mode has nothing in training mode but single layers of dropout or normalisation.

    `.train()` on a part of the model would set what is around them, too.
    """
    return not model.training and all(
        isinstance(module, (_DropoutNd, _NormBase)) for module in model.modules() if module.training
    )


def described(modules: Iterable[Any], most: int = 4) -> str:
    """Paths and kinds of sensitive modules, grouped by kind: `blocks.0.mlp.3`, `blocks.1.mlp.3`: Dropout p=0.2."""
    by_kind: dict[str, list[str]] = {}
    for each in modules:
        by_kind.setdefault(each.how, []).append(each.path)
    parts = []
    for how, paths in by_kind.items():
        shown = ", ".join(f"`{path or '(the model itself)'}`" for path in paths[:most])
        parts.append(f"{shown}{f' and {len(paths) - most} more' if len(paths) > most else ''}: {how}")
    return "; ".join(parts)
