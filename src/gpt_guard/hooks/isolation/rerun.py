"""Run a model again on a copy of what it was called with, unseen and without a trace."""

from __future__ import annotations

import copy
import dataclasses
import io
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.nn.modules import module as module_hooks

from gpt_guard.hooks.compiled import is_compiled_in_place, is_compiled_wrapper, is_scripted
from gpt_guard.hooks.copies import Uncopied
from gpt_guard.hooks.inspection import Inspection
from gpt_guard.hooks.isolation.preserve import Keeper, is_plain_object, seed_all
from gpt_guard.hooks.tensors import is_sharded, version_of

_PLAIN = (
    NoneType,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    range,
    torch.dtype,
    torch.device,
    torch.Size,
    Enum,
    type,
    FunctionType,
    BuiltinFunctionType,
)
Consumed = Literal["iterator", "queue", "file"]
# By the module of the class: none of these need be imported to know that a value is no such thing.
_LOCKS = ("_thread", "threading", "multiprocessing.synchronize")
_QUEUES = ("queue", "_queue", "multiprocessing.queues", "multiprocessing.connection", "torch.multiprocessing.queue")
# Weights are copied for a probe only where they take no more than this share of the device's free memory.
_SHARE_OF_MEMORY = 0.25


def odd(value: Any) -> str | None:
    """The class name of the first thing in a call's inputs that cannot be copied, or None.

    A cache or another object of its own could be changed by a second forward: such a call is not repeated.
    """
    if isinstance(value, _PLAIN) or type(value) in (Tensor, nn.Parameter) or type(value).__module__ == "numpy":
        return None
    if isinstance(value, (tuple, list, set)):
        parts: Iterable[Any] = value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = vars(value).values()
    else:
        return type(value).__name__
    return next((name for each in parts if (name := odd(each))), None)


def copied(value: Any, replaced: Mapping[str, Tensor] | None = None, position: str = "") -> Any:
    """Inputs with their tensors cloned; those at the positions of `replaced` (as `walk` names them) are exchanged."""
    if isinstance(value, Tensor):
        given = (replaced or {}).get(position)
        return value.detach().clone() if given is None else given
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(getattr(value, name), replaced, f"{position}.{name}") for name in value._fields))
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(copied(each, replaced, f"{position}[{place}]") for place, each in enumerate(value))
    if isinstance(value, dict) and type(value) is dict:
        return {key: copied(each, replaced, f"{position}[{key!r}]") for key, each in value.items()}
    if isinstance(value, Mapping):
        found: Any = copy.copy(value)
        for key, each in value.items():
            found[key] = copied(each, replaced, f"{position}[{key!r}]")
        return found
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = copy.copy(value)
        for name, each in vars(value).items():
            object.__setattr__(found, name, copied(each, replaced, f"{position}.{name}"))
        return found
    return copy.copy(value) if isinstance(value, set) or type(value).__module__ == "numpy" else value


def not_repeatable(model: nn.Module) -> str | None:
    """Why a model cannot be run once more without a trace, in words; None if nothing speaks against it."""
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    if not alone and torch.distributed.get_world_size() > 1:
        return "in several processes a forward of one may wait for the others"
    if any(map(is_sharded, model.parameters())):
        return "its parameters are sharded, and what gathers them keeps count of the forwards"
    modules = list(model.modules())
    if any(is_compiled_in_place(module) or is_compiled_wrapper(module) for module in modules):
        return "parts are compiled, and would be compiled anew"
    if any(is_scripted(module) for module in modules):
        return "parts are scripted, and after a few calls torch optimises them and rounds in another way"
    hooks = [module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks]
    hooks += [held for module in modules for held in (module._forward_hooks, module._forward_pre_hooks)]
    if any(_is_own(hook) for held in hooks for hook in held.values()):
        return "forward hooks of your own would run once more"
    if (name := next(_consumed(model), None)) is not None:
        return f"its `{name}` is an iterator, a queue or a file, from which a second forward would take"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being recorded"
    if peek_interpreter_stack() is not None:
        return "it was called inside of a torch.func transform, whose tensors are gone after it"
    return None


