"""Which modules of a model have hooks that fire: one inside a compiled module never calls a hook that came late."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def eager_modules(model: nn.Module, compiled: list[str]) -> Iterable[tuple[str, nn.Module]]:
    """Path and module of each module whose hooks fire, each once, parents first; compiled ones are added to `compiled`.

    The wrapper that `torch.compile(module)` returns is among them: hooks on it do fire.
    """
    seen: set[int] = set()
    pending = [("", model)]
    while pending:
        path, module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if is_compiled_in_place(module) or is_scripted(module):
            compiled.append(path)
            continue
        yield path, module
        if is_compiled_wrapper(module):
            compiled.append(path)
            continue
        children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
        pending.extend(reversed(children))


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether this is what `torch.compile(module)` returns; hooks on the wrapper itself do fire."""
    return hasattr(module, "_orig_mod") and hasattr(module, "dynamo_ctx")


def is_scripted(module: nn.Module) -> bool:
    """Whether `torch.jit.script` or `torch.jit.trace` made this: it takes no hooks, or has parts that call none."""
    return isinstance(module, torch.jit.ScriptModule)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called: its hooks become part of the compiled code."""
    return vars(module).get("_compiled_call_impl") is not None
