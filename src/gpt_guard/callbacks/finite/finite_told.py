"""What FiniteGuard has told of the current step, so that what follows from it is not told again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from gpt_guard.records import Finding


class Told:
    """`forward` and `step` tell that the current forward or step went bad; `after`, that what is bad after it follows.

    A halt ends all of that: if the loop catches it and goes on with another batch, nothing of this one is left.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing has been told."""
        self.forward = self.step = self.after = False
        self._telling = False

    def begin(self) -> None:
        """A forward or a backward begins: where one of the last findings has halted, the loop has gone on."""
        if self._telling:
            self.clear()

    def submit(self, submit: Callable[[Finding], None], found: Finding) -> None:
        """Hand a finding on, which may halt."""
        try:
            submit(found)
        except BaseException:
            self.clear()
            raise

    def each(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        """The findings of an observation, which whoever asks for them hands on."""
        self._telling = True
        yield from findings
        self._telling = False
