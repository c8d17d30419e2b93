"""Forwards without gradients that are part of the training step: pseudo-labels, made anew in each one."""

from __future__ import annotations

# One for each augmented view of the unlabelled batch: FixMatch (Sohn et al. 2020) takes one, MixMatch (Berthelot et al.
# 2019) two. More in a row are a validation set or a sampled text.
_VIEWS = 2
_ENOUGH_STEPS = 3


class Rhythm:
    """Whether each step, from the very first on, has had the same few forwards without gradients.

    A validation comes now and then, or after a step and not before the first. `usual` is None during the first step,
    then the number of such forwards in a step, and 0 for good once a step had another number.
    """

    def __init__(self) -> None:
        self.usual: int | None = None
        self.calls = 0
        self.steps = 0
        self._backwards = 0

    def holds(self, in_a_row: int) -> bool:
        """Whether so many forwards without gradients before one backward may be part of the training step."""
        return self.usual != 0 and in_a_row <= _VIEWS

    @property
    def kept(self) -> bool:
        """Whether it has been kept for long enough to be no chance."""
        return bool(self.usual) and self.steps >= _ENOUGH_STEPS

    def forget(self) -> None:
        """What ran since the last step was for something else."""
        self.calls = 0

    def backward(self) -> None:
        """A backward of ours: its step takes part in the count."""
        self._backwards += 1

    @property
    def suspicious(self) -> bool:
        """Whether what was held back is too much for a test of shapes, though too little for a rhythm."""
        calls = self.calls if self.usual is None else self.usual * self.steps
        return calls > 1

    def step(self) -> bool:
        """A step is about to be made; True if it shows that what was held back is no part of the training step.

        Further optimizers of the same step do not count.
        """
        if not self._backwards:
            return False
        calls, most = self.calls, _VIEWS * self._backwards
        self.calls = self._backwards = 0
        if self.usual is None:
            self.usual = calls if calls <= most else 0
        elif self.usual and calls != self.usual:
            told = calls > self.usual or (self.suspicious and not self.kept)
            self.usual = 0
            return told
        self.steps += 1
        return False
