"""What a loss asks of the logits, read off its gradient: where it counts, and which score it pulls up there.

A loss of any kind can be asked this, also one whose value is no known function of logits and targets.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.checks.runner.base import LossFunction
from gpt_guard.checks.runner.forward import call
from gpt_guard.records import Finding, Severity

MOSTLY = 0.9
"""Share of the positions of which something must hold: two of few targets may be equal by chance."""
_NOTHING = 1e-6
"""Below this share of the largest gradient a score is not asked for."""


class Pull(NamedTuple):
    """For targets `[B, T]`: what is pulled up and what is pushed down most, where anything is, and only the target.

    `rises` and `falls` are ids `[B, T]`, `counts` and `alone` booleans `[B, T]`: `alone` where no other score moves.
    """

    targets: Tensor
    rises: Tensor
    falls: Tensor
    counts: Tensor
    alone: Tensor

    def share(self, ids: Tensor) -> float:
        """The largest share of the positions that count at which `ids` are the targets, or those one place later."""
        here = (ids == self.targets)[self.counts]
        later = (ids[:, :-1] == self.targets[:, 1:])[self.counts[:, :-1]]
        return max(float(part.float().mean()) if part.numel() else 0.0 for part in (here, later))


def pull(model: nn.Module, x: Tensor, y: Tensor, loss_fn: LossFunction | None) -> Pull | None:
    """Ask with ids and targets `[B, T]`, all of which count; None where the loss does not depend on these logits.

    One forward and one backward to the logits; parameters keep their gradients.
    """
    with torch.enable_grad():
        if loss_fn is None:
            output = call(model, x, y)
            logits, loss = output.logits, output.loss
        else:
            logits = call(model, x).logits
            logits = logits if logits.requires_grad else logits.detach().requires_grad_()
            loss = loss_fn(logits, y)
        if loss is None or not loss.requires_grad or not logits.requires_grad or logits.shape[:2] != y.shape:
            return None
        (grad,) = torch.autograd.grad(loss.mean(), [logits], allow_unused=True)
    if grad is None or not bool(grad.isfinite().all()) or not bool(grad.any()):
        return None
    size = grad.abs().amax(-1)
    asked = grad.abs() > _NOTHING * size.max()
    return Pull(y, grad.argmin(-1), grad.argmax(-1), size > _NOTHING * size.max(), asked.sum(-1) == 1)


def judge_pull(found: Pull) -> Finding | None:
    """The fault that a pull shows; None where it pulls up the targets, or does what nobody can judge from outside."""
    counts = int(found.counts.sum())
    up, down = found.share(found.rises), found.share(found.falls)
    if down >= MOSTLY and up < MOSTLY:
        seen = f"The loss falls when the score of the target falls, at {down:.0%} of {counts} positions."
        return finding("GG656", seen, shown=["negated"], severity=Severity.ERROR)
    if up >= MOSTLY:
        if bool(found.alone[found.counts].all()):
            seen = "The loss asks the target's score to grow and no other to shrink: nothing bounds it from below."
            return finding("GG656", seen, shown=["unnormalised"], severity=Severity.ERROR)
        return _left_out_positions(found)
    of_all = found.rises[found.counts].sort().values, found.targets[found.counts].sort().values
    if float((of_all[0] == of_all[1]).float().mean()) >= MOSTLY:
        row, position = (int(each) for each in (found.counts & (found.rises != found.targets)).nonzero()[0])
        seen = (
            f"At {1 - up:.0%} of {counts} positions the loss pulls up another score than that of the target; all "
            f"together they are the same ids in another order. Row {row}, position {position}: the target is "
            f"{int(found.targets[row, position])}, {int(found.rises[row, position])} is pulled up."
        )
        return finding("GG654", seen, likely=["permuted"])
    return None


def _left_out_positions(found: Pull) -> Finding | None:
    counted = found.counts.clone()
    counted[:, -1] = True  # a loss that shifts inside has no target for it
    missing = ~counted
    if found.counts.size(1) < 3 or not bool(missing.any()):
        return None
    columns = [place for place in range(counted.size(1)) if bool(missing[:, place].all())]
    rows = [row for row in range(counted.size(0)) if bool(missing[row, :-1].all())]
    if not columns and not rows:
        return None
    where = f"positions {_ends(columns)} of every row" if columns else f"rows {_ends(rows)}"
    seen = f"The loss does not depend on the logits at {where}, for targets that all count."
    return finding("GG656", seen, shown=["some_positions"], severity=Severity.ERROR)


def _ends(places: list[int]) -> str:
    return str(places[0]) if len(places) == 1 else f"{places[0]} to {places[-1]}"
