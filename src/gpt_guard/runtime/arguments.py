"""What Guardian is given: checked, so that a wrong argument teaches, and held weakly."""

from __future__ import annotations

import math
import operator
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Literal, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.finite.guard import FiniteGuard
from gpt_guard.checkpoint.fingerprint import config_dict
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.optimizer import unwrap
from gpt_guard.sinks.base import Sink

Reads = Literal["auto", "immediate", "per_step"]


def checked_model(model: Any) -> nn.Module:
    """The model, if it is one. Raises GuardUsageError."""
    if not isinstance(model, nn.Module):
        raise GuardUsageError(
            f"model is a {type(model).__name__}, not a torch.nn.Module. Write Guardian(model, optimizer), with the "
            f"module whose forward() the loop calls."
        )
    return model


def checked_optimizers(optimizer: Any) -> tuple[Optimizer, ...]:
    """The plain torch optimizers, none for None. Raises GuardUsageError."""
    optimizers = unwrap(optimizer)
    if optimizer is not None and not optimizers:
        raise GuardUsageError(
            f"optimizer is an empty {type(optimizer).__name__}. Give the optimizer whose step() changes this model's "
            f"parameters, or None for evaluation only."
        )
    return optimizers


def all_guards(guards: Sequence[Any]) -> tuple[Guard, ...]:
    """The guards, each followed by those that it is to be used with. Raises GuardUsageError."""
    return tuple(each for guard in checked_guards(guards) for each in (guard, *guard.companions()))


def checked_guards(guards: Sequence[Any]) -> Sequence[Guard]:
    """The guards, each an instance and each once. Raises GuardUsageError."""
    if isinstance(guards, Guard):
        raise GuardUsageError(f"guards is one {guards.name}; it takes a list: guards=[{guards.name}(...)]")
    for place, guard in enumerate(guards):
        if not isinstance(guard, Guard):
            hint = f": write {guard.__name__}()" if isinstance(guard, type) and issubclass(guard, Guard) else ""
            raise GuardUsageError(f"guards holds {guard!r}, which is not a Guard instance{hint}")
        if any(guard is other for other in guards[:place]):
            raise GuardUsageError(f"guards holds the same {guard.name} twice")
    if sum(isinstance(guard, FiniteGuard) for guard in guards) > 1:
        raise GuardUsageError("guards holds two FiniteGuards; one watches the whole model: leave out the other")
    return guards


def checked_sinks(sinks: Any) -> list[Sink]:
    """The sinks, each an instance and each once. Raises GuardUsageError."""
    if isinstance(sinks, Sink):
        raise GuardUsageError(f"sinks is one {sinks.name}; it takes a list: sinks=[{sinks.name}(...)]")
    if not isinstance(sinks, Iterable) or isinstance(sinks, str):
        _refuse("sinks", sinks, "a list of sinks, [] for no output, or None for the console")
    found = list(sinks)
    for place, sink in enumerate(found):
        if not isinstance(sink, Sink):
            hint = f": write {sink.__name__}(...)" if isinstance(sink, type) and issubclass(sink, Sink) else ""
            own = hint or "; for an output of your own, subclass gpt_guard.Sink"
            raise GuardUsageError(f"sinks holds {sink!r:.80}, which is not a Sink instance{own}")
        if any(sink is other for other in found[:place]):
            raise GuardUsageError(f"sinks holds the same {sink.name} twice")
    return found


def checked_scheduler(scheduler: Any) -> Any:
    """The scheduler or list of them, if each has a step() to follow. Raises GuardUsageError."""
    for each in scheduler if isinstance(scheduler, (list, tuple)) else (scheduler,):
        if each is None:
            continue
        if isinstance(each, (type, Optimizer)) or not callable(getattr(each, "step", None)):
            _refuse(
                "scheduler",
                each,
                "the object whose step() the loop calls, such as torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, "
                "1000), or a list of them; a function of the step number belongs in LRTracker(expected=...), in guards",
            )
    return scheduler


