"""What the Guardian does not get to see: a model never called, steps of another optimizer, a step that never comes."""

from __future__ import annotations

from gpt_guard.catalogue import finding
from gpt_guard.hooks.frames import user_line
from gpt_guard.hooks.watch import Watch
from gpt_guard.records import Moment, Severity
from gpt_guard.runtime.progress import Progress

_ENOUGH_STEPS = 3
# Backward calls without a step that make one look closer: ten, and three times what this run has needed so far.
_LEAST = 10
_TIMES = 3
# As often as this must the parameters change under the eyes of an optimizer that does not step.
_CHANGES = 3
# Without such a change it may be accumulation, an attack on the inputs, or gradients collected for their own sake.
_LONG = 200
_LONG_AT_FIRST = 1000
# Readings wait for a step; where none comes, they are taken at every so many backward calls.
_READ_EVERY = 10


class BlindSpots:
    """Counts what reaches the model, and says when steps or forwards pass by unseen; reads no device.

    `backwards` counts the backward calls that were ours, `attempts` the steps that were begun or skipped; those after
    the last of them are `watch.since_step`. `saw_modules` is True once modules ran without a call of the model itself.
    """

    def __init__(self, watch: Watch, progress: Progress) -> None:
        self.backwards = 0
        self.attempts = 0
        self._without_forward = 0
        self.saw_modules = False
        # Optimizers that compiled code steps, and how many steps of theirs were counted before.
        self._compiled: dict[int, int] = {}
        self._watch = watch
        self._progress = progress
        self._first_step = progress.step
        self._patience = _LEAST
        self._scaler_calls = 0
        self._versions: int | None = None
        self._changes = 0
        self._idle = 0
        self._told_steps = False
        self._told_forward = False

    def backward(self, *, forwards: int) -> bool:
        """Count a backward call of ours, after so many forwards of the model itself.

        True where what waits should be read, since no step seems to come.
        """
        self.backwards += 1
        self._without_forward = 0 if forwards else self._without_forward + 1
        self._watch.since_step += 1
        return self._watch.since_step > self._patience and self._look()

    def step(self) -> None:
        """A step was begun, or skipped by a scaler."""
        self.attempts += 1
        # The largest number of backward calls that a step of this run has taken is the measure for the next.
        self._patience = max(self._patience, _TIMES * self._watch.since_step)
        self._watch.since_step = self._scaler_calls = self._changes = self._idle = 0
        self._versions = None

    def step_compiled(self, index: int) -> None:
        """Compiled code makes steps of this optimizer, of which nothing is told."""
        self._compiled[index] = self._progress.steps[index]

    def scaler_called(self) -> None:
        """A GradScaler was asked to step an optimizer of ours; a step, skipped or not, should follow."""
        self._scaler_calls += 1

    def _look(self) -> bool:
        watch = self._watch
        # A closure belongs to a step; where all is evaluated, nothing has to step.
        if watch.closure or not watch.optimizers:
            return False
        # In eval mode, an attack on the inputs has its gradients and needs no step.
        self._idle += watch.model.training
        if not self._told_steps:
            self._count_changes()
            if self._changes >= _CHANGES or self._long_enough():
                self._tell_unstepped(Moment.AFTER_BACKWARD)
        return self._watch.since_step % _READ_EVERY == 0 and (self._changes > 0 or self._watch.since_step > _LONG)

    def groups_changed(self) -> None:
        """The optimizers hold other tensors: their versions count anew."""
        self._versions = None

    def _count_changes(self) -> None:
        # Every in-place change of a tensor counts up its version: no value is looked at.
        held = (
            tensor for index in range(len(self._watch.optimizers)) for tensor in self._watch.held_by(index).values()
        )
        versions = sum(tensor._version for tensor in held if not tensor.is_inference())
        self._changes += self._versions is not None and versions != self._versions
        self._versions = versions

    def _compiled_steps(self) -> str:
        """Where compiled code has made all steps since it was compiled, as far as is seen."""
        steps, optimizers = self._progress.steps, self._watch.optimizers
        names = {type(optimizers[index]).__name__ for index, count in self._compiled.items() if steps[index] == count}
        return f"compiled code holds the whole step() of {', '.join(sorted(names))}" if names else ""

    def _long_enough(self) -> bool:
        return self._most_of_the_run() and self._idle > (_LONG if self.attempts else _LONG_AT_FIRST)

    def _most_of_the_run(self) -> bool:
        return self._idle > self.backwards - self._watch.since_step

    def _tell_unstepped(self, moment: Moment) -> None:
        self._told_steps = True
        watch, last = self._watch, self._progress.step - 1
        names = ", ".join(type(optimizer).__name__ for optimizer in watch.optimizers)
        stepped = self._progress.step > self._first_step
        when = f"since step {last}" if stepped else "without a step"
        compiled = self._compiled_steps()
        seen = (
            f"{watch.since_step} backward calls reached the model {when}: the optimizer given to Guardian ({names}) "
            f"{'no longer steps' if self.attempts else 'is not seen to step' if compiled else 'does not step'}."
        )
        if self._changes:
            seen += f" Its parameters change nevertheless: {compiled or 'something else updates them'}, unseen."
            likely = "compiled_step" if compiled else "other_optimizer"
        elif self._scaler_calls:
            seen += (
                f" scaler.step() was called on it {self._scaler_calls} times and came to no step; its parameters stay "
                f"as they are."
            )
            likely = "scaler_not_updated"
        else:
            seen += " Its parameters stay as they are."
            likely = "no_step"
        serious = self._changes or not self.attempts or self._most_of_the_run()
        watch.submit(
            finding(
                "GG903",
                seen,
                likely=[likely],
                severity=Severity.WARNING if serious else Severity.INFO,
                step=self._progress.step,
                moment=moment,
                where=user_line() if moment is not Moment.EXIT else None,
                evidence={
                    "backwards": watch.since_step,
                    "changes": self._changes,
                    "last_step": last if stepped else None,
                },
            )
        )

    def forward(self) -> bool:
        """Whether the model is called at all, as far as can be seen."""
        tap = self._watch.tap
        # Where no guard watches modules, calls of the model's parts are not seen; their gradients tell of them.
        return bool(tap.calls or tap.order or self.saw_modules or (self.backwards and not tap.watching))

    def look_inside(self) -> None:
        """Say it where `module.compile()` was called in the middle of the run: from there on its calls are not seen."""
        if found := self._watch.tap.newly_compiled():
            self._tell_compiled(found, Moment.FORWARD, whole="" in found)

    def step_ended(self) -> None:
        """After a few steps, say what of the forward cannot be seen."""
        if self.attempts >= _ENOUGH_STEPS and not self._told_forward:
            self._tell_forward(Moment.AFTER_STEP)

    def finish(self) -> None:
        """Say at the end what was never seen."""
        if not self._told_forward:
            self._tell_forward(Moment.EXIT)
        if not self._watch.optimizers:
            return
        if not self.attempts:
            self._tell_no_step()
        elif not self._told_steps and self._watch.since_step > self._patience and (self._changes or self._idle):
            self._tell_unstepped(Moment.EXIT)

    def blind_spots(self) -> list[str]:
        """What cannot be seen in this stretch."""
        tap = self._watch.tap
        found = [f"the inside of the compiled {name or 'model'}" for name in tap.inside_compiled + tap.compiled_later]
        if not self.forward():
            found.append("forward passes: the model was never called")
        elif tap.calls and self._without_forward >= _ENOUGH_STEPS:
            found.append(
                f"forward passes of the last {self._without_forward} backward calls: the model itself was not called, "
                f"but perhaps a compiled form of it"
            )
        elif not tap.watching:
            found.append("outputs of modules: no guard was given that tests them")
        since = self._watch.since_step
        if compiled := self._compiled_steps():
            found.append(f"optimizer steps: {compiled}")
        if self._told_steps and self.attempts and since > self._patience:
            found.append(f"optimizer steps after step {self._progress.step - 1}: {since} backward calls without one")
        return found

    def _tell_forward(self, moment: Moment) -> None:
        self._told_forward = True
        tap = self._watch.tap
        if tap.inside_compiled:
            self._tell_compiled(tap.inside_compiled, moment, whole=not tap.modules)
        elif not self.forward():
            self._tell_uncalled(moment)

    def _tell_compiled(self, paths: list[str], moment: Moment, *, whole: bool) -> None:
        names = [path or "(the model itself)" for path in paths]
        rest = "What comes out of it shows in what follows it"
        seen = "Neither inputs nor outputs of the model are seen" if whole else rest
        self._watch.submit(
            finding(
                "GG901",
                f"Modules inside a compiled module are not hooked: {', '.join(names)}. {seen}; loss, gradients "
                f"and parameters are watched.",
                severity=Severity.WARNING if whole else Severity.INFO,
                step=self._progress.step,
                moment=moment,
            )
        )

    def _tell_uncalled(self, moment: Moment) -> None:
        steps = self._progress.step - self._first_step + self._progress.skipped
        by_hand = steps and self._gradients_by_hand()
        how = " Its gradients are put in place by hand, so none is expected." if by_hand else ""
        self._watch.submit(
            finding(
                "GG902",
                f"No forward of the model ({type(self._watch.model).__name__}) was seen in {steps} steps and "
                f"{self.backwards} backward calls: its outputs are not watched.{how}",
                severity=Severity.INFO if by_hand else Severity.WARNING,
                moment=moment,
            )
        )

    def _gradients_by_hand(self) -> bool:
        """Whether parameters of the model have gradients although no backward reached it (Reptile, federated means)."""
        return not self.backwards and any(parameter.grad is not None for parameter in self._watch.parameters.values())

    def _tell_no_step(self) -> None:
        if self._told_steps:
            return
        seen = f"{self.backwards} backward calls reached the model" if self.backwards else "no backward"
        if compiled := self._compiled_steps():
            seen += f"; {compiled}"
        self._watch.submit(
            finding(
                "GG903",
                f"No optimizer step was seen inside the Guardian ({seen}).",
                likely=["compiled_step" if compiled else "other_optimizer" if self.backwards else "no_backward"],
                moment=Moment.EXIT,
            )
        )
