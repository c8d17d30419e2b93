"""Lane: the short way through a light step of the usual kind, with as little Python as it takes.

Between two calls of ours lies a millisecond of torch's work, after which nothing of us is left in the processor's
caches: a line costs a microsecond, whatever it does. So a step of one forward, one backward and one step, on gradients
that were cleared before and are finite, takes this way: figures are kept as they come, and observations are made of
them before the next full step, all at once, or at once where a step takes long. Whatever is not so takes the long way,
where everything is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gpt_guard.hooks.call_site import CallSite
from gpt_guard.hooks.gradients import Gradients, GradNorms, HeardNorms
from gpt_guard.hooks.ledger import Readings
from gpt_guard.hooks.watch import Watch
from gpt_guard.runtime.backlog import Backlog
from gpt_guard.runtime.blind_spots import Unseen
from gpt_guard.runtime.guard_runner import Roster
from gpt_guard.runtime.light_gradients import LightGradients
from gpt_guard.runtime.progress import Progress
from gpt_guard.runtime.stepping import Steps

# Seconds: of a step as long as this, judging takes a few thousandths, and nobody has to wait for a warning.
_SLOW = 0.05


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
        in_full: Callable[[Tensor | None], None],
        *,
        late: bool,
    ) -> None:
        self._watch = watch
        self._pace = watch.pace
        self._gradients = gradients
        self._roster = roster
        self._steps = steps
        self._progress = progress
        self._unseen = unseen
        self._backlog = backlog
        self.light = LightGradients(
            gradients, watch.pace, known=self._norms_known, unknown=self._norms_unknown, bad=self._norms_bad
        )
        self.light.open()
        self._in_full = in_full
        # What the backward was called on, as long as its gradients may have to be looked at in full.
        self._called_on: Tensor | None = None
        # From where: the line, should they have to be looked at once it has been left.
        self._caller = CallSite()
        self._loss = 0.0
        self._lr: list[Any] = []
        self._readings: Readings = {}
        self._taken: GradNorms | HeardNorms = GradNorms([], [])
        # Whether the last step that was measured in full had one backward.
        self._single = False
        self.began = self.ready = self.stepping = False
        self.late = late

    def close(self) -> None:
        """Let everything go; may run twice."""
        self.light.close()
        self._called_on = None

    def backward_failed(self) -> None:
        """The backward raised: its graph still has what it has saved, and goes with it."""
        self.began, self._called_on = False, None

    # The backward.

    def backward_begins(self, losses: tuple[Tensor, ...]) -> bool:
        """Whether this backward is as usual so far: one finite loss with a graph, and no gradient there yet."""
        if not self._single or len(losses) != 1 or losses[0].dim() or losses[0].grad_fn is None:
            return False
        if self._watch.since_step:
            # The second of a step, or the first after one that no step has followed.
            self._pace.doubt()
            return False
        if not self.light.cleared():
            self._pace.doubt()
            return False
        loss: float = losses[0].item()
        if loss - loss != 0.0:
            self._pace.doubt()
            return False
        watch = self._watch
        self._loss, self._called_on, self.began = loss, losses[0], True
        self._steps.begin_light(loss)
        self._gradients.forget()
        self.light.begin()
        watch.micro_batch, watch.grad_norms = 0, None
        watch.capture.backward_begins(losses)
        self._roster.call_light("before_backward", losses[0])
        if self.light.heard_before:
            self._caller.again()
        return True

    def backward_ended(self) -> bool:
        """Whether the same parameters as ever have a gradient now; each is a finite one, or will be looked at."""
        self.began = False
        watch, light = self._watch, self.light
        if light.heard_before and not self._roster.wants("after_backward"):
            usual = light.wait()
        else:
            norms = light.take()
            usual = norms is not None
            if norms is not None:
                self._norms_measured(norms)
        if not usual:
            self._called_on = None
            return False
        watch.micro_batch = 1
        self._unseen.backwards += 1
        watch.since_step = 1
        self.ready = True
        return True

    def _norms_measured(self, norms: GradNorms) -> None:
        watch = self._watch
        watch.grad_norms, watch.micro_batch, watch.loss = norms, 1, self._called_on
        try:
            self._roster.call_light("after_backward")
        finally:
            watch.loss = None
        self._norms_known(norms)

    def _norms_known(self, norms: GradNorms | HeardNorms) -> None:
        self._watch.grad_norms, self._called_on = norms, None
        self._watch.capture.backward_ended(1)

    def _norms_unknown(self) -> None:
        """Somebody has changed the gradients before they were looked at: the step tells how they are then."""
        self._called_on = None
        self._watch.capture.backward_ended(1)

    def _norms_bad(self) -> None:
        """Look at the gradients in full: as the backward left them, before anything else is done with them."""
        self._watch.micro_batch = 0
        self._unseen.backwards -= 1
        self._watch.since_step = 0
        self.ready, loss, self._called_on = False, self._called_on, None
        self._watch.backward_line = self._caller.line
        try:
            self._in_full(loss)
        finally:
            self._watch.backward_line = None

    # The step.

    def step_begins(self, optimizer: Optimizer, *, written: bool) -> bool:
        """Whether the step can be judged later. `written`: somebody has changed the parameters since the last one."""
        self.ready = False
        watch = self._watch
        lr = [group.get("lr") for group in optimizer.param_groups]
        if lr != self._lr:
            self._take_lr(lr)
        norms, due = watch.grad_norms, self._roster.due()
        if due or written or self._pace.full or norms is None or (factor := self.light.factor(norms)) is None:
            # The long way from here: what it has not seen itself.
            watch.ledger.put("backwards", 1)
            self.light.release()
            return False
        self._taken = norms
        readings: Readings = {"loss.0": self._loss, "backwards": 1, "clip": factor}
        self._readings = readings
        for place, each in enumerate(lr):
            readings[f"lr.{place}"] = each
        self._roster.call_light("before_step", optimizer)
        if watch.ledger.waits:
            readings.update(self._steps.read())
        self.stepping = True
        return True

    def _take_lr(self, lr: list[Any]) -> None:
        """A learning rate that rises may begin a schedule again: whoever looks for that wants to do so at once."""
        last, self._lr = self._lr, lr
        if not all(type(each) is float for each in lr):
            self._pace.never_light()
        elif len(lr) != len(last) or any(now > before for now, before in zip(lr, last, strict=True)):
            self._pace.doubt(1)

    def step_ended(self, optimizer: Optimizer) -> None:
        """Measure what the step has done, and keep it; judge all that is kept once the next step is a full one."""
        self.stepping = False
        watch, progress = self._watch, self._progress
        late: Readings = {}
        watch.tap.inputs = None
        watch.versions.step_ended()
        try:
            late = self._steps.measure_light(optimizer)
        finally:
            kept = progress.steps[0], self._readings, self._taken, progress.tokens, progress.samples
            step_time = self._steps.count_light()
            full = self._backlog.add((*kept, step_time, late))
        watch.inspection.step_ended(watch.step)
        self._pace.step_ended()
        if full or step_time > _SLOW or self._pace.full or not self.late:
            self._backlog.settle()

    # In full steps: is the short way right about this loop?

    def long_way(self) -> None:
        """A backward begins that is measured in full. After a light one it may be the second of a step."""
        if self.ready:
            self.light.recall()
        self.began = self.ready = self.stepping = False
        self._called_on = None
        self._caller.find()
        self.light.begin()

    def note(self) -> None:
        """A backward was measured in full: remember the gradients as it left them."""
        self.light.note()

    def verify(self, before: float | None, now: float | None) -> None:
        """Compare what counters and calls tell with the norms that were measured after backward and before the step."""
        self._single = self._watch.micro_batch == 1
        self.light.verify(before, now, single=self._single)
