"""The model's own `generate`, whatever its arguments are called: found, called, its answer in one form.

And what happens inside it: what the model was called on and in which mode, and what was sampled from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checks.runner.forward import UnknownOutput, unpack

_COUNT_NAMES = (
    "max_new_tokens",
    "max_new",
    "num_new_tokens",
    "n_new_tokens",
    "new_tokens",
    "num_tokens",
    "n_tokens",
    "max_tokens",
    "num_steps",
    "steps",
    "n",
)
"""How hand-written models call the number of tokens to add; not `max_length`, which counts the prompt, too."""
_CONTEXT_NAMES = ("context_size", "context_length", "block_size", "max_context", "max_seq_len", "seq_len")
_NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "temp": 1.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "top_p": 1.0,
}
"""Values under which these options leave the model's own distribution as it is."""
_DRAWS = (torch.multinomial, torch.Tensor.multinomial)


class Misfit(Exception):
    """The method takes or returns something that cannot be asked about here; the message says what."""


@dataclass(frozen=True)
class UserGenerate:
    """A `generate` that takes token ids and a number of tokens; `options` names its other arguments."""

    method: Callable[..., Any]
    count_name: str
    fixed: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def neutral(self) -> dict[str, Any]:
        """Options under which it samples from the model's own distribution, as far as it has them."""
        return {name: value for name, value in _NEUTRAL.items() if self.options.get(name) is not None}

    @property
    def temperature(self) -> str | None:
        """The name of its temperature, if it has one."""
        return next((name for name in ("temperature", "temp") if name in self.options), None)

    def __str__(self) -> str:
        listed = ", ".join(["token_ids", self.count_name, *self.options])
        return f"model.generate({listed})"

    def __call__(self, ids: Tensor, count: int, **options: Any) -> Tensor:
        """Return the new ids `[B, n]`, fewer than asked where it stops early. Raises Misfit, and what it raises."""
        output = self.method(ids, **{self.count_name: count, **self.fixed, **options})
        if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
            output = output[0]
        if not isinstance(output, Tensor):
            try:
                output = torch.tensor(output)
            except (TypeError, ValueError, RuntimeError):
                raise Misfit(f"generate returns a {type(output).__name__}, not token ids") from None
        if output.is_floating_point() or output.is_complex():
            raise Misfit(f"generate returns {output.dtype}, not token ids")
        output = output.reshape(1, -1) if output.dim() == 1 else output
        return _new_ids(output, ids, count)


def find_generate(model: nn.Module, block_size: int | None) -> UserGenerate | str:
    """The model's own `generate`, or in words why our own decoding is used in its place."""
    bare = unwrap(model)
    method = getattr(bare, "generate", None)
    if not callable(method):
        return f"{type(bare).__name__} has no generate method"
    if (home := getattr(method, "__module__", "") or "").partition(".")[0] in ("transformers", "peft"):
        return f"its generate is that of {home.partition('.')[0]}"
    if inspect.isgeneratorfunction(method):
        return "its generate gives one token after the other"
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return "its generate does not tell what it takes"
    return _fitted(method, parameters, block_size)


def _fitted(
    method: Callable[..., Any], parameters: list[inspect.Parameter], block_size: int | None
) -> UserGenerate | str:
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        return "its generate takes no prompt"
    if "str" in str(parameters[0].annotation):
        return f"its generate takes text ({parameters[0]})"
    rest = {one.name: one for one in parameters[1:] if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    count_name = next((name for name in _COUNT_NAMES if name in rest), None)
    if count_name is None:
        return f"its generate has no argument for the number of new tokens that is known ({', '.join(rest) or 'none'})"
    fixed: dict[str, Any] = {}
    for name, one in rest.items():
        if one.default is not one.empty or name == count_name:
            continue
        if name in _CONTEXT_NAMES and block_size is not None:
            fixed[name] = block_size
        elif name in _NEUTRAL:
            fixed[name] = _NEUTRAL[name]
        elif name == "top_k":
            fixed[name] = None
        else:
            return f"its generate needs {name}, which is not known here"
    options = {name: one.default if one.default is not one.empty else fixed.get(name) for name, one in rest.items()}
    options.pop(count_name)
    return UserGenerate(method, count_name, fixed, options)


def _new_ids(output: Tensor, ids: Tensor, count: int) -> Tensor:
    length = ids.size(1)
    if output.dim() != 2 or output.size(0) != ids.size(0):
        raise Misfit(f"generate returns ids {list(output.shape)} for a prompt {list(ids.shape)}")
    if output.size(1) >= length and torch.equal(output[:, :length].to(ids), ids):
        return output[:, length:]
    if output.size(1) <= count:
        return output
    # The prompt may come back cropped; what follows is new, were it more than was asked for.
    kept = next((n for n in range(length, 1, -1) if torch.equal(output[:, :n].to(ids), ids[:, length - n :])), None)
    return output[:, kept:] if kept is not None else output[:, -count:]


class BadDraw(Exception):
    """`torch.multinomial` was given probabilities with NaN, infinity or below 0. Raised before torch sees them.

    On an accelerator they would end the process's use of the device.
    """


@dataclass
class ModelCall:
    """One call of the model: ids `[B, T]`, logits as returned or None, and whether anything was in training mode."""

    ids: Tensor
    logits: Tensor | None
    training: bool


@dataclass
class GenerateRecord:
    """The calls of the model and the probabilities that were sampled from, in order."""

    calls: list[ModelCall] = field(default_factory=list)
    draws: list[Tensor] = field(default_factory=list)


@contextmanager
def recorded(model: nn.Module, *, greedy: bool = False) -> Iterator[GenerateRecord]:
    """Note all calls and draws; with `greedy`, every draw takes the likeliest. Hooks and mode are gone afterwards."""
    record = GenerateRecord()
    bare = unwrap(model)
    handle = bare.register_forward_hook(_note(record, bare), with_kwargs=True)
    try:
        with _Draws(record, greedy):
            yield record
    finally:
        handle.remove()


def _note(record: GenerateRecord, model: nn.Module) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        ids = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and not t.is_floating_point()), None)
        if ids is None or ids.dim() != 2:
            return
        try:
            logits = unpack(output).logits.detach()
        except UnknownOutput:
            logits = None
        record.calls.append(ModelCall(ids.detach().clone(), logits, any(part.training for part in model.modules())))

    return note


class _Draws(TorchFunctionMode):
    """Watches `torch.multinomial`, and through it `torch.distributions.Categorical`."""

    def __init__(self, record: GenerateRecord, greedy: bool) -> None:
        super().__init__()
        self._record = record
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
        self._record.draws.append(weights.detach().float().clone())
        if self._greedy:
            count = int(args[1] if len(args) > 1 else kwargs.get("num_samples", 1))
            return weights.topk(count, dim=-1).indices
        return func(*args, **kwargs)
