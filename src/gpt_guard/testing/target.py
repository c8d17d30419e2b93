"""What a path names in a model, and the places in it that can be broken."""

from __future__ import annotations

import difflib
from typing import NamedTuple

from torch import Tensor, nn

from gpt_guard.errors import GuardUsageError

_PLACES = {
    "module": ("output", "input", "gradient"),
    "model": ("output", "input", "gradient", "batch"),
    "parameter": ("parameter", "step", "gradient"),
    "buffer": ("buffer",),
}


class Target(NamedTuple):
    """A place to break: in a module, or in the parameter or buffer `tensor` that the module holds."""

    model: nn.Module
    module: nn.Module
    tensor: Tensor | None
    at: str
    described: str


def resolve(model: nn.Module, path: str, at: str | None) -> Target:
    """Find a module, parameter or buffer and check the place. Raises GuardUsageError, which says what was meant."""
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tensor: Tensor | None = None
    if path in modules:
        kind, module = ("model" if path == "" else "module"), modules[path]
    elif path in parameters or path in buffers:
        kind = "parameter" if path in parameters else "buffer"
        tensor = parameters[path] if path in parameters else buffers[path]
        module = modules[path.rpartition(".")[0]]
    else:
        raise GuardUsageError(_unknown(path, [*modules, *parameters, *buffers], type(model).__name__))
    place = _PLACES[kind][0] if at is None else at
    if place not in _PLACES[kind]:
        inside = [name for name in (*parameters, *buffers) if name.rpartition(".")[0] == path] if tensor is None else []
        hint = f"; it holds {', '.join(inside)}" if inside else ""
        raise GuardUsageError(
            f"{path or 'the model'} is a {kind}, which can be broken at {', '.join(_PLACES[kind])}, not at {at!r}{hint}"
        )
    if tensor is not None and not tensor.is_floating_point():
        raise GuardUsageError(f"{path} holds {tensor.dtype}, which has no NaN or infinity")
    place = "input" if place == "batch" else place
    return Target(model, module, tensor, place, f"{place} of {path or 'the model'} ({type(module).__name__})")


def _unknown(path: str, known: list[str], model: str) -> str:
    close = difflib.get_close_matches(path, known, n=3, cutoff=0.5)
    parent = path.rpartition(".")[0]
    beside = [name for name in known if name and name.rpartition(".")[0] == parent and parent in known]
    hint = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(beside[:8])}"
    return f"{model} has no module, parameter or buffer {path!r}; {hint}"
