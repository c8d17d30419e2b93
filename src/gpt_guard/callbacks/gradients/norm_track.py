"""What GradNormMonitor remembers of one optimizer: usual norms, losses, clipping, steps with nothing to apply."""

from __future__ import annotations

from collections import deque
from typing import Any

from gpt_guard.callbacks.gradients.clipping import Clipping
from gpt_guard.callbacks.gradients.history import RobustHistory, quantile
from gpt_guard.callbacks.gradients.scaling import Scaling
from gpt_guard.records import Observation

_REFERENCE = 20
_RECENT = 10
_GONE = 0.05
_LOSS_JUMP = 3.0
_CLIMBING = 2.0


class NormTrack:
    """Bounded memory for one optimizer; `zeros` and `empty` count steps in a row, `backwards` calls seen before."""

    def __init__(self, history: RobustHistory, clipping: Clipping, *, longest_streak: int) -> None:
        self.history = history
        self.clipping = clipping
        self.losses: deque[float | None] = deque(maxlen=_REFERENCE + longest_streak)
        self.first_loss: float | None = None
        self.zeros = 0
        self.empty = 0
        self.backwards = 0
        self.clipped_away = False
        self.factor = 1.0
        self.scaling = Scaling()

    @property
    def trained(self) -> bool:
        """Whether there was a loss other than 0 that had a gradient."""
        return bool(self.first_loss) or any(self.losses)

    def sudden(self, factor: float) -> bool:
        """Whether norm and loss jumped in this one step, out of a calm level; `factor` is that of the norm now.

        Too large a learning rate makes both climb from step to step; one odd batch does not announce itself.
        """
        before, self.factor = self.factor, factor
        known = [loss for loss in list(self.losses)[-_RECENT:] if loss is not None]
        if before >= _CLIMBING or len(known) < _RECENT or known[-2] > _CLIMBING * quantile(known[:-1], 0.5):
            return False
        return known[-1] > _LOSS_JUMP * max(known[:-1]) > 0.0

    def take_loss(self, loss: float | None) -> None:
        """Note the loss of a step whose norm is finite."""
        self.losses.append(loss)
        if self.first_loss is None:
            self.first_loss = loss

    def memorised(self, loss: float | None) -> bool:
        """Whether the loss is nearly gone against the first one: norms are tiny and jumpy there, and do no harm."""
        return loss is not None and self.first_loss is not None and 0.0 <= loss < _GONE * self.first_loss

    def count_nothing(self, seen: Observation) -> None:
        """Note a step that has nothing to apply: a gradient of exact zeros, or none."""
        if seen.grad_norm == 0.0:
            self.zeros, self.empty = self.zeros + 1, 0
        else:
            self.zeros, self.empty = 0, self.empty + 1

    def loss_before(self, streak: int) -> float | None:
        """The last loss before the last `streak` steps."""
        return self.losses[-streak - 1] if len(self.losses) > streak else None

    def loss_stalled(self, streak: int) -> bool:
        """Whether the loss of the last steps is no better than before them; False where losses are not known.

        A run that has converged has its lowest losses now. One whose gradient was lost does not: its loss jumps to a
        worse level, or varies from batch to batch as it did before.
        """
        known = [loss for loss in self.losses if loss is not None]
        if len(known) < len(self.losses) or len(known) < streak + _REFERENCE:
            return False
        before = known[-streak - _REFERENCE : -streak]
        return quantile(known[-min(streak, _RECENT) :], 0.5) > quantile(before, 0.25)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists."""
        return {
            "history": self.history.state_dict(),
            "clipping": self.clipping.state_dict(),
            "losses": list(self.losses),
            "first_loss": self.first_loss,
            "zeros": self.zeros,
            "empty": self.empty,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.history.load_state_dict(state["history"])
        self.clipping.load_state_dict(state["clipping"])
        self.losses.clear()
        self.losses.extend(state["losses"])
        self.first_loss = state["first_loss"]
        self.zeros, self.empty = int(state["zeros"]), int(state["empty"])