def _consumed(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if consumed(value) is not None:
                yield f"{path}.{name}" if path else name


def _is_own(hook: Any) -> bool:
    if isinstance(hook, Uncopied):
        return False
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return not home.startswith(("torch.", "gpt_guard."))


def may_block(value: Any) -> bool:
    """Whether it is a lock, an event or a barrier: a second forward in the middle of the first would wait for ever."""
    kind = type(value)
    return kind.__module__ in _LOCKS and (hasattr(kind, "acquire") or hasattr(kind, "wait"))


def consumed(value: Any) -> Consumed | None:
    """Which of the three a value is; None for what can be read as often as one likes.

    An iterator (a generator, `iter(loader)`, `enumerate(...)`) has no way back, and of a queue or a file nobody knows
    who else reads it.
    """
    kind = type(value)
    if isinstance(value, io.IOBase) or kind.__module__ == "tempfile":
        return "file"
    if kind.__module__ in _QUEUES:
        return "queue"
    return "iterator" if hasattr(kind, "__next__") else None


def marks(model: nn.Module) -> list[tuple[int, int]]:
    """Where the parameters lie and how often they were written to: the same before and after a forward of most models.

    One whose forward writes to them (weights normalised in place) takes another step if it runs once more.
    """
    return [(parameter.data_ptr(), version_of(parameter)) for parameter in model.parameters() if not _empty(parameter)]


def _empty(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta


class Rerun:
    """Calls a model on copies of its inputs, in eval mode, without gradient, each time with the same random numbers.

    Modes are set as flags: `eval()` of a model may do more, such as merge weights. `eps` is the rounding of the lowest
    precision that autocast computes in (0 without autocast).
    """

    def __init__(self, model: nn.Module, inputs: Any, autocast: Mapping[str, tuple[bool, torch.dtype]]) -> None:
        self.inputs = inputs
        self._model = model
        self._autocast = dict(autocast)
        self.eps = max((torch.finfo(dtype).eps for enabled, dtype in autocast.values() if enabled), default=0.0)

    def __call__(self, replaced: Mapping[str, Tensor] | None = None, seed: int = 0) -> Any:
        """What the model returns with some inputs exchanged. Call it inside of `open`."""
        args, kwargs = copied(self.inputs, replaced)
        seed_all(seed)
        with ExitStack() as stack:
            for kind, (enabled, dtype) in self._autocast.items():
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            return self._model(*args, **kwargs)

    @contextmanager
    def open(self, inspection: Inspection, name: str) -> Iterator[None]:
        """Everything that calls inside may change is put back afterwards; nothing of it is seen by hooks or guards."""
        fast = torch.backends.mha.get_fastpath_enabled()
        with inspection.probing(name), _held(self._model), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                # The fused path hands nested tensors from layer to layer, which cannot be compared.
                torch.backends.mha.set_fastpath_enabled(False)
                for module in self._model.modules():
                    module.training = False
                yield
            finally:
                torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def _held(model: nn.Module) -> Iterator[None]:
    """What `preserved` does not reach: plain objects in modules, and weights where there is room."""
    keeper = Keeper(weights=False)
    for module in model.modules():
        for value in vars(module).values():
            if is_plain_object(value):
                keeper.keep(vars(value))
    weights = [(parameter, parameter.detach().clone()) for parameter in model.parameters()] if _room(model) else []
    try:
        yield
    finally:
        keeper.put_back()
        for parameter, before in weights:
            if not torch.equal(parameter, before):
                parameter.data.copy_(before)


def _room(model: nn.Module) -> bool:
    parameters = list(model.parameters())
    if not all(type(parameter) is nn.Parameter and parameter.layout is torch.strided for parameter in parameters):
        return False
    size = sum(parameter.nbytes for parameter in parameters if parameter.is_cuda)
    return not size or size < _SHARE_OF_MEMORY * torch.cuda.mem_get_info()[0]
