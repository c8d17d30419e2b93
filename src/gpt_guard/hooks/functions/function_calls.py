"""See the calls of torch functions that show a silent bug: losses, softmax, dropout, attention, embeddings, masks.

A `TorchFunctionMode` sees a call however it was spelt: `F.cross_entropy`, `nn.CrossEntropyLoss()`, a name imported
directly, a method of a tensor. It costs a good quarter of a small step (measured on a tiny GPT), so it is only in place
in inspected steps.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling
from torch.nn import functional as F

from gpt_guard.hooks.frames import running_module, user_line
from gpt_guard.hooks.functions.function_mode import FunctionMode
from gpt_guard.records import SourceLine

_SOFTMAX = ("input", "dim")
_MASK = ("input", "mask", "value")
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

# What is seen, by the spellings of each kind. Names of arguments stand where a builtin has no signature.
_KINDS: dict[str, tuple[tuple[Any, str, tuple[str, ...]], ...]] = {
    "softmax": ((torch, "softmax", _SOFTMAX), (Tensor, "softmax", _SOFTMAX), (F, "softmax", ())),
    "log_softmax": ((torch, "log_softmax", _SOFTMAX), (Tensor, "log_softmax", _SOFTMAX), (F, "log_softmax", ())),
    "logsumexp": ((torch, "logsumexp", _SOFTMAX), (Tensor, "logsumexp", _SOFTMAX)),
    "sigmoid": ((torch, "sigmoid", ("input",)), (Tensor, "sigmoid", ("input",)), (F, "sigmoid", ())),
    "logsigmoid": ((F, "logsigmoid", ("input",)),),
    "cross_entropy": ((F, "cross_entropy", ()),),
    "nll_loss": ((F, "nll_loss", ()),),
    "binary_cross_entropy": ((F, "binary_cross_entropy", ()),),
    "binary_cross_entropy_with_logits": ((F, "binary_cross_entropy_with_logits", ()),),
    "kl_div": ((F, "kl_div", ()),),
    "mse_loss": ((F, "mse_loss", ()),),
    "l1_loss": ((F, "l1_loss", ()),),
    "smooth_l1_loss": ((F, "smooth_l1_loss", ()),),
    "huber_loss": ((F, "huber_loss", ()),),
    "dropout": tuple(
        (owner, name, ("input", "p", "training", "inplace") if owner is F else ("input", "p", "train"))
        for owner, name in (
            (F, "dropout"),
            (F, "dropout1d"),
            (F, "dropout2d"),
            (F, "dropout3d"),
            (F, "alpha_dropout"),
            (F, "feature_alpha_dropout"),
            (torch, "dropout"),
            (torch, "dropout_"),
        )
    ),
    "attention": ((F, "scaled_dot_product_attention", _ATTENTION),),
    "multi_head_attention": ((F, "multi_head_attention_forward", ()),),
    "embedding": ((F, "embedding", ()), (torch, "embedding", ("weight", "input"))),
    "layer_norm": ((F, "layer_norm", ()),),
    "batch_norm": ((F, "batch_norm", ()),),
    "normalize": ((F, "normalize", ()),),
    "masked_fill": (
        (torch, "masked_fill", _MASK),
        (Tensor, "masked_fill", _MASK),
        (Tensor, "masked_fill_", _MASK),
    ),
    "product": (
        (F, "linear", ("input", "weight", "bias")),
        (torch, "matmul", ("input", "other")),
        (Tensor, "matmul", ("input", "other")),
        (Tensor, "__matmul__", ("input", "other")),
        (torch, "mm", ("input", "mat2")),
        (Tensor, "mm", ("input", "mat2")),
        (torch, "addmm", ("input", "mat1", "mat2")),
        (torch, "bmm", ("input", "mat2")),
        (Tensor, "bmm", ("input", "mat2")),
        (torch, "einsum", ("equation", "input")),
        (torch, "conv1d", ("input", "weight", "bias")),
        (torch, "conv2d", ("input", "weight", "bias")),
    ),
    "reshape": (
        (torch, "reshape", ("input",)),
        (Tensor, "reshape", ("input",)),
        (Tensor, "view", ("input",)),
        (torch, "flatten", ("input",)),
        (Tensor, "flatten", ("input",)),
    ),
    "draw": ((torch, "randint", ("high",)), (torch, "randperm", ("n",)), (torch, "multinomial", ("input",))),
    "gradient_hook": ((Tensor, "register_hook", ("input",)), (Tensor, "retain_grad", ("input",))),
}

KINDS = frozenset(_KINDS)


def _by_function() -> dict[Any, tuple[str, tuple[str, ...]]]:
    found: dict[Any, tuple[str, tuple[str, ...]]] = {}
    for kind, spellings in _KINDS.items():
        for owner, name, arguments in spellings:
            function = getattr(owner, name, None)
            if function is not None:
                found[function] = (kind, arguments or tuple(inspect.signature(function).parameters))
    return found


_BY_FUNCTION = _by_function()


class FunctionCall:
    """One call while it is being looked at: what was called, with what, and what came out (None before the call).

    Lives for the length of a listener's call; what a listener keeps of it, it keeps as numbers or weak references.
    """

    __slots__ = ("_args", "_kwargs", "_names", "function", "kind", "noted", "result")

    def __init__(
        self, kind: str, function: Any, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.kind = kind
        self.function = function
        self.result: Any = None
        # Whether `CallRecord` has it.
        self.noted = False
        self._names = names
        self._args = args
        self._kwargs = kwargs

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by its name in torch's documentation (`input`, `target`, `weight`), or `default`."""
        if name in self._kwargs:
            return self._kwargs[name]
        place = self._names.index(name) if name in self._names else len(self._args)
        return self._args[place] if place < len(self._args) else default

    @property
    def line(self) -> SourceLine | None:
        """The user's line that made the call; walks the stack, so it is asked only for what is reported."""
        return user_line()

    @property
    def module(self) -> nn.Module | None:
        """The innermost module whose code is running, or None outside of any; walks the stack."""
        return running_module()

    @property
    def name(self) -> str:
        """The function as a person writes it."""
        return getattr(self.function, "__name__", self.kind)


