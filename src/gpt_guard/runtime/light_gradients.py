"""The gradients of light steps: their norms after the backward, and what was done to them until the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter

from torch import Tensor

from gpt_guard.hooks.gradients import Gradients, GradNorms, HeardNorms, total_norm
from gpt_guard.hooks.left_gradients import LeftGradients
from gpt_guard.hooks.pace import Pace
from gpt_guard.hooks.row_norms import RowNorms
from gpt_guard.hooks.tensors import version_of
from gpt_guard.hooks.total_norm import TOTAL_NORMS
from gpt_guard.runtime.clipped import NormClip

_GRAD = attrgetter("grad")
_VERSION = attrgetter("_version")
# Norms taken twice of the same gradients, or worked out from a clipping factor, differ by rounding.
_SAME = 1e-4


class LightGradients:
    """Knows which parameters have a gradient after a backward, and which state the backward has left it in.

    Where the full steps have shown that `clip_grad_norm_` comes next and takes the norms of all of them, nothing is
    measured after the backward: the norms are heard from there, before anything is scaled, and are `waited` for until
    then. Whoever cannot wait any longer calls `resolve`. `known` is told of norms that are finite, `unknown` of
    gradients that somebody has changed meanwhile, `bad` of those that have to be looked at in full.
    """

    def __init__(
        self,
        gradients: Gradients,
        pace: Pace,
        *,
        known: Callable[[GradNorms | HeardNorms], None],
        unknown: Callable[[], None],
        bad: Callable[[], None],
    ) -> None:
        self._gradients = gradients
        self._pace = pace
        self._known, self._unknown, self._bad = known, unknown, bad
        self._clip = NormClip(gradients.parameters)
        self.names = gradients.names
        self._learn = gradients.parameters
        self._frozen: list[Tensor] = []
        self._norms = RowNorms(self._learn)
        self._nothing = [None] * len(gradients.parameters)
        self._left = LeftGradients()
        # Whether the last full step has shown that the norms can be heard, and whether this one has, so far.
        self.heard_before = self._heard = False
        self.waited = False
        self.listening = False

    def open(self) -> None:
        """Begin to listen to clipping."""
        self._clip.open()
        for patch in TOTAL_NORMS:
            patch.add(self)

    def close(self) -> None:
        """Let everything go; may run twice."""
        self._clip.close()
        for patch in TOTAL_NORMS:
            patch.remove(self)
        self._learn, self._frozen = [], []
        self._left.note([])
        self.waited = self.listening = False

    def begin(self) -> None:
        """A backward begins."""
        self._clip.begin()
        self._left.kept, self._left.ids = [], []
        self._heard = self.listening = False

    def cleared(self) -> bool:
        """Whether no parameter has a gradient."""
        # Not one by one: a list of None is compared by identity.
        return list(map(_GRAD, self._gradients.parameters)) == self._nothing

    def take(self) -> GradNorms | None:
        """The norms now, if the same parameters as ever have a gradient, each a finite one."""
        return self._take(self._grads())

    def _take(self, grads: list[Tensor]) -> GradNorms | None:
        try:
            norms = self._norms.measure(grads)
        except (TypeError, RuntimeError):
            # It has reached other parameters than the last one, or none, or left gradients of another kind.
            self._divide()
            return None
        if not _is_finite(sum(norms)) or self._thawed():
            self._pace.doubt()
            self._divide()
            return None
        # Of this very backward: other steps may leave other counts.
        self._left.note(grads, list(map(_VERSION, grads)))
        return GradNorms(self.names, norms)

    def wait(self) -> bool:
        """Remember the gradients as they are, and wait for their norms; False if they are not the same as ever."""
        grads = list(map(_GRAD, self._learn))
        try:
            versions = list(map(_VERSION, grads))
        except (AttributeError, RuntimeError):
            self._divide()
            return False
        if self._frozen and self._thawed():
            self._pace.doubt()
            self._divide()
            return False
        self._left.kept, self._left.versions = grads, versions
        self.waited = self.listening = True
        return True

    def norms_heard(self, gradients: Sequence[Tensor], norms: Tensor | None, total: Tensor | None) -> None:
        """`clip_grad_norm_` has taken norms: of ours, or of somebody else's gradients."""
        left = self._left
        if not left.are(gradients):
            if left.some_of(gradients):
                self.listening = False
                self.resolve()
            return
        self.listening = False
        if not self.waited:
            # Those of several dtypes come in another order.
            alike = norms is not None and len({gradient.dtype for gradient in gradients}) == 1
            self._heard = alike and list(map(version_of, gradients)) == left.versions
            return
        # Of those that are waited for it is known that they count.
        self._heard = norms is not None and list(map(_VERSION, gradients)) == left.versions
        if norms is None or not self._heard:
            self.resolve()
            return
        self.waited = False
        if total is not None and (value := total.item()) - value == 0.0:
            # One that is not finite would show in it. They are read when the step is judged.
            left.ids, left.kept = list(map(id, left.kept)), []
            self._known(HeardNorms(self.names, norms))
            return
        found: list[float] = norms.tolist()
        if _is_finite(sum(found)):
            self._known(GradNorms(self.names, found))
        else:
            self._pace.doubt()
            self._divide()
            self._bad()

    def release(self) -> None:
        """Hold no gradients any longer that are not waited for: no step may come to use them, and free them."""
        if not self.waited:
            self._left.release()

    def resolve(self) -> None:
        """Measure what was waited for, unless somebody has written to it since."""
        if not self.waited:
            return
        self.waited = self.listening = self.heard_before = False
        kept, learn = self._left.kept, self._learn
        there, unwritten = self._left.in_place(learn), self._left.unwritten()
        if not (there and unwritten):
            self._pace.doubt()
        if not unwritten:
            self._unknown()
        elif (norms := self._take(kept)) is not None:
            self._known(norms)
        elif there:
            self._bad()
        else:
            self._look_back(learn, kept)

    def _look_back(self, learn: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Have them looked at in full, put back for as long as that takes: they were cleared, or replaced."""
        now = [parameter.grad for parameter in learn]
        try:
            _put(learn, kept)
        except RuntimeError:
            # A parameter of another shape or dtype by now.
            _put(learn, now)
            self._unknown()
            return
        try:
            self._bad()
        finally:
            _put(learn, now)

    def _thawed(self) -> bool:
        return any(parameter.grad is not None for parameter in self._frozen)

    def _divide(self) -> None:
        """Note which parameters have a gradient: the next backward is expected to reach the same ones."""
        if not self._gradients.ordinary:
            self._pace.never_light()
            return
        pairs = list(zip(self._gradients.names, self._gradients.parameters, strict=True))
        learn = [(name, parameter) for name, parameter in pairs if parameter.grad is not None]
        names = [name for name, _ in learn]
        if names and names != self.names:
            self.names, self._learn = names, [parameter for _, parameter in learn]
            self._frozen = [parameter for _, parameter in pairs if parameter.grad is None]
            self._norms = RowNorms(self._learn)

    def _grads(self) -> list[Tensor]:
        return list(map(_GRAD, self._learn))

    def factor(self, norms: GradNorms | HeardNorms) -> float | None:
        """What the gradients were multiplied by since the backward, told from calls or measured; None if not finite."""
        known = self._told_factor()
        if known is not None:
            return known
        try:
            now = total_norm(self._norms.measure(self._grads()))
        except (TypeError, RuntimeError):
            # One of them is gone, or another kind of tensor by now.
            return None
        before = total_norm(norms.norms)
        return now / before if before and _is_finite(now) else None

    def _told_factor(self) -> float | None:
        """The factor, if version counters say that nothing but one `clip_grad_norm_` of all has written since."""
        writes = self._left.writes(self._learn)
        if writes is None:
            return None
        if not self._clip.calls:
            return None if writes else 1.0
        return self._clip.factor if writes == len(self._left.versions) else None

    # In full steps.

    def recall(self) -> None:
        """Remember the gradients as the last light backward has left them."""
        left = self._left
        left.release()
        self._gradients.recall(self._learn, zip(left.ids, left.versions, strict=False))

    def note(self) -> None:
        """A backward was measured in full: remember the gradients as it left them."""
        self._divide()
        self._left.note([grad for grad in self._grads() if grad is not None])
        self.listening = True

    def verify(self, before: float | None, now: float | None, *, single: bool) -> None:
        """Compare what counters and calls tell with the norms that were measured after backward and before the step."""
        self.heard_before, self.listening = single and self._heard, False
        known = self._told_factor()
        if known is not None and before and now is not None and not math.isclose(known * before, now, rel_tol=_SAME):
            self._pace.never_light()


def _is_finite(number: float) -> bool:
    """Whether it is neither NaN nor infinite: a function in Python costs less here than to fetch one of C's."""
    return number - number == 0.0


def _put(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
