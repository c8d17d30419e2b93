"""The schedule that the user expects, as a function of the step or as a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpt_guard.errors import GuardUsageError

OneOrGroups = float | Sequence[float]
Expected = Callable[[int], OneOrGroups] | Sequence[OneOrGroups]


class ExpectedLR:
    """Gives the expected lr by group at a step; the same for all groups where one number is given."""

    def __init__(self, expected: Expected, *, rtol: float) -> None:
        if not callable(expected) and (isinstance(expected, str) or not isinstance(expected, Sequence)):
            raise GuardUsageError(
                f"LRTracker(expected={expected!r}) cannot work: give a function of the step number that returns the "
                f"learning rate (or one for each group), or a list with one entry for each step"
            )
        self._expected = expected
        self._rtol = rtol
        self._largest = 0.0

    def at(self, step: int, groups: int) -> tuple[float, ...] | None:
        """The expected lr at this step for this many groups; None outside of a list."""
        if callable(self._expected):
            value = self._expected(step)
        elif 0 <= step < len(self._expected):
            value = self._expected[step]
        else:
            return None
        if isinstance(value, Sequence):
            if len(value) != groups:
                raise GuardUsageError(
                    f"expected= gives {len(value)} learning rates at step {step}; the optimizer has {groups} groups"
                )
            return tuple(float(each) for each in value)
        return (float(value),) * groups

    def matches(self, lr: tuple[float, ...], expected: tuple[float, ...]) -> bool:
        """Whether both agree to within rtol of the larger, or of a millionth of the largest lr expected so far.

        The second keeps a cosine's end, which is 1e-20 instead of 0, from counting as a difference.
        """
        self._largest = max(self._largest, *map(abs, expected))
        floor = 1e-6 * self._largest
        return all(
            abs(own - want) <= self._rtol * max(abs(own), abs(want), floor)
            for own, want in zip(lr, expected, strict=True)
        )

    def shift(self, step: int, lr: tuple[float, ...]) -> int | None:
        """By how many steps (1 or 2, either way) the schedule is off, if that explains this lr."""
        for by in (-1, 1, -2, 2):
            if step + by >= 0:
                other = self.at(step + by, len(lr))
                if other is not None and self.matches(lr, other):
                    return by
        return None