Listener = Callable[[FunctionCall], None]


class FunctionCalls(FunctionMode):
    """Hands the calls that they asked for to listeners, while it is open.

    Calls inside of another one that is seen (`softmax` inside of `F.multi_head_attention_forward`), of tensor
    subclasses, of torch.func transforms and of code being compiled are not seen. `muted` keeps everything quiet while
    gpt_guard itself calls the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.muted = False
        self._after: dict[str, list[Listener]] = {}
        self._before: dict[str, list[Listener]] = {}
        self._process = os.getpid()
        # Replaced by a caller that switches off a guard which fails.
        self.run: Callable[..., None] = _call

    def listen(self, kinds: Iterable[str], listener: Listener, *, before: bool = False) -> None:
        """Have `listener` called after each call of these kinds, or before it. Raises KeyError for an unknown kind."""
        listeners = self._before if before else self._after
        for kind in kinds:
            if kind not in _KINDS:
                raise KeyError(f"no kind of call named {kind!r}; there are {', '.join(sorted(_KINDS))}")
            listeners.setdefault(kind, []).append(listener)

    @property
    def wanted(self) -> bool:
        """Whether anybody listens."""
        return bool(self._after or self._before)

    def open(self) -> None:
        """Begin to see calls in this thread, if anybody listens."""
        if self.wanted:
            super().open()

    def clear(self) -> None:
        """Drop all listeners."""
        self._after.clear()
        self._before.clear()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A compiler that traces through this call sees none of what follows, and adds nothing to the graph.
        if is_compiling():
            return func(*args, **kwargs)
        known = _BY_FUNCTION.get(func)
        if known is None or not self._sees(known[0], types):
            return func(*args, **kwargs)
        call = FunctionCall(known[0], func, known[1], args, kwargs)
        self._hand_on(self._before, call)
        call.result = func(*args, **kwargs)
        self._hand_on(self._after, call)
        return call.result

    def _sees(self, kind: str, types: Iterable[type]) -> bool:
        if self.muted or not self.opened or not (kind in self._after or kind in self._before):
            return False
        # A loader's worker inherits the mode with the process; no value can be read inside of a transform.
        return (
            os.getpid() == self._process
            and all(issubclass(each, (nn.Parameter, Tensor)) and each in _PLAIN for each in types)
            and peek_interpreter_stack() is None
        )

    def _hand_on(self, listeners: dict[str, list[Listener]], call: FunctionCall) -> None:
        for listener in listeners.get(call.kind, ()):
            # Values may be looked at; nothing of it becomes part of the user's graph.
            with torch.no_grad():
                self.run(listener, call)


_PLAIN = (Tensor, nn.Parameter)


def _call(listener: Listener, call: FunctionCall) -> None:
    listener(call)
