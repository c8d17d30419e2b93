"""What EvalModeAssert says of modules that are in eval mode while their model trains."""

from __future__ import annotations

from collections.abc import Sequence

from gpt_guard.callbacks.modes.eval_words import Who, call, trained_in_eval
from gpt_guard.callbacks.modes.mode_sensitive import Sensitive
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Finding


def off_in_training(
    watch: Watch, step: int, off: Sequence[Sensitive], last: Sequence[int], modules: int, *, whole: bool
) -> Finding | None:
    """GG502 to GG504, or None for parts that were frozen on purpose.

    `last` is the step in which each of them last trained in training mode, -1 for never; `modules` how many there are
    in all; `whole` tells that the model itself is in eval mode.
    """
    changed = [each for each, trained in zip(off, last, strict=True) if trained >= 0]
    if not changed:
        # From the start: parts frozen on purpose sit in a model that itself is in training mode.
        if len(off) < modules or not whole:
            return None
        story = f"{_they_were(off)} in eval mode from the first step on."
        return trained_in_eval("GG502", step, list(off), modules, story, ["never_train"], None)
    who: Who | None = watch.modes.who(training=False, of=changed[0].path)
    told = off if len(off) == modules else changed
    story = f"{_they_were(told)} in training mode until step {max(last)}"
    story += f"; {call('eval', who)[:-1]} and never undone." if who else "."
    if len(off) == modules:
        return trained_in_eval("GG503", step, list(off), modules, story, ["eval_not_undone"], who)
    return trained_in_eval("GG504", step, changed, modules, story, ["part_eval"], who)


def _they_were(modules: Sequence[Sensitive]) -> str:
    return "It was" if len(modules) == 1 else "They were"
