"""Blame for an output that has waited for the next module, and is read only now."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gpt_guard.callbacks.finite.blame import Blame, blame
from gpt_guard.hooks.chains import Link
from gpt_guard.hooks.forward import ForwardTap
from gpt_guard.hooks.frames import line_in


def culprit_of(
    tap: ForwardTap,
    index: int,
    position: str,
    tensor: Tensor,
    link: Link | None,
    *,
    entering: bool,
    untouched: dict[int, int],
    masks: frozenset[int],
) -> Blame:
    """What `blame` finds; with a link, at the line where the module was called, which has been left since.

    `rewritten` where somebody has written to the output meanwhile.
    """
    culprit = blame(tap, index, position, tensor, link, entering=entering, untouched=untouched, masks=masks)
    if link is None:
        return culprit
    where = culprit.where
    if link.site is not None and link.site.line is not None and index in (culprit.maker, culprit.receiver):
        where = line_in(*link.site.line)
    return replace(culprit, where=where, rewritten=not link.unwritten)
