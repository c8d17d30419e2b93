"""Write a checkpoint: whole or not at all, finite, stamped with what it belongs to, readable as plain data."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.checkpoint.belongs import model_config
from gpt_guard.checkpoint.fingerprint import (
    Fingerprint,
    config_digest,
    state_digest,
    token_list,
    tokenizer_digest,
    unwrap,
    weights_digest,
)
from gpt_guard.checkpoint.optimizer_state import parameter_names
from gpt_guard.checkpoint.read import unsafe_globals
from gpt_guard.checkpoint.reporter import OnFinding, Reporter, checked_path
from gpt_guard.checkpoint.weights import leaves, listing, non_finite
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.optimizer import unwrap as plain_optimizers
from gpt_guard.records.atomic import replacing

MAX_STORED_TOKENS = 65_536
"""A vocabulary up to this size is stored beside its digest, so that a mismatch can be shown token by token."""


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int | None = None,
    tokenizer: Any = None,
    config: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Mapping[str, Any] | None = None,
    guard_state: Mapping[str, Any] | None = None,
    fingerprint: Fingerprint | None = None,
    digests: bool = True,
    on_finding: OnFinding | None = None,
) -> Path:
    """Save a run so that `load_checkpoint` can tell what it belongs to, and plain `torch.load(path)` can read it.

    Entries: `model_state_dict`, `optimizer_state_dict` (a list where there are several), `scheduler_state_dict`,
    `scaler_state_dict`, `step`, `config` (a plain dict; the model's own `.config` if none is given),
    `tokenizer_fingerprint` (hex), `tokenizer_chars`, `fingerprint` (digests by part), `gpt_guard` (`guard_state`) and
    those of `extra`. `fingerprint` adds parts such as data files and texts. `digests=False` leaves out the digests of
    weights and optimizer state, which read every byte once more. Names are those of the model without its wrappers;
    all tensors are copied to the CPU, so that a machine without this accelerator can load them.

    The file replaces `path` in one move once it is complete, so that a crash, a full disk or a refusal leaves the old
    checkpoint as it was. Weights that are not finite are refused (GG706; -inf alone in a buffer is a mask, and state
    of the optimizer that is not finite is a warning). Raises CheckpointError for these, GuardUsageError for values
    that could not be loaded again, OSError from the file system.
    """
    reporter = Reporter(on_finding)
    path = checked_path("save_checkpoint", path, model)
    if path.is_dir():
        raise GuardUsageError(f"{path} is a folder; give the name of a file in it, such as {path / 'step_1000.pt'}")
    optimizers = plain_optimizers(optimizer)
    bare = unwrap(model)
    memo: dict[Any, Tensor] = {}
    weights = _on_cpu(bare.state_dict(), memo)
    _refuse_non_finite(bare, weights, path, reporter)
    states = [_on_cpu(one.state_dict(), memo) for one in optimizers]
    _warn_of_optimizer(states, path, reporter)
    settings = model_config(bare, config)
    parts = dict(fingerprint.parts) if fingerprint is not None else {}
    payload: dict[str, Any] = {"model_state_dict": weights, "step": step, "config": settings}
    if tokenizer is not None:
        parts["tokenizer"] = tokenizer_digest(tokenizer)
        payload |= _tokens(tokenizer)
    payload["tokenizer_fingerprint"] = parts.get("tokenizer")
    if settings is not None:
        parts["config"] = config_digest(settings)
    if digests:
        parts |= {"weights": weights_digest(weights)} | ({"optimizer": state_digest(states)} if states else {})
    if states:
        payload["optimizer_state_dict"] = states[0] if len(states) == 1 else states
        payload["optimizer_parameters"] = parameter_names(bare, optimizers)
    for name, part in (("scheduler", scheduler), ("scaler", scaler)):
        if part is not None:
            several = isinstance(part, (list, tuple))
            saved = [one.state_dict() for one in part] if several else part.state_dict()
            payload[f"{name}_state_dict"] = _on_cpu(saved, memo)
    payload |= {"fingerprint": parts, "gpt_guard": dict(guard_state or {})}
    _write(path, payload | _extra(extra, payload))
    return path


def _on_cpu(state: Any, memo: dict[Any, Tensor]) -> Any:
    """Copy what lies elsewhere to the CPU; tied tensors stay one, and on the CPU nothing is copied at all."""
    if isinstance(state, Tensor):
        if state.device.type == "cpu" or state.is_meta:
            return state
        if state.layout is not torch.strided:
            return state.cpu()
        key = (state.untyped_storage().data_ptr(), state.storage_offset(), state.shape, state.stride(), state.dtype)
        if key not in memo:
            memo[key] = state.cpu()
        return memo[key]
    if isinstance(state, OrderedDict):
        moved = OrderedDict((key, _on_cpu(value, memo)) for key, value in state.items())
        vars(moved).update(vars(state))  # `_metadata`: the versions by which modules read old checkpoints
        return moved
    if isinstance(state, dict):
        return {key: _on_cpu(value, memo) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_on_cpu(value, memo) for value in state)
    return state


def _refuse_non_finite(model: nn.Module, weights: Mapping[str, Any], path: Path, reporter: Reporter) -> None:
    buffers = frozenset(name for name, _ in model.named_buffers())
    bad = non_finite(weights, masks=buffers)
    if not bad:
        return
    cause = "buffer" if buffers.issuperset(bad) else "one" if len(bad) == 1 else "update"
    kept = f"; {path} is left as it was" if path.exists() else ""
    reporter.refuse(
        "GG706",
        f"not saved to {path}: {len(bad)} of {len(weights)} tensors are not finite: {listing(bad)}{kept}",
        likely=[cause],
        parameter=next(iter(bad)),
        module=next(iter(bad)).rpartition(".")[0],
        evidence={"non_finite": {name: count.model_dump() for name, count in bad.items()}},
    )


def _warn_of_optimizer(states: list[Any], path: Path, reporter: Reporter) -> None:
    if bad := non_finite(dict(leaves([state.get("state") for state in states]))):
        seen = f"saved to {path}, but {len(bad)} tensors of the optimizer state are not finite: {listing(bad)}"
        reporter.say("GG706", seen, likely=["optimizer"], severity="warning", cause_id="optimizer")


def _tokens(tokenizer: Any) -> dict[str, Any]:
    tokens = token_list(tokenizer)
    return {"tokenizer_chars": tokens} if tokens is not None and len(tokens) <= MAX_STORED_TOKENS else {}


def _extra(extra: Mapping[str, Any] | None, payload: Mapping[str, Any]) -> dict[str, Any]:
    added = dict(extra or {})
    if taken := sorted(added.keys() & payload.keys()):
        raise GuardUsageError(f"extra={{{taken[0]!r}: ...}} would replace an entry of the checkpoint; use another name")
    return added


def _write(path: Path, payload: dict[str, Any]) -> None:
    try:
        with replacing(path) as stream:
            torch.save(payload, stream)
            stream.flush()
            # Only the pickle's opcodes are scanned: cheap beside writing, and surer than a list of types kept here.
            if needs := unsafe_globals(Path(stream.name)):
                where = next(_holders(payload, needs), "a value")
                raise GuardUsageError(
                    f"{where} is a {needs[0]}, which plain torch.load would refuse to read. Save plain values: "
                    "float(x) for a NumPy scalar, str(path), vars(config) or dataclasses.asdict(config)"
                )
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        error.add_note(f"gpt_guard: {path} was not written" + (", the old one is intact" if path.exists() else ""))
        raise


def _holders(value: Any, needs: list[str], path: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _holders(item, needs, f"{path}[{key!r}]" if path else f"{key}")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _holders(item, needs, f"{path}[{index}]")
    kind = value if callable(value) and hasattr(value, "__qualname__") else type(value)
    # A NumPy scalar is pickled by a function of its package; its own name is not among those that are needed.
    packages = {name.partition(".")[0] for name in needs} - {"builtins", "torch"}
    if f"{kind.__module__}.{kind.__qualname__}" in needs or kind.__module__.partition(".")[0] in packages:
        yield path
