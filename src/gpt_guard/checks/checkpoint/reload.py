"""Save a model, load it into one that is built afresh, compare the logits bit for bit, and find what was not saved."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.checkpoint.fingerprint import unwrap
from gpt_guard.checkpoint.read import Stored, take_apart
from gpt_guard.checkpoint.reporter import Reporter
from gpt_guard.checkpoint.weights import copy_weights, fit_weights
from gpt_guard.checks.runner.forward import in_form_of, logits_of, plain_device
from gpt_guard.errors import CheckpointError
from gpt_guard.hooks.isolation.compare import difference, rounding
from gpt_guard.hooks.isolation.preserve import preserved, quiet, seed_all
from gpt_guard.hooks.unregistered import kind_of, own_attributes, plain_attributes, tensors_in
from gpt_guard.records import Finding

_FILE = Path("the saved state_dict")
_NUMBERS = (bool, int, float, str, type(None))


@dataclass
class UnsavedValue:
    """One thing that differs between a model and its reload: where it is, what it is, and which cause that is."""

    name: str
    cause: str
    what: str
    module: nn.Module
    attribute: str
    value: Any
    is_buffer: bool = False

    def put(self) -> None:
        """Give the reloaded model the value that the first one has."""
        if self.is_buffer:
            self.module._buffers[self.attribute] = self.value
        else:
            vars(self.module)[self.attribute] = self.value


@dataclass
class Reload:
    """How far the logits of a model and of its reload are apart, and the finding where that is too far.

    Not `repeatable`: the model does not agree with itself. Not `rebuilt`: the function that builds it gave it back.
    """

    apart: float = 0.0
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
    before = eval_logits(model, x, seed)
    seed_all(seed + 1)
    fresh = build()
    if fresh is model or fresh is bare:
        return Reload(rebuilt=False)
    in_form_of(fresh, bare)
    outcome = Reload(names=len(state))
    try:
        load_weights(fresh, take_apart(_FILE, {"model_state_dict": state}, Reporter(None)))
    except CheckpointError as error:
        outcome.finding = error.finding
        return outcome
    compared = _Reloaded(fresh, x, seed, before)
    outcome.apart = compared.apart()
    if outcome.apart > compared.tolerance:
        # A model that does not even agree with itself is for the stage on validation to speak of.
        outcome.repeatable = _apart(before, eval_logits(model, x, seed)) <= compared.tolerance
        if outcome.repeatable:
            outcome.finding = _explain(bare, compared, outcome.apart)
    return outcome


def unsaved_in_use(model: nn.Module, x: Tensor, seed: int = 42) -> Finding | None:
    """GG720 for tensors outside of the `state_dict` on which the logits depend; for a model that cannot be built anew.

    Each is changed a little and put back.
    """
    bare = unwrap(model)
    before = eval_logits(model, x, seed)
    for name, tensors in unsaved_tensors(bare).items():
        with preserved(bare, tensors=tensors):
            with torch.no_grad():
                for tensor in tensors:
                    tensor.data = tensor.data * 1.5 + 0.5
            changed = _apart(before, eval_logits(model, x, seed))
        if changed > rounding(before):
            seen = f"the logits depend on {name}, which state_dict() does not hold: it would not be saved"
            owner, _, _ = name.rpartition(".")
            return finding("GG720", seen, likely=["list", "attribute"], module=owner, evidence={"attribute": name})
    return None


def load_weights(model: nn.Module, stored: Stored) -> None:
    """Copy a checkpoint's weights into a model, all of them. Raises CheckpointError where one does not fit."""
    reporter = Reporter(lambda found: None)
    copy_weights(model, fit_weights(model, stored, None, True, reporter), stored, True, reporter)


def eval_logits(model: nn.Module, x: Tensor, seed: int) -> Tensor:
    """The logits in eval mode, without gradient and under this seed."""
    seed_all(seed)
    with quiet(model):
        return logits_of(model, x)


