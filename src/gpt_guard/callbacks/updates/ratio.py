"""How far one step moves the weights, relative to their size, and how much of that is weight decay alone."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch.optim import Optimizer

from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, Observation, Severity
from gpt_guard.records.render import learning_rate, learning_rates, number

_RECENT = 3
# A handful of weights passes through zero as a whole, and then any step is large in relation.
_FEW = 64
# Adam at lr 1e-2 on weights of std 0.02 takes such steps and learns; the loss tells it from lr 0.1, which climbs.
_SUSPECT = 0.25
_RISEN = 1.1
# nanoGPT at 100 times its learning rate: ratios of 0.5 to 0.7, and a loss that stays where it is.
_STANDING = 0.4
_STANDING_STEPS = 20
_FALLS = 0.95
_CLIPPED_HARD = 100.0
# Decay multiplies a weight by 1 - lr * weight_decay in each step (I. Loshchilov and F. Hutter, "Decoupled weight decay
# regularization", 2019). At a tenth half of it is gone after 7 steps; usual values are 1e-3 and below.
_LARGE_DECAY = 0.1
_ALL = 1.0


class RatioBounds(NamedTuple):
    """Ratios above `high` and below `low` are unusual, the latter over `window` steps."""

    high: float
    low: float
    window: int


class RatioWatch:
    """Two bounds on the ratio over all matrices of one optimizer; each is reported once.

    Too high is the geometric mean of three steps: one large step is common, three in a row replace the weights. A
    quarter of that bound is enough where the loss has risen by a tenth over the first one as well, and less than half
    of it over 20 steps in which the loss stands still. Too low is a median over `window` steps at the peak of the
    learning rate, and only if no step was ever much above it: a run that has converged also takes tiny steps.
    """

    def __init__(self, bounds: RatioBounds) -> None:
        self._high, self._low, window = bounds
        self._window: deque[float] = deque(maxlen=int(window))
        self._lr: deque[float] = deque(maxlen=int(window))
        self._lr_peak = 0.0
        self._largest = 0.0
        self._first_loss: float | None = None
        self._losses: deque[float] = deque(maxlen=_STANDING_STEPS)
        self.reported: set[str] = set()

    def judge(self, seen: Observation, weights: int, explained: Callable[[], bool]) -> Iterable[Finding]:
        """Take in one step's ratio over so many weights, and give what is out of bounds and not `explained` yet."""
        ratio = seen.update_ratio
        if ratio is None or ratio - ratio != 0.0 or not seen.lr or not seen.grad_norm:
            return ()
        lr = max(seen.lr)
        if self._first_loss is None:
            self._first_loss = seen.loss
        if seen.loss is not None:
            self._losses.append(seen.loss)
        self._window.append(ratio)
        self._lr.append(lr)
        if lr > self._lr_peak:
            self._lr_peak = lr
        if ratio > self._largest:
            self._largest = ratio
        if self._largest > self._high * _SUSPECT and weights >= _FEW:
            return self._judge_high(seen)
        if not ratio < self._low or not lr > 0.0 or _cut_down(seen) or "GG309" in self.reported or explained():
            return ()
        return self._judge_low(seen, lr)

    def _judge_high(self, seen: Observation) -> Iterable[Finding]:
        if "GG308" in self.reported or len(self._window) < _RECENT:
            return
        recent = list(self._window)[-_RECENT:]
        mean = math.prod(recent) ** (1 / _RECENT)
        risen = seen.loss is not None and self._first_loss is not None and seen.loss > _RISEN * self._first_loss > 0.0
        over = mean > self._high
        if not over and not risen:
            yield from self._judge_standing(seen)
        elif over or (risen and mean > self._high * _SUSPECT):
            self.reported.add("GG308")
            bound = self._high if over else self._high * _SUSPECT
            loss = f"the loss rose from {self._first_loss:.4g} to {seen.loss:.4g}"
            judged = f"bound {bound:.3g}" if over else f"bound {bound:.3g} where the loss has risen by a tenth"
            yield finding(
                "GG308",
                f"The last {_RECENT} steps changed the weight matrices by {', '.join(f'{r:.3g}' for r in recent)} "
                f"times their own norm (geometric mean {mean:.3g}, {judged}) at lr {learning_rates(seen.lr)}"
                + (f", and {loss}." if risen else "."),
                **({} if over else {"title": "Steps change a large part of the weights while the loss rises"}),
                step=seen.step,
                moment=seen.moment,
                evidence={"ratio": mean, "bound": bound, "lr": list(seen.lr), "loss": seen.loss},
            )

    def _judge_standing(self, seen: Observation) -> Iterator[Finding]:
        """GG308 for steps that are a large part of the weights as long as the loss does not fall."""
        ratios, losses = list(self._window)[-_STANDING_STEPS:], list(self._losses)
        if len(ratios) < _STANDING_STEPS or len(losses) < _STANDING_STEPS or not min(ratios) > 0.0:
            return
        mean, bound = math.prod(ratios) ** (1 / len(ratios)), self._high * _STANDING
        half = _STANDING_STEPS // 2
        before, after = statistics.median(losses[:half]), statistics.median(losses[half:])
        if mean > bound and after > _FALLS * before > 0.0:
            self.reported.add("GG308")
            yield finding(
                "GG308",
                f"The last {len(ratios)} steps changed the weight matrices by {mean:.3g} times their own norm "
                f"(geometric mean, bound {bound:.3g} where the loss stands still) at lr {learning_rates(seen.lr)}, and "
                f"the loss went from {number(before)} to {number(after)} (medians of {half} steps).",
                title="Steps change a large part of the weights while the loss stands still",
                step=seen.step,
                moment=seen.moment,
                evidence={"ratio": mean, "bound": bound, "lr": list(seen.lr), "loss": seen.loss},
            )

    def _judge_low(self, seen: Observation, lr: float) -> Iterable[Finding]:
        full = len(self._window) == self._window.maxlen
        at_peak = lr >= self._lr_peak and lr <= self._lr[0] * (1 + 1e-6)
        if not full or not at_peak or self._largest > 10 * self._low:
            return
        median = statistics.median(self._window)
        if median < self._low:
            self.reported.add("GG309")
            yield finding(
                "GG309",
                f"Over the last {len(self._window)} steps the median update was {median:.2g} times the norm of the "
                f"weight matrices (bound {self._low:.2g}), at the highest learning rate so far, "
                f"{learning_rates(seen.lr)}.",
                step=seen.step,
                moment=seen.moment,
                evidence={"ratio": median, "bound": self._low, "lr": list(seen.lr)},
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {
            "window": list(self._window),
            "lr": list(self._lr),
            "lr_peak": self._lr_peak,
            "largest": self._largest,
            "first_loss": self._first_loss,
            "losses": list(self._losses),
            "said": sorted(self.reported),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._window.extend(state["window"])
        self._lr.extend(state["lr"])
        self._lr_peak, self._largest = float(state["lr_peak"]), float(state["largest"])
        self._first_loss = state["first_loss"]
        self._losses.extend(state.get("losses", ()))
        self.reported = set(state["said"])


def _cut_down(seen: Observation) -> bool:
    """Whether the gradients overflow, or clipping takes nearly all of them: then those are what to speak of."""
    before, after = seen.grad_norm, seen.grad_norm_clipped
    if before is None or not math.isfinite(before):
        return True
    return bool(seen.clipped) and after is not None and after < before / _CLIPPED_HARD


class DecayWatch:
    """Looks at lr times weight decay of each group whenever the learning rate is higher than ever before.

    `reported` holds what was told already, and is added to.
    """

    def __init__(self, reported: set[str]) -> None:
        self._reported = reported
        self._highest: dict[int, float] = {}

    def judge(self, seen: Observation, optimizer: Optimizer) -> Iterator[Finding]:
        """GG312 for the group with the largest product; floats only."""
        highest = max(seen.lr, default=0.0)
        if not highest > self._highest.get(seen.optimizer, 0.0):
            return
        self._highest[seen.optimizer] = highest
        if "GG312" in self._reported:
            return
        products = [
            (lr * group["weight_decay"], place, lr, group)
            for place, (lr, group) in enumerate(zip(seen.lr, optimizer.param_groups, strict=False))
            if _multiplies(optimizer, group)
        ]
        product, place, lr, group = max(products, default=(0.0, 0, 0.0, {}), key=lambda each: each[0])
        if product >= _LARGE_DECAY:
            self._reported.add("GG312")
            yield finding(
                "GG312",
                f"{type(optimizer).__name__} multiplies {len(group['params'])} parameters by 1 - lr * weight_decay = "
                f"{number(1.0 - product)} in each step (lr {learning_rate(lr)}, weight_decay "
                f"{number(float(group['weight_decay']))}, parameter group {place}).",
                severity=Severity.ERROR if product >= _ALL else Severity.WARNING,
                step=seen.step,
                moment=seen.moment,
                evidence={"product": product, "lr": lr, "weight_decay": group["weight_decay"], "group": place},
            )


def _multiplies(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether this group's decay acts on the weights themselves and not through Adam's normalised gradient."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    acts = "SGD" in names or group.get("decoupled_weight_decay") or any(name.startswith("AdamW") for name in names)
    known = isinstance(group.get("weight_decay"), (int, float))
    return bool(acts and known and any(tensor.requires_grad for tensor in group["params"]))
