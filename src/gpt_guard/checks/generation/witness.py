"""What happens inside a `generate`: what the model was called on and in which mode, and what was sampled from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checks.runner.forward import UnknownOutput, unpack

_DRAWS = (torch.multinomial, torch.Tensor.multinomial)


class BadDraw(Exception):
    """`torch.multinomial` was given probabilities with NaN, infinity or below 0. Raised before torch sees them.

    On an accelerator they would end the process's use of the device.
    """


@dataclass
class Call:
    """One call of the model: ids `[B, T]`, logits as returned or None, and whether anything was in training mode."""

    ids: Tensor
    logits: Tensor | None
    training: bool


@dataclass
class Witness:
    """The calls of the model and the probabilities that were sampled from, in order."""

    calls: list[Call] = field(default_factory=list)
    draws: list[Tensor] = field(default_factory=list)


@contextmanager
def witnessing(model: nn.Module, *, greedy: bool = False) -> Iterator[Witness]:
    """Note all calls and draws; with `greedy`, every draw takes the likeliest. Hooks and mode are gone afterwards."""
    seen = Witness()
    bare = unwrap(model)
    handle = bare.register_forward_hook(_note(seen, bare), with_kwargs=True)
    try:
        with _Draws(seen, greedy):
            yield seen
    finally:
        handle.remove()


def _note(seen: Witness, model: nn.Module) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        ids = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and not t.is_floating_point()), None)
        if ids is None or ids.dim() != 2:
            return
        try:
            logits = unpack(output).logits.detach()
        except UnknownOutput:
            logits = None
        seen.calls.append(Call(ids.detach().clone(), logits, any(part.training for part in model.modules())))

    return note


class _Draws(TorchFunctionMode):
    """Watches `torch.multinomial`, and through it `torch.distributions.Categorical`."""

    def __init__(self, seen: Witness, greedy: bool) -> None:
        super().__init__()
        self._seen = seen
        self._greedy = greedy

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _DRAWS:
            return func(*args, **kwargs)
        weights = args[0] if args else kwargs["input"]
        if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()):
            raise BadDraw("the probabilities hold NaN, infinity or negative values")
        self._seen.draws.append(weights.detach().float().clone())
        if self._greedy:
            count = int(args[1] if len(args) > 1 else kwargs.get("num_samples", 1))
            return weights.topk(count, dim=-1).indices
        return func(*args, **kwargs)