@dataclass
class _Reloaded:
    """A reloaded model, and the logits of the one that it was saved from."""

    model: nn.Module
    x: Tensor
    seed: int
    before: Tensor

    def apart(self) -> float:
        """How far its logits are from those; infinity where they cannot be compared."""
        try:
            return _apart(self.before, eval_logits(self.model, self.x, self.seed))
        except Exception:  # what was not saved may even have another dtype, device or size than the rest
            return float("inf")

    @property
    def tolerance(self) -> float:
        """Weights that lie in memory in another way (views, strides) may take another kernel: rounding is no loss."""
        return rounding(self.before)


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


def _apart(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float(difference(plain_device(one), plain_device(other)).max()) if one.numel() else 0.0


def _explain(model: nn.Module, reloaded: _Reloaded, apart: float) -> Finding:
    """Which of the differing values makes the logits equal when it is put back: that one is the cause."""
    start = f"the logits differ by up to {apart:.3g} after save and load"
    mine, theirs = _persistent(model), _persistent(reloaded.model)
    changed = [name for name, value in theirs.items() if _differs(value, mine.get(name))]
    evidence: dict[str, Any] = {"largest_difference": apart, "changed_entries": changed[:20]}
    if changed:
        seen = f"{start}: {len(changed)} entries of the state are others than were saved ({', '.join(changed[:3])})"
        return finding("GG720", seen, likely=["load"], parameter=changed[0], evidence=evidence)
    candidates = unsaved_values(model, reloaded.model)
    guilty = _guilty(candidates, reloaded, apart)
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


def _guilty(candidates: list[UnsavedValue], reloaded: _Reloaded, apart: float) -> list[UnsavedValue]:
    """Those that change the logits when they are put back, as far as all together make them equal; none otherwise."""
    guilty: list[UnsavedValue] = []
    for one in candidates:
        one.put()
        now = reloaded.apart()
        if now != apart:
            guilty.append(one)
        apart = now
        if now <= reloaded.tolerance:
            return guilty
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


def unsaved_values(model: nn.Module, reloaded: nn.Module) -> list[UnsavedValue]:
    """Everything outside of the `state_dict` that differs in value, layers first, then tensors, then numbers.

    Reads the device.
    """
    found = []
    others = dict(reloaded.named_modules())
    for path, module in model.named_modules():
        if (other := others.get(path)) is not None:
            found += [*_buffers(path, module, other), *_attributes(path, module, other)]
    order = ("list", "attribute", "buffer", "number")
    return sorted(found, key=lambda one: order.index(one.cause))


def unsaved_tensors(model: nn.Module) -> dict[str, list[Tensor]]:
    """Floating-point tensors that plain attributes hold and no `state_dict` entry does, by the attribute's path."""
    saved = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[str, list[Tensor]] = {}
    for name, value, *_ in plain_attributes(model):
        if inside := [t for t in tensors_in(value) if id(t) not in saved and t.is_floating_point()]:
            found[name] = inside
    return found


def _attributes(path: str, module: nn.Module, other: nn.Module) -> Iterator[UnsavedValue]:
    theirs = vars(other)
    for attribute, value in own_attributes(module):
        name, then = _join(path, attribute), theirs.get(attribute)
        mine = list(tensors_in(value))
        if mine:
            if not _same(mine, list(tensors_in(then))):
                cause = "attribute" if isinstance(value, Tensor) else "list"
                yield UnsavedValue(name, cause, kind_of(value), other, attribute, value)
        elif isinstance(value, _NUMBERS) and isinstance(then, _NUMBERS) and value != then:
            yield UnsavedValue(name, "number", f"{value!r}, after the reload {then!r}", other, attribute, value)


def _buffers(path: str, module: nn.Module, other: nn.Module) -> Iterator[UnsavedValue]:
    for attribute in module._non_persistent_buffers_set:
        mine, theirs = module._buffers.get(attribute), other._buffers.get(attribute)
        if mine is not None and (theirs is None or not _same([mine], [theirs])):
            shape = "x".join(map(str, mine.shape)) or "scalar"
            what = f"a buffer [{shape}] with persistent=False"
            yield UnsavedValue(_join(path, attribute), "buffer", what, other, attribute, mine, is_buffer=True)


def _same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(
        one.shape == other.shape and one.dtype == other.dtype and torch.equal(plain_device(one), plain_device(other))
        for one, other in zip(mine, theirs, strict=True)
    )


def _join(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute
