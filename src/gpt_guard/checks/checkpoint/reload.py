"""Save a model, load it into one that is built afresh, and compare the logits bit for bit."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checkpoint.read import take_apart
from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.checkpoint.weights import copy_weights, fit_weights
from gpt_guard.checks.checkpoint.lost import Lost, lost, unsaved
from gpt_guard.checks.runner.forms import in_form_of, logits_of, plain_device
from gpt_guard.errors import CheckpointError
from gpt_guard.hooks.isolation.eval_no_grad import quiet
from gpt_guard.hooks.isolation.preserve import preserved
from gpt_guard.hooks.isolation.random_state import seed_all
from gpt_guard.hooks.isolation.tolerance import difference, rounding
from gpt_guard.records import Finding

_FILE = Path("the saved state_dict")


@dataclass
class Reload:
    """How far the logits of a model and of its reload are apart, and the finding where that is too far.

    Not `repeatable`: the model does not agree with itself. Not `rebuilt`: the function that builds it gave it back.
    """

    apart: float = 0.0
    tolerance: float = 0.0
    names: int = 0
    finding: Finding | None = None
    repeatable: bool = True
    rebuilt: bool = True


def reload(model: nn.Module, build: Callable[[], nn.Module], x: Tensor, seed: int = 42) -> Reload:
    """Save, build, load and compare on ids `x` `[B, T]`, in eval mode and without gradient.

    The state goes through the bytes that `torch.save` writes, and is read with `weights_only=True`. The new model is
    built under another seed, so that what is not saved cannot come out equal by chance. Costs two more copies of the
    weights. Changes the mode of no module; draws random numbers.
    """
    bare = unwrap(model)
    state = _through_bytes(bare)
    if isinstance(state, Finding):
        return Reload(finding=state)
    before = _logits(model, x, seed)
    seed_all(seed + 1)
    fresh = build()
    if fresh is model or fresh is bare:
        return Reload(rebuilt=False)
    in_form_of(fresh, bare)
    try:
        stored = take_apart(_FILE, {"model_state_dict": state}, Reporter(None))
        voice = Reporter(lambda found: None)
        copy_weights(fresh, fit_weights(fresh, stored, None, True, voice), stored, True, voice)
    except CheckpointError as error:
        return Reload(finding=error.finding, names=len(state))
    outcome = _compare(before, _reloaded_logits(fresh, x, seed), len(state))
    if outcome.apart <= outcome.tolerance:
        return outcome
    again = _compare(before, _logits(model, x, seed), len(state))
    if again.apart > again.tolerance:
        # The model does not even agree with itself: that is for the stage on validation to say.
        outcome.repeatable = False
        return outcome
    outcome.finding = _explain(bare, fresh, x, seed, before, outcome.apart)
    return outcome


def unsaved_in_use(model: nn.Module, x: Tensor, seed: int = 42) -> Finding | None:
    """GG720 for tensors outside of the `state_dict` on which the logits depend; for a model that cannot be built anew.

    Each is changed a little and put back.
    """
    bare = unwrap(model)
    before = _logits(model, x, seed)
    for name, tensors in unsaved(bare).items():
        with preserved(bare, tensors=tensors):
            with torch.no_grad():
                for tensor in tensors:
                    tensor.data = tensor.data * 1.5 + 0.5
            changed = _compare(before, _logits(model, x, seed), 0)
        if changed.apart > changed.tolerance:
            seen = f"the logits depend on {name}, which state_dict() does not hold: it would not be saved"
            owner, _, _ = name.rpartition(".")
            return finding("GG720", seen, likely=["list", "attribute"], module=owner, evidence={"attribute": name})
    return None


def _through_bytes(model: nn.Module) -> dict[str, Any] | Finding:
    stream = io.BytesIO()
    try:
        torch.save(model.state_dict(), stream)
        stream.seek(0)
        loaded = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # extra state of a module may be anything, and pickle raises anything
        words = " ".join(str(error).split())[:200]
        seen = (
            f"state_dict() of {type(model).__name__} cannot be saved and read as data: {type(error).__name__}: {words}"
        )
        return finding("GG720", seen, likely=["state"], evidence={"exception": type(error).__name__})
    if not isinstance(loaded, dict):
        return finding("GG720", f"state_dict() gives a {type(loaded).__name__}, not a dict", likely=["state"])
    return loaded


def _logits(model: nn.Module, x: Tensor, seed: int) -> Tensor:
    seed_all(seed)
    with quiet(model):
        return logits_of(model, x)


def _reloaded_logits(fresh: nn.Module, x: Tensor, seed: int) -> Tensor | None:
    try:
        return _logits(fresh, x, seed)
    except Exception:  # what was not saved may even have another dtype, device or size than the rest
        return None


def _compare(one: Tensor, other: Tensor | None, names: int) -> Reload:
    if other is None or one.shape != other.shape:
        return Reload(apart=float("inf"), names=names)
    apart = difference(plain_device(one), plain_device(other))
    # Weights that lie in memory in another way (views, strides) may take another kernel: rounding is no loss.
    return Reload(float(apart.max()) if apart.numel() else 0.0, rounding(one), names)


def _explain(model: nn.Module, fresh: nn.Module, x: Tensor, seed: int, before: Tensor, apart: float) -> Finding:
    """Which of the differing values makes the logits equal when it is put back: that one is the cause."""
    start = f"the logits differ by up to {apart:.3g} after save and load"
    mine, theirs = _persistent(model), _persistent(fresh)
    changed = [name for name, value in theirs.items() if _differs(value, mine.get(name))]
    evidence: dict[str, Any] = {"largest_difference": apart, "changed_entries": changed[:20]}
    if changed:
        seen = f"{start}: {len(changed)} entries of the state are others than were saved ({', '.join(changed[:3])})"
        return finding("GG720", seen, likely=["load"], parameter=changed[0], evidence=evidence)
    candidates = lost(model, fresh)
    guilty = _guilty(candidates, fresh, x, seed, before, apart)
    evidence["not_saved"] = [one.name for one in candidates][:20]
    if not guilty:
        seen = f"{start}, and every value that was found beside the state_dict is the same"
        return finding("GG720", seen, likely=["elsewhere"], evidence=evidence)
    named = "; ".join(f"{one.name} ({one.what})" for one in guilty[:3])
    more = f" and {len(guilty) - 3} more" if len(guilty) > 3 else ""
    seen = f"{start}; with {named}{more} put back they are the same: state_dict() does not hold it"
    likely = list(dict.fromkeys(one.cause for one in guilty))
    owner = guilty[0].name.rpartition(".")[0]
    return finding("GG720", seen, likely=likely, module=owner, evidence=evidence)


def _guilty(candidates: list[Lost], fresh: nn.Module, x: Tensor, seed: int, before: Tensor, apart: float) -> list[Lost]:
    put: list[Lost] = []
    for one in candidates:
        one.put()
        now = _compare(before, _reloaded_logits(fresh, x, seed), 0)
        if now.apart != apart:
            put.append(one)
        apart = now.apart
        if now.apart <= now.tolerance:
            return put
    return []


def _persistent(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that belong into the state, read past a `state_dict` that may be overridden."""
    left_out = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    buffers = {name: value for name, value in model.named_buffers() if name not in left_out}
    return {**dict(model.named_parameters()), **buffers}


def _differs(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return one.shape != other.shape or not torch.equal(plain_device(one), plain_device(other).to(one.dtype))
