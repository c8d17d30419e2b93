"""Lane: the short way through a light step of the usual kind, with as little Python as it takes.

Between two calls of ours lies a millisecond of torch's work, after which nothing of us is left in the processor's
caches: a line costs a microsecond, whatever it does. So a step of one forward, one backward and one step, on gradients
that were cleared before and are finite, takes this way: figures are kept as they come, and observations are made of
them up to eight steps later, all at once. Whatever is not so takes the long way, where everything is measured.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.backlog import Backlog, Row
from gpt_guard.hooks.clipped import NormClip
from gpt_guard.hooks.gradients import Gradients, GradNorms, total_norm
from gpt_guard.hooks.row_norms import RowNorms
from gpt_guard.hooks.tensors import version_of
from gpt_guard.hooks.watch import Watch
from gpt_guard.ledger import Readings
from gpt_guard.progress import Progress
from gpt_guard.roster import Roster
from gpt_guard.stepping import Steps
from gpt_guard.unseen import Unseen

_GRAD = attrgetter("grad")
_VERSION = attrgetter("_version")
# Norms taken twice of the same gradients, or worked out from a clipping factor, differ by rounding.
_SAME = 1e-4
_MOST_WAITING = 8


class Lane:
    """One optimizer, where a reading is free. `began`, `ready`, `stepping` tell how far the step has come on this way.

    `late` tells whether what is kept may wait for more, or is judged as soon as the step is over.
    A step may leave it wherever something is not as usual; it cannot enter it again before the next.
    """

    def __init__(
        self,
        watch: Watch,
        gradients: Gradients,
        roster: Roster,
        steps: Steps,
        progress: Progress,
        unseen: Unseen,
        backlog: Backlog,
    ) -> None:
        self._watch = watch
        self._pace = watch.pace
        self._gradients = gradients
        self._roster = roster
        self._steps = steps
        self._progress = progress
        self._unseen = unseen
        self._backlog = backlog
        self._clip = NormClip(gradients.parameters)
        self._learn = gradients.parameters
        self._frozen: list[Tensor] = []
        self._names = gradients.names
        self._norms = RowNorms(self._learn)
        self._nothing = [None] * len(gradients.parameters)
        self._loss = 0.0
        self._lr: list[Any] = []
        self._ids: list[int] = []
        self._versions: list[int] = []
        self._readings: Readings = {}
        # Whether the last step that was measured in full had one backward.
        self._single = False
        self.began = self.ready = self.stepping = False
        self.late = True
        self._waiting = 0

    def open(self) -> None:
        """Begin to listen to clipping."""
        self._clip.open()

    def close(self) -> None:
        """Let everything go; may run twice."""
        self._clip.close()
        self._learn, self._frozen = [], []

    # The backward.

    def backward_begins(self, losses: tuple[Tensor, ...]) -> bool:
        """Whether this backward is as usual so far: one finite loss with a graph, and no gradient there yet."""
        if not self._single or len(losses) != 1 or losses[0].dim() or losses[0].grad_fn is None:
            return False
        if self._unseen.since:
            # The second of a step, or the first after one that no step has followed.
            self._pace.doubt()
            return False
        # Not one by one: a list of None is compared by identity.
        if list(map(_GRAD, self._gradients.parameters)) != self._nothing:
            self._pace.doubt()
            return False
        loss: float = losses[0].item()
        if loss - loss != 0.0:
            self._pace.doubt()
            return False
        watch = self._watch
        self._loss, self.began = loss, True
        self._steps.begin_light(loss)
        self._gradients.forget()
        self._clip.begin()
        watch.micro_batch, watch.grad_norms = 0, None
        watch.capture.backward_begins(losses)
        self._roster.call_light("before_backward", losses[0])
        return True

    def backward_ended(self) -> bool:
        """Whether the same parameters as ever have a gradient now, each a finite one."""
        self.began = False
        norms = self._take_norms()
        if norms is None:
            return False
        watch = self._watch
        watch.grad_norms, watch.micro_batch = norms, 1
        self._unseen.backwards += 1
        self._unseen.since = 1
        self._roster.call_light("after_backward")
        watch.capture.backward_ended(1)
        self.ready = True
        return True

    def _take_norms(self) -> GradNorms | None:
        grads = list(map(_GRAD, self._learn))
        try:
            norms = self._norms.measure(grads)
        except (TypeError, RuntimeError):
            # It has reached other parameters than the last one, or none, or left gradients of another kind.
            self._divide()
            return None
        total = sum(norms)
        if total - total != 0.0 or (self._frozen and any(parameter.grad is not None for parameter in self._frozen)):
            self._pace.doubt()
            self._divide()
            return None
        # Of this very backward: other steps may leave other counts.
        self._ids, self._versions = list(map(id, grads)), list(map(_VERSION, grads))
        return GradNorms(self._names, norms)

    def _divide(self) -> None:
        """Note which parameters have a gradient: the next backward is expected to reach the same ones."""
        if not self._gradients.ordinary:
            self._pace.never_light()
            return
        pairs = list(zip(self._gradients.names, self._gradients.parameters, strict=True))
        learn = [(name, parameter) for name, parameter in pairs if parameter.grad is not None]
        names = [name for name, _ in learn]
        if names and names != self._names:
            self._names, self._learn = names, [parameter for _, parameter in learn]
            self._frozen = [parameter for _, parameter in pairs if parameter.grad is None]
            self._norms = RowNorms(self._learn)

    # The step.

    def step_begins(self, optimizer: Optimizer, *, written: bool) -> bool:
        """Whether the step can be judged later. `written`: somebody has changed the parameters since the last one."""
        self.ready = False
        watch = self._watch
        lr = [group.get("lr") for group in optimizer.param_groups]
        if lr != self._lr:
            self._take_lr(lr)
        norms, due = watch.grad_norms, self._roster.due()
        if due or written or self._pace.full or norms is None or (factor := self._factor(norms)) is None:
            # The long way from here: what it has not seen itself.
            watch.ledger.put("backwards", 1)
            return False
        self._readings = readings = {"loss.0": self._loss, "backwards": 1, "grad_norms": norms.norms, "clip": factor}
        for place, each in enumerate(lr):
            readings[f"lr.{place}"] = each
        self._roster.call_light("before_step", optimizer)
        if watch.ledger.waits:
            readings.update(self._steps.read())
        watch.capture.judged()
        self.stepping = True
        return True

    def _take_lr(self, lr: list[Any]) -> None:
        """A learning rate that rises may begin a schedule again: whoever looks for that wants to do so at once."""
        last, self._lr = self._lr, lr
        if not all(type(each) is float for each in lr):
            self._pace.never_light()
        elif len(lr) != len(last) or any(now > before for now, before in zip(lr, last, strict=True)):
            self._pace.doubt(1)

    def _factor(self, norms: GradNorms) -> float | None:
        """What the gradients were multiplied by since the backward, told from calls or measured; None if not finite."""
        if (known := self._told_factor()) is not None:
            return known
        try:
            now = total_norm(self._norms.measure(self._grads()))
        except (TypeError, RuntimeError):
            # One of them is gone, or another kind of tensor by now.
            return None
        before = total_norm(norms.norms)
        return now / before if before and now - now == 0.0 else None

    def _grads(self) -> list[Tensor]:
        return list(map(_GRAD, self._learn))

    def _told_factor(self) -> float | None:
        """The factor, if version counters say that nothing but one `clip_grad_norm_` of all has written since."""
        grads = self._grads()
        try:
            ids, versions = list(map(id, grads)), list(map(_VERSION, grads))
        except (AttributeError, RuntimeError):
            return None
        if ids != self._ids:
            return None
        if not self._clip.calls:
            return 1.0 if versions == self._versions else None
        return self._clip.factor if versions == [version + 1 for version in self._versions] else None

    def step_ended(self, optimizer: Optimizer) -> None:
        """Measure what the step has done, and keep it; judge all that is kept once the next step is a full one."""
        self.stepping = False
        watch, progress, steps = self._watch, self._progress, self._steps
        late: Readings = {}
        try:
            late = steps.measure_light(optimizer)
        finally:
            step = progress.steps[0]
            row = Row(step, self._readings, self._names, progress.tokens, progress.samples, steps.count_light(), late)
            self._backlog.add(row)
        watch.inspection.step_ended(step + 1)
        self._pace.step_ended()
        self._waiting = (self._waiting + 1) % _MOST_WAITING
        if self._pace.full or not (self.late and self._waiting):
            self._backlog.settle()

    # In full steps: is the short way right about this loop?

    def long_way(self) -> None:
        """A backward begins that is measured in full. After a light one it may be the second of a step."""
        if self.ready:
            self._gradients.recall(self._learn, zip(self._ids, self._versions, strict=False))
        self.began = self.ready = self.stepping = False
        self._clip.begin()

    def note(self) -> None:
        """A backward was measured in full: remember the gradients as it left them."""
        self._divide()
        grads = [grad for grad in self._grads() if grad is not None]
        self._ids, self._versions = list(map(id, grads)), list(map(version_of, grads))

    def verify(self, before: float | None, now: float | None) -> None:
        """Compare what counters and calls tell with the norms that were measured after backward and before the step."""
        self._single = self._watch.micro_batch == 1
        known = self._told_factor()
        if known is not None and before and now is not None and not math.isclose(known * before, now, rel_tol=_SAME):
            self._pace.never_light()
