"""What lies where in a checkpoint: ours, and the layouts that people write by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.records.render import printable, some

MODEL_KEYS = ("model_state_dict", "model", "state_dict", "model_state", "net", "weights")
OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer", "optimizer_states", "optimizers", "optim")
SCHEDULER_KEYS = ("scheduler_state_dict", "scheduler", "lr_scheduler", "lr_schedulers")
SCALER_KEYS = ("scaler_state_dict", "scaler")
STEP_KEYS = ("step", "global_step", "iter_num", "iteration")
CONFIG_KEYS = ("model_args", "config")

Digest = Annotated[str, Field(max_length=256)]


class Stamp(BaseModel):
    """The entries that only gpt_guard and checkpoints made for it carry, validated since the file is not trusted."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    tokenizer_fingerprint: Digest | None = None
    tokenizer_chars: list[str] | None = None
    fingerprint: dict[str, Digest] = Field(default_factory=dict)
    gpt_guard: dict[str, Any] = Field(default_factory=dict)
    optimizer_parameters: list[list[list[str]]] | None = None

    @property
    def parts(self) -> dict[str, str]:
        """Digests by part; the tokenizer's stands in an entry of its own, which older checkpoints have alone."""
        alone = {"tokenizer": self.tokenizer_fingerprint} if self.tokenizer_fingerprint else {}
        return {**self.fingerprint, **alone}


@dataclass(frozen=True)
class Stored:
    """A checkpoint taken apart; `weights` is the mapping as it was read, with the `_metadata` torch gave it."""

    path: Path
    stamp: Stamp
    weights: Mapping[str, Any]
    optimizers: tuple[dict[str, Any], ...] = ()
    schedulers: tuple[dict[str, Any], ...] = ()
    scalers: tuple[dict[str, Any], ...] = ()
    step: int | None = None
    config: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def take_apart(path: Path, payload: Any, reporter: Reporter) -> Stored:
    """Find the parts of a payload in any common layout; refuses, as GG707, what holds no weights."""
    if not isinstance(payload, Mapping):
        _refuse(path, f"holds {_kind(payload)}, not a dict", reporter)
    if odd := [key for key in payload if not isinstance(key, str)]:
        _refuse(path, f"holds a dict with the key {printable(repr(odd[0]))}, which is no name", reporter)
    if payload and _is_state_dict(payload):
        return Stored(path=path, stamp=Stamp(), weights=payload)
    rest = dict(payload)
    weights = _take(rest, MODEL_KEYS)
    if not isinstance(weights, Mapping) or not _is_state_dict(weights):
        inside = f" (its keys are {some(payload)})" if payload else ""
        _refuse(path, f"holds a dict without model weights{inside}; looked for {', '.join(MODEL_KEYS)}", reporter)
    return Stored(
        path=path,
        stamp=_stamp(path, rest, reporter),
        weights=weights,
        optimizers=_states(_take(rest, OPTIMIZER_KEYS)),
        schedulers=_states(_take(rest, SCHEDULER_KEYS)),
        scalers=_states(_take(rest, SCALER_KEYS)),
        step=_step(rest),
        config=_config(rest),
        extra=rest,
    )


def _is_state_dict(candidate: Mapping[Any, Any]) -> bool:
    """Names to tensors; modules may add values of their own under `_extra_state`."""
    plain_entries = (value for key, value in candidate.items() if not str(key).endswith("_extra_state"))
    tensors = [isinstance(value, Tensor) for value in plain_entries]
    return all(tensors)


def _take(rest: dict[str, Any], keys: tuple[str, ...]) -> Any:
    for key in keys:
        if isinstance(rest.get(key), (Mapping, list, tuple)):
            return rest.pop(key)
    return None


def _states(value: Any) -> tuple[dict[str, Any], ...]:
    """One state or several."""
    listed = value if isinstance(value, (list, tuple)) else [value]
    return tuple(dict(state) for state in listed if isinstance(state, Mapping))


def _stamp(path: Path, rest: dict[str, Any], reporter: Reporter) -> Stamp:
    ours = {key: rest.pop(key) for key in Stamp.model_fields if key in rest}
    try:
        return Stamp(**ours)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(printable(part) for part in first["loc"])
        _refuse(path, f"holds a damaged entry {where}: {first['msg']}", reporter)


def _step(rest: dict[str, Any]) -> int | None:
    for key in STEP_KEYS:
        value = rest.get(key)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point():
            value = int(value.item())
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            rest.pop(key)
            return value
    return None


def _config(rest: dict[str, Any]) -> dict[str, Any] | None:
    """nanoGPT keeps the model's own config in `model_args` and the run's in `config`, so the former goes first."""
    for key in CONFIG_KEYS:
        value = rest.get(key)
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            rest.pop(key)
            return dict(value)
    return None


def _kind(payload: Any) -> str:
    name = type(payload).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _refuse(path: Path, what: str, reporter: Reporter) -> NoReturn:
    reporter.refuse("GG707", f"{path} {what}", known=["payload"])
