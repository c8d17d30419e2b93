"""Find the weight that makes logits out of hidden states, and see what enters it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpt_guard.checks.runner.forward import call


class OutputLayer(NamedTuple):
    """The weight `[V, C]`, None if there is none, and the RMS of what enters it, None if that was not seen."""

    weight: Tensor | None
    entering: float | None


def output_layer(model: nn.Module, x: Tensor, vocab: int) -> OutputLayer:
    """The weight of the last module called that has V rows and returns V scores; else that of an embedding.

    Where the output is `F.linear(x, embedding.weight)` no module is called for it. Runs the model once; reads.
    """
    called: list[tuple[Tensor, float]] = []
    handles = [
        module.register_forward_hook(_note(called, vocab))
        for module in model.modules()
        if not isinstance(module, nn.Embedding) and _rows(module) == vocab
    ]
    try:
        call(model, x)
    finally:
        for handle in handles:
            handle.remove()
    if called:
        return OutputLayer(*called[-1])
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and _rows(module) == vocab]
    return OutputLayer(tables[0].weight if tables else None, None)


def _rows(module: nn.Module) -> int | None:
    weight = getattr(module, "weight", None)
    return weight.size(0) if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _note(called: list[tuple[Tensor, float]], vocab: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        entered = args[0] if args and isinstance(args[0], Tensor) else None
        weight = module.weight
        scores = isinstance(output, Tensor) and output.dim() >= 2 and output.size(-1) == vocab
        if scores and entered is not None and entered.is_floating_point() and isinstance(weight, Tensor):
            called.append((weight, float(entered.detach().float().square().mean().sqrt())))

    return hook
