"""One batch of the user's own, and what its forward and loss show of it: which tensors are ids, what is predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_guard.hooks.functions.function_calls import FunctionCall
from gpt_guard.hooks.isolation.rerun import copied
from gpt_guard.hooks.tensors import walk
from gpt_guard.records import SourceLine

_AGREE = 0.99
"""Share of valid targets that must be the next id: all but what a tokenizer's special cases change."""
_DIFFER = 0.1
"""Least share of ids that differ from the one before: in a row of one repeated id everything is shifted."""


class ShiftedTargets(NamedTuple):
    """Targets are the ids of an input moved by one along `time`; `valid`, of their shape, is where a target counts."""

    position: str
    time: int
    valid: Tensor


class Attended(NamedTuple):
    """A call of attention in the forward: the module, the line, and whether it was given a mask or a causal flag."""

    path: str
    where: SourceLine | None
    masked: bool


class Batch:
    """A copy of what the model was called with in a training forward.

    `tokens` are the integer inputs `[B, T]` by position that entered an embedding, `padding` the ids that stand for
    padding there. `reread` are those of which another stretch was looked up as well: an encoder sees all of it, and a
    decoder the part that it predicts from. `viewed` are those that were looked up with as many rows as they have
    columns, and not transposed: by mistake, or as pairs. `shift` is known once a loss has compared logits with the
    ids that follow. `grown` names what the forward has made larger in the model itself.
    """

    def __init__(self, inputs: Any, autocast: Mapping[str, tuple[bool, torch.dtype]]) -> None:
        self.inputs = copied(inputs)
        self.autocast = autocast
        self.seconds = 0.0
        self.tokens: dict[str, Tensor] = {}
        self.padding: dict[str, set[int]] = {}
        self.reread: set[str] = set()
        self.viewed: set[str] = set()
        self.shift: ShiftedTargets | None = None
        self.grown: set[str] = set()
        self.attended: list[Attended] = []
        self.open = True
        self._given = {position: tensor for position, tensor in walk(inputs) if _is_ids(tensor)}
        self._own = dict(walk(self.inputs))

    def embedded(self, call: FunctionCall) -> None:
        """An embedding looked something up: these very ids, or a cast of them."""
        ids = call.get("input")
        if not self.open or type(ids) is not Tensor:
            return
        for position, given in self._given.items():
            shared = ids.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
            if ids is given or _all_of(ids, given):
                self.tokens[position] = self._own[position]
                if ids.shape != given.shape and not torch.equal(ids, given.t()):
                    self.viewed.add(position)
                padding = call.get("padding_idx")
                if isinstance(padding, int) and padding >= 0:
                    self.padding.setdefault(position, set()).add(padding)
            elif ids.dim() == 2 and ids.shape != given.shape and shared:
                self.reread.add(position)

    def compared(self, call: FunctionCall) -> None:
        """A loss compared logits with targets."""
        logits, target = call.get("input"), call.get("target")
        if not self.open or self.shift is not None or type(target) is not Tensor or target.is_floating_point():
            return
        if type(logits) is not Tensor or logits.dim() < 2:
            return
        # Of a source and the target that is fed in, the one of the logits' own length is meant.
        own = sorted(self.tokens.items(), key=lambda item: item[1].numel() != target.numel())
        for position, ids in own:
            for time, valid in _shifted(ids, target):
                self.shift = ShiftedTargets(position, time, valid)
                return

    def finish(self) -> None:
        """The step is over: drop what belongs to the loop."""
        self.open = False
        self._given.clear()

    def fixed(self, position: str) -> set[int]:
        """Ids that are left where they are: padding, and what stands twice at an end of a row."""
        ids = self.tokens[position]
        found = set(self.padding.get(position, ()))
        if ids.size(1) > 1:
            for end, beside in ((ids[:, -1], ids[:, -2]), (ids[:, 0], ids[:, 1])):
                found |= set(end[end == beside].unique().tolist())
        return found

    def begun_by_padding(self, position: str, time: int) -> Tensor:
        """Where a row begins with padding, by its ids or by a mask beside them: bool `[B, T]`.

        A query there has no key that it may look at: attention that hides scores with a large negative number, and not
        with -inf, gives it the mean over all of them, the future included.
        """
        ids = self.tokens[position]
        fixed = torch.tensor(sorted(self.fixed(position)), device=ids.device, dtype=ids.dtype)
        padding = (torch.isin(ids, fixed) & (ids == ids.narrow(time, 0, 1))).long().cumprod(time).bool()
        for name, mask in self._own.items():
            if mask.shape != ids.shape or name in self.tokens or not bool(((mask == 0) | (mask == 1)).all()):
                continue
            # Masks are read either way round; what they hide is padding where it is one and the same id.
            for hidden in (0, 1):
                begun = (mask == hidden).to(ids.device).long().cumprod(time).bool()
                if ids[begun].unique().numel() == 1:
                    padding |= begun
        return padding if time == 1 else padding.t()

    def other(self, position: str, where: Tensor, seed: int) -> Tensor | None:
        """The ids with others in the places `where`, each one that the batch has; None where it has too few."""
        ids, fixed = self.tokens[position], self.fixed(position)
        known = ids.unique()
        if fixed:
            held = torch.tensor(sorted(fixed), device=ids.device, dtype=ids.dtype)
            known = known[~torch.isin(known, held)]
            where = where & ~torch.isin(ids, held)
        if known.numel() < 2 or not bool(where.any()):
            return None
        generator = torch.Generator().manual_seed(seed)
        step = torch.randint(1, known.numel(), tuple(ids.shape), generator=generator).to(ids.device)
        place = torch.searchsorted(known, ids.contiguous()).clamp(max=known.numel() - 1)
        return torch.where(where, known[(place + step) % known.numel()], ids)


def _all_of(ids: Tensor, given: Tensor) -> bool:
    """Whether these are the given ids, or those with time in front: transposed, or reshaped like that by mistake."""
    if ids.shape == given.shape and bool((ids == given).all()):
        return True
    turned = (given.t(), given.reshape(ids.shape)) if ids.shape == given.shape[::-1] else ()
    return any(bool((ids == each).all()) for each in turned)


def _is_ids(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.dim() == 2 and tensor.dtype is not torch.bool
    return plain and not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() > 1


def _shifted(ids: Tensor, target: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Dimensions along which the targets are the ids that follow, and where they are valid: bool, shape of the ids."""
    for time in (1, 0):
        length = ids.size(time)
        following, here = ids.narrow(time, 1, length - 1), ids.narrow(time, 0, length - 1)
        if target.numel() == ids.numel():
            wanted = target.reshape(ids.shape).narrow(time, 0, length - 1)
        elif target.numel() == here.numel():
            wanted = target.reshape(here.shape)
        else:
            continue
        valid = wanted >= 0
        count = int(valid.sum())
        if not count:
            continue
        agree = int((valid & (wanted == following)).sum()) / count
        differ = int((valid & (following != here)).sum()) / count
        if agree >= _AGREE and differ >= _DIFFER:
            whole = torch.zeros_like(ids, dtype=torch.bool)
            whole.narrow(time, 0, length - 1).copy_(valid)
            yield time, whole