def checked_start(start_step: Any) -> int:
    """The number of steps made before. Raises GuardUsageError."""
    try:
        steps = -1 if isinstance(start_step, bool) else operator.index(start_step)
    except TypeError:
        steps = -1
    if steps < 0:
        _refuse("start_step", start_step, "the number of optimizer steps made before, a whole number from 0 on")
    return steps


def checked_inspect(steps: Any, every: Any) -> dict[str, int]:
    """How many steps are inspected at the start, and how often later. Raises GuardUsageError."""
    for name, count in (("inspect_steps", steps), ("inspect_every", every)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            _refuse(name, count, "a whole number of steps from 0 on; 0 inspects none")
    return {"inspect_steps": steps, "inspect_every": every}


def checked_replay(replay: Any) -> bool | float:
    """Whether failing steps are run again, or for how many seconds at most. Raises GuardUsageError."""
    if not isinstance(replay, (bool, int, float)) or (not isinstance(replay, bool) and not 0 < replay < math.inf):
        _refuse("replay", replay, "True, False, or the seconds that a replay may take, such as 30.0")
    return replay


def reads_at_once(reads: Reads, model: nn.Module) -> bool:
    """Whether values are read where they are made: as asked, or where all of the model is on the CPU."""
    if reads != "auto":
        return reads == "immediate"
    return all(device.type == "cpu" for device in {tensor.device for tensor in (*model.parameters(), *model.buffers())})


def checked_folder(run_dir: Any) -> Path | None:
    """The folder, or None for None. Raises GuardUsageError."""
    if run_dir is None:
        return None
    if not isinstance(run_dir, (str, os.PathLike)) or not os.fspath(run_dir):
        _refuse("run_dir", run_dir, 'the path of a folder, such as "runs/first", or None to write no file')
    return Path(run_dir)


def checked_belongings(tokenizer: Any, config: Any) -> dict[str, Any]:
    """Tokenizer and config, unless they cannot be one. Raises GuardUsageError.

    Only the kind is looked at: a large vocabulary is read once, by CheckpointFingerprint.
    """
    expected = "the tokenizer itself, a list of its tokens, or the path of a JSON file that holds one"
    if isinstance(tokenizer, (bool, int, float, complex, bytes, FunctionType, MethodType)):
        _refuse("tokenizer", tokenizer, expected)
    if isinstance(tokenizer, (str, os.PathLike)) and not Path(tokenizer).exists():
        raise GuardUsageError(f"tokenizer is {os.fspath(tokenizer)!r}, and there is no such file; give {expected}")
    if config is not None:
        try:
            config_dict(config)
        except GuardUsageError as error:
            raise GuardUsageError(f"config: {error}") from None
    return {"tokenizer": tokenizer, "config": config}


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Numbers and tensors of one element as floats; reads a tensor's device. Raises GuardUsageError for others."""
    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> float:
    # A string of digits would be taken by float(): it is no number all the same.
    if not isinstance(value, (str, bytes, bytearray)):
        try:
            return float(value.detach() if isinstance(value, Tensor) else value)
        except OverflowError:
            raise GuardUsageError(f"log({name}=...) cannot work: it is too large for a float (1.8e308)") from None
        except (TypeError, ValueError, RuntimeError):
            pass
    shown = f"tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
    raise GuardUsageError(
        f"log({name}={shown}) cannot work: give a number (it may be NaN) or a tensor of one element. Log a mean, or "
        f"each element by a name of its own; leave a name out while it has no value"
    )


def _refuse(name: str, given: Any, expected: str) -> NoReturn:
    raise GuardUsageError(f"{name}={given!r:.80} cannot work: give {expected}")


def checked_reads(reads: Any) -> Reads:
    """The mode of reading, if it is one. Raises GuardUsageError."""
    if reads not in ("auto", "immediate", "per_step"):
        raise GuardUsageError(f'reads is {reads!r}; it can be "auto", "immediate" or "per_step"')
    return reads  # type: ignore[no-any-return]  # checked in the line above


def weak(value: Any) -> Callable[[], Any]:
    """A weak reference where the object allows one; several schedulers come as a list of them."""
    if isinstance(value, (list, tuple)):
        parts = [weak(part) for part in value]
        return lambda: [part() for part in parts]
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
