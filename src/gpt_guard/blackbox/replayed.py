"""What running the step of a bundle again has shown, and whether that is an answer."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from gpt_guard.blackbox.bundle import Bundle
from gpt_guard.blackbox.likeness import Likeness
from gpt_guard.blackbox.manifest import FileName
from gpt_guard.records import Finding
from gpt_guard.records.render import WIDTH, clean, render_finding, render_short, some
from gpt_guard.replaying.outcome import Outcome

_NOT_HELD = (
    "What no bundle brings back may decide: arguments that the model was built with, state that the forward keeps in "
    "Python objects, the time, other threads."
)
_MENDED = "say so: --mended (mended=True in Python)."


@dataclass(frozen=True)
class Replayed:
    """What running a bundle's step again has shown.

    `reproduced` is True where the fault is still there, False where the step runs through without it, None where the
    replay came to no answer. `gone` is the answer to a person who has changed something. `finding` is told as the
    exception tells it, `same` says whether operation and module are those of the bundle. `notes` name what is not as
    it was when the bundle was written, `likeness` what is not so of the model and its code. `mended` is what the
    person said; `other_step` tells that the step itself was not the recorded one, since other inputs were given.
    """

    bundle: Bundle
    outcome: Outcome
    finding: Finding
    reproduced: bool | None
    same: bool | None
    notes: tuple[str, ...] = ()
    likeness: Likeness = field(default_factory=Likeness)
    mended: bool = False
    other_step: bool = False

    @property
    def gone(self) -> bool | None:
        """Whether the fault is gone; None where a step that runs through does not show it.

        That is where model, weights or loss function are not what failed, or nothing is known to have been changed.
        """
        if self.reproduced is not False:
            return None if self.reproduced is None else False
        return None if self._doubt else True

    @property
    def _doubt(self) -> str | None:
        """Why a step that runs through is no answer, and what would be one; None where it is."""
        said, like = self.outcome.text, self.likeness
        if self.mended:
            return None
        if like.parts:
            return (
                f"the fault does not show, but this is not what failed. Give what builds that model, and the same loss "
                f"function. If the difference is what has mended it, {_MENDED} {said}"
            )
        if not self.bundle.has(FileName.MODEL):
            return (
                f"the fault does not show, but the weights are not those that failed, which the bundle does not have. "
                f"If the model was given them by other means, {_MENDED} {said}"
            )
        if like.unedited and not self.other_step:
            return (
                f"the fault does not show, although the code is what it was in the run ({some(like.unedited)}): "
                f"nothing says that it is gone. {said} {_NOT_HELD} If something besides the code was changed to mend "
                f"it, {_MENDED}"
            )
        return None

    def __str__(self) -> str:
        told = render_finding(self.finding) if self.reproduced else render_short(self.finding)
        notes = [f"not as recorded: {note}" for note in self.notes]
        other = self.likeness.parts
        first = [_filled(f"Not what the bundle was made of: {_listed(other)}.")] if other else []
        return "\n\n".join([*first, told, *map(_filled, (self.verdict, *notes))])

    @property
    def verdict(self) -> str:
        """The answer in a few sentences."""
        said = self.outcome.text
        if self.reproduced is None:
            return f"No answer: {said}"
        if self.reproduced:
            same = "The same fault at the same place."
            return f"{same if self.same else 'A fault at another place than the one recorded.'} {said}"
        if self._doubt:
            return f"No answer: {self._doubt}"
        return f"The fault does not show any more. {self._why}"

    @property
    def _why(self) -> str:
        said, edited = self.outcome.text, self.likeness.edited
        if self.mended or self.other_step:
            return said
        if edited:
            return f"The code was changed since: {some(edited)}. If that has not mended it: {said} {_NOT_HELD}"
        return f"If the code was changed since, it is gone; if it was not: {said} {_NOT_HELD}"


def _listed(parts: tuple[str, ...]) -> str:
    return "; ".join(parts[:3]) + (f"; and {len(parts) - 3} more" if len(parts) > 3 else "")


def _filled(text: str) -> str:
    return textwrap.fill(clean(text), WIDTH, break_on_hyphens=False)
