"""Settings in a parameter group that the optimizer never reads: another name for one that it has."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from gpt_guard.catalogue import finding
from gpt_guard.records import Finding, Moment

# What other libraries, papers and hands in a hurry call them.
_ALIASES = {
    "learning_rate": "lr",
    "learningrate": "lr",
    "lrate": "lr",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "l2": "weight_decay",
    "beta": "betas",
    "beta1": "betas",
    "epsilon": "eps",
    "mom": "momentum",
}
# A letter or two of a name mistyped; difflib's own default of 0.6 takes `max_lr` and the like for slips.
_CLOSE = 0.85


class UnknownKeys:
    """Looks at the keys of an optimizer's groups once, and again whenever one was added.

    torch keeps any key that a group is given, and reads those it knows. Only torch's own optimizers are judged: what
    another one reads, its class decides. In a step it costs one length for each group.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._told: set[tuple[int, str]] = set()

    def judge(self, optimizer: Optimizer, index: int, step: int) -> Iterator[Finding]:
        """GG413 for each such key, once."""
        groups = optimizer.param_groups
        size = sum(map(len, groups))
        if self._sizes.get(index) == size:
            return
        self._sizes[index] = size
        if not type(optimizer).__module__.startswith("torch.optim."):
            return
        for place, group in enumerate(groups):
            for key in group:
                meant = _meant(key, optimizer.defaults)
                if meant is not None and (index, key) not in self._told:
                    self._told.add((index, key))
                    yield _finding(optimizer, index, place, key, meant, group, step)


def _meant(key: str, known: Mapping[str, Any]) -> str | None:
    """The setting that a key seems to stand for; None for one that is known, or like none."""
    if key in known or key in ("params", "param_names"):
        return None
    folded = key.lower().replace("-", "_")
    alias = folded if folded in known else _ALIASES.get(folded)
    if alias in known:
        return alias
    return next(iter(difflib.get_close_matches(folded, [each for each in known if len(each) > 3], 1, _CLOSE)), None)


def _finding(
    optimizer: Optimizer, index: int, place: int, key: str, meant: str, group: Mapping[str, Any], step: int
) -> Finding:
    kind = type(optimizer).__name__
    return finding(
        "GG413",
        f"Group {place} of {kind} has `{key}` = {group[key]!s:.40}, which {kind} does not read; its `{meant}` is "
        f"{group.get(meant)!s:.40}.",
        step=step,
        moment=Moment.BEFORE_STEP,
        evidence={"key": key, "meant": meant, "group": place},
        cause_id=f"optimizer {index} {key}",
    )
