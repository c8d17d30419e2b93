"""Why two eval passes differ: what the module that made the difference is, and whether the random numbers did it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from gpt_guard.callbacks.modes.sensitive import sensitive_modules
from gpt_guard.hooks.isolation.compare import FirstDifference

_KERNEL = 1e-4
"""A difference below this share of the logits' size comes from the order of additions, not from dropout."""
_NOISE = frozenset({"rand", "randn", "rand_like", "randn_like", "bernoulli", "bernoulli_", "multinomial", "normal_"})
_DROPOUT = frozenset({"dropout", "dropout1d", "dropout2d", "alpha_dropout", "scaled_dot_product_attention"})
_REGISTRIES = frozenset(vars(nn.Module()))


def likely_noise(blame: FirstDifference | None, *, random: bool, hidden: bool, share: float) -> list[str]:
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


def asks_for_mode(module: nn.Module) -> bool:
    """True where a method of the module's class reads `training`: its own code says that the mode matters."""
    return "training" in _names(type(module))


def unregistered_modules(model: nn.Module) -> list[str]:
    """Attributes that hold mode-sensitive modules in a plain list, tuple or dict, where `eval()` does not go."""
    known = {id(module) for module in model.modules()}
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _REGISTRIES
        and any(id(inner) not in known and sensitive_modules(inner) for inner in _modules_in(value))
    ]


def _modules_in(value: Any) -> Iterable[nn.Module]:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple, set)) else ()
    return [item for item in items if isinstance(item, nn.Module)]


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
