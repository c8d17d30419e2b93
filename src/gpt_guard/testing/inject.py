"""Break a model on purpose: one non-finite number in an output, input, gradient, parameter or buffer, at one step."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.tensors import walk

Undo = Callable[[], None]


class Injection:
    """A fault in place; `remove()`, or leaving it as a context, takes it away again exactly.

    `fired` counts how often the number was put in. What it changed in a parameter or buffer is put back too, unless
    something has written to that element since.
    """

    def __init__(
        self, target: InjectionTarget, step: int, value: float, call: int, optimizers: Iterable[Optimizer]
    ) -> None:
        self.fired = 0
        self._target = target
        self._step = step
        self._value = value
        self._call = call
        self._optimizers = tuple(optimizers)
        self._parameters = {id(parameter) for parameter in target.model.parameters()}
        self._steps: dict[int, int] = {}
        self._calls = 0
        self._undo: list[Undo] = []
        self._install()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the fault away; may run twice."""
        while self._undo:
            self._undo.pop()()

    def _install(self) -> None:
        self._undo.append(register_optimizer_step_post_hook(self._stepped).remove)
        install = {
            "output": self._break_output,
            "input": self._hook_inputs,
            "gradient": self._hook_gradient,
            "parameter": self._plant_between,
            "buffer": self._plant_between,
            "step": self._plant_in_step,
        }
        install[self._target.at]()

    # Steps are counted for each optimizer that holds parameters of the model; the furthest one counts.

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if self._counts(optimizer):
            before = max(self._steps.values(), default=0)
            self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
            # The second of several optimizers ends no step of its own.
            if max(self._steps.values()) > before:
                self._calls = 0
            if self._target.at in ("parameter", "buffer"):
                self._plant_between()

    def _counts(self, optimizer: Optimizer) -> bool:
        if self._optimizers:
            return any(optimizer is own for own in self._optimizers)
        return any(
            id(parameter) in self._parameters for group in optimizer.param_groups for parameter in group["params"]
        )

    def _due(self) -> bool:
        """Whether this call, one of several in its step, is the one to break."""
        if max(self._steps.values(), default=0) != self._step:
            return False
        self._calls += 1
        if self._calls - 1 != self._call:
            return False
        self.fired += 1
        return True

    def _break_output(self) -> None:
        self._change_output(
            lambda output: _poisoned(output, self._value, self._target.described) if self._due() else output
        )

    def _change_output(self, change: Callable[[Any], Any]) -> None:
        """As an attribute of the instance: hooks then see what the module returned, whenever they were added."""
        module = self._target.module
        own = module.__dict__.get("forward")
        forward = module.forward

        def changed_forward(*args: Any, **kwargs: Any) -> Any:
            return change(forward(*args, **kwargs))

        module.__dict__["forward"] = changed_forward
        self._undo.append(lambda: _restore(module, own))

    def _hook_inputs(self) -> None:
        """Before all other hooks of the module, whenever they were added."""

        def broken_inputs(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self._due():
                return None
            return _poisoned((args, kwargs), self._value, self._target.described)

        handle = self._target.module.register_forward_pre_hook(broken_inputs, with_kwargs=True, prepend=True)
        self._undo.append(handle.remove)

    def _hook_gradient(self) -> None:
        """On a parameter's own gradient, or on the gradient that flows back into a module's output."""

        def broken_gradient(grad: Tensor) -> Tensor | None:
            return _plant_number(grad.clone(), self._value) if self._due() else None

        if self._target.tensor is not None:
            self._undo.append(self._target.tensor.register_hook(broken_gradient).remove)
            return

        def hooked_output(output: Any) -> Any:
            first = next((tensor for _, tensor in walk(output) if tensor.requires_grad), None)
            if first is not None:
                first.register_hook(broken_gradient)
            return output

        self._change_output(hooked_output)

    def _plant_between(self) -> None:
        """After one step and before the next, as code of the loop would."""
        if not self.fired and max(self._steps.values(), default=0) == self._step:
            self._plant()

    def _plant_in_step(self) -> None:
        """Inside of `step()`, before its other hooks, as an update that goes wrong would."""

        def begins(optimizer: Optimizer, *_: Any) -> None:
            if self._counts(optimizer) and id(optimizer) not in hooked:
                hooked.add(id(optimizer))
                handle = optimizer.register_step_post_hook(ends)
                hooks: Any = optimizer._optimizer_step_post_hooks
                hooks.move_to_end(handle.id, last=False)
                self._undo.append(handle.remove)

        def ends(*_: Any) -> None:
            if not self.fired and max(self._steps.values(), default=0) == self._step:
                self._plant()

        hooked: set[int] = set()
        self._undo.append(register_optimizer_step_pre_hook(begins).remove)

    def _plant(self) -> None:
        tensor = self._target.tensor
        assert tensor is not None
        self.fired += 1
        first = (0,) * tensor.dim()
        before = float(tensor.detach()[first])
        _plant_number(tensor, self._value)

        def put_back() -> None:
            now = float(tensor.detach()[first])
            if now == self._value or (math.isnan(now) and math.isnan(self._value)):
                _plant_number(tensor, before)

        self._undo.append(put_back)


def _restore(module: nn.Module, own: Any) -> None:
    if own is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = own


def inject_nonfinite(
    model: nn.Module,
    path: str = "",
    *,
    step: int = 0,
    value: float = math.nan,
    at: str | None = None,
    call: int = 0,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
) -> Injection:
    """Put one non-finite number into a model at one step; use it as a context, or call `.remove()` on what it returns.

    Works whether a Guardian is entered before or after. Parameters:

    - `path`: a module (`"blocks.1.mlp"`, `""` for the model), a parameter or a buffer (`"blocks.1.mlp.0.weight"`).
    - `step`: optimizer steps made since this call; those of any optimizer that holds a parameter of the model, or only
      those of `optimizer`. Steps that a GradScaler skips do not count.
    - `value`: NaN, inf or -inf; it goes to the first element of the first float tensor.
    - `at`: of a module `"output"` (the default), `"input"`, `"gradient"` (of its output); of the model also `"batch"`,
      its input; of a parameter `"parameter"` (the default: changed by the loop, before the step), `"step"` (written by
      `optimizer.step()` itself), `"gradient"`; of a buffer `"buffer"`.
    - `call`: which of several calls within the step, for accumulation or a module that is called more than once.

    Raises GuardUsageError for a path, place or value that cannot be; a forward or batch without float tensor raises it
    when the step is reached.
    """
    if math.isfinite(value):
        raise GuardUsageError(f"value is {value!r}, which is finite; give math.nan, math.inf or -math.inf")
    chosen = () if optimizer is None else (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    return Injection(_resolve(model, path, at), step, value, call, chosen)


_PLACES = {
    "module": ("output", "input", "gradient"),
    "model": ("output", "input", "gradient", "batch"),
    "parameter": ("parameter", "step", "gradient"),
    "buffer": ("buffer",),
}


class InjectionTarget(NamedTuple):
    """A place to break: in a module, or in the parameter or buffer `tensor` that the module holds."""

    model: nn.Module
    module: nn.Module
    tensor: Tensor | None
    at: str
    described: str


def _resolve(model: nn.Module, path: str, at: str | None) -> InjectionTarget:
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
    return InjectionTarget(model, module, tensor, place, f"{place} of {path or 'the model'} ({type(module).__name__})")


def _unknown(path: str, known: list[str], model: str) -> str:
    close = difflib.get_close_matches(path, known, n=3, cutoff=0.5)
    parent = path.rpartition(".")[0]
    beside = [name for name in known if name and name.rpartition(".")[0] == parent and parent in known]
    hint = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(beside[:8])}"
    return f"{model} has no module, parameter or buffer {path!r}; {hint}"


@torch.no_grad()
def _plant_number(tensor: Tensor, value: float) -> Tensor:
    """Write a number into the first element, in place, and return the tensor."""
    tensor.detach()[(0,) * tensor.dim()] = value
    return tensor


def _poisoned(structure: Any, value: float, described: str) -> Any:
    """The same structure with the number in the first element of its first float tensor; gradients still flow.

    Raises GuardUsageError if it holds no float tensor.
    """
    broken, found = _replace(structure, value)
    if not found:
        raise GuardUsageError(f"the {described} holds no float tensor, and only those can be NaN or infinite")
    return broken


def _replace(part: Any, value: float) -> tuple[Any, bool]:
    if isinstance(part, Tensor):
        if not part.is_floating_point() or part.numel() == 0:
            return part, False
        chosen = torch.zeros(part.shape, dtype=torch.bool, device=part.device)
        chosen[(0,) * part.dim()] = True
        # where, not a write: the graph below stays as it is, and a view or a leaf is no obstacle.
        return torch.where(chosen, value, part).to(part.dtype), True
    if isinstance(part, Mapping):
        return _replace_in_mapping(part, value)
    if isinstance(part, (tuple, list)):
        return _replace_in_sequence(part, value)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        for field in dataclasses.fields(part):
            broken, found = _replace(getattr(part, field.name), value)
            if found:
                return dataclasses.replace(part, **{field.name: broken}), True
    return part, False


def _replace_in_mapping(part: Mapping[Any, Any], value: float) -> tuple[Any, bool]:
    for key, inner in part.items():
        broken, found = _replace(inner, value)
        if found:
            changed: Any = copy.copy(part)
            changed[key] = broken
            return changed, True
    return part, False


def _replace_in_sequence(part: Any, value: float) -> tuple[Any, bool]:
    for place, inner in enumerate(part):
        broken, found = _replace(inner, value)
        if found:
            changed = [*part[:place], broken, *part[place + 1 :]]
            return part._make(changed) if hasattr(part, "_make") else type(part)(changed), True
    return part, False
