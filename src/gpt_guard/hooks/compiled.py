"""Where a compiler meets code of ours: which modules have hooks that fire, and what a compiler makes of our calls.

`torch.compile` meets a call of ours in two ways. Dynamo traces through it, into a graph: there it has to break off, so
that the call happens each time. And where it does not trace, it looks at each function that is called, and compiles it:
there ours are called with Dynamo switched off, and those of others that they call with Dynamo as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import nn

_R = TypeVar("_R")
_FRAMES: Any = torch._C._dynamo.eval_frame


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


def _nobody() -> None:
    return None


looking: Callable[[], Any] = getattr(_FRAMES, "get_eval_frame_callback", _nobody)
"""What Dynamo does with each function that is called here and now; None where it is off. Not to be traced."""


def left_alone(function: Any) -> bool:
    """Have Dynamo run its code as it is, and look only at what it calls; False where there is no way to say so."""
    code: CodeType = function.__code__
    if hasattr(_FRAMES, "skip_code"):
        _FRAMES.skip_code(code)
        return True
    if not hasattr(_FRAMES, "set_code_exec_strategy"):
        return False
    action = _FRAMES._FrameAction
    _FRAMES.set_code_exec_strategy(code, _FRAMES._FrameExecStrategy(action.SKIP, action.DEFAULT))
    return True


def _off() -> Any:
    """Switch Dynamo off; gives what is to switch it on again."""
    looked = _FRAMES.set_eval_frame(None)
    _tell(None)
    return looked


def _tell(looked: Any) -> None:
    """By Dynamo's own way, which others listen to: a function mode is open or aside as it would be."""
    sys.modules["torch._dynamo.eval_frame"]._maybe_set_eval_frame(looked)


def away(act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it with Dynamo off; where Dynamo traces, the graph breaks here, and the call happens each time."""
    looked = _off()
    try:
        return act(*args, **kwargs)
    finally:
        _tell(looked)


def around(act: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`act(original, *args, **kwargs)` with Dynamo off, except for what `original` does."""
    looked = _off()

    def as_ever(*args: Any, **kwargs: Any) -> Any:
        nonlocal looked
        _tell(looked)
        try:
            return original(*args, **kwargs)
        finally:
            # It may be the very function that sets it.
            looked = _off()

    try:
        return act(as_ever, *args, **kwargs)
    finally:
        _tell(looked)


def answered_when_traced(ask: Callable[[], _R]) -> Callable[[], _R]:
    """Have a compiler call it where it traces, once, and put the answer into its code; as a decorator.

    As `torch.compiler.assume_constant_result` does, which would import the whole compiler.
    """
    vars(ask)["_dynamo_marked_constant"] = True
    return ask


@answered_when_traced
def in_one_graph() -> bool:
    """Whether what is being traced here must not break (`fullgraph=True`): a break would be the user's error."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator: Any = InstructionTranslator.current_tx()
    return bool(translator.one_graph or getattr(translator, "error_on_graph_break", False))


for _function in (away, around, _off, _tell):
    left_alone(_function)
# As `torch.compiler.disable` marks its functions; they would take longer in each call.
for _function in (away, around):
    vars(_function)["_torchdynamo_disable"] = True
