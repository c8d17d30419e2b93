"""FiniteGuard: stop at the first NaN or infinity, and name the module, parameter or code that made it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.finite.context import Context, Reported
from gpt_guard.callbacks.finite.device_readings import DeviceReadings, before_now, here_in, judge_on_device
from gpt_guard.callbacks.finite.first_seen import FirstSeen, Shown, first_seen
from gpt_guard.callbacks.finite.gradient_findings import bad_gradient, confirmed
from gpt_guard.callbacks.finite.loss_findings import is_loss, left_out, verdict_on_loss
from gpt_guard.callbacks.finite.microscope import Microscope
from gpt_guard.callbacks.finite.state_findings import bad_after_step, changed_outside
from gpt_guard.callbacks.finite.verdict import AtStep, bad_batch, verdict
from gpt_guard.callbacks.settings import check_types, patterns
from gpt_guard.hooks.copies import HookSet, Uncopied
from gpt_guard.hooks.frames import caller_line, user_line
from gpt_guard.hooks.output_hooks import is_finite_scalar
from gpt_guard.hooks.tensors import describe
from gpt_guard.hooks.watch import Watch
from gpt_guard.hooks.weights import StateWatch
from gpt_guard.records import Finding, Moment, Observation


class FiniteGuard(Guard):
    """Halt on NaN or +inf in the batch, module outputs, loss, gradients, parameters or buffers, before the update.

    On the CPU each module output is tested where it is made, with one sum; an exact test confirms before anything is
    said, so finite values that only overflow the sum stay quiet. On an accelerator minimum and maximum of each input
    and output wait on the device and are read once, before `step()`. -inf without NaN or +inf is what masks look like:
    it is recorded (GG109), not halted on; trained parameters and running statistics that turn -inf are found. A bad
    batch counts once an output, the loss or a gradient is bad with it: some models take NaN for a missing value.
    Integer tensors have nothing to test; sharded ones are tested by their local part; quantized, nested and meta
    tensors are listed as not watched. A watched nn.TransformerEncoderLayer computes by its usual path, never by torch's
    fast one for inference.

    - `ignore`: patterns of module paths whose outputs are not tested, e.g. `["head.*"]`; the rest is watched as usual.
    - `modules`: False leaves the hooks on single modules away and tests only what the model itself returns, at a price
      that does not grow with its depth; the replay then finds the module.
    - `outputs`, `gradients`, `parameters`, `buffers`: what to watch; the loss always is.
    - `microscope`: also warn of outputs that grow towards the end of their dtype's range, see `Microscope`.
    """

    judged_at: ClassVar[frozenset[Moment]] = frozenset({Moment.FORWARD, Moment.BEFORE_STEP, Moment.AFTER_STEP})

    def __init__(
        self,
        *,
        ignore: Iterable[str] = (),
        modules: bool = True,
        outputs: bool = True,
        gradients: bool = True,
        parameters: bool = True,
        buffers: bool = True,
        microscope: bool = False,
    ) -> None:
        check_types(FiniteGuard, locals())
        self.ignore = patterns("FiniteGuard", "ignore", ignore)
        self.modules = modules
        self.outputs = outputs
        self.gradients = gradients
        self.parameters = parameters
        self.buffers = buffers
        self.microscope = Microscope() if microscope else None
        self._context = Context()
        self._begin()

    def _begin(self) -> None:
        self._reported = Reported()
        self._batch: tuple[FirstSeen, dict[str, Any]] | None = None
        self._waiting: list[Finding] = []
        self._mask: Callable[[], Tensor | None] = _none
        self._micro_batch = 0
        self._at_step = AtStep()
        self._untouched: dict[int, int] = {}
        self._loss: Tensor | None = None
        self._readings = DeviceReadings()
        self._state = StateWatch(nn.Module(), parameters=False, buffers=False)
        # On an accelerator: the observation of the step that is made, and the state's norms as it has left them.
        self._stepping: Observation | None = None
        self._unread: tuple[Observation, Any] | None = None
        self._hooks = HookSet()

    def attach(self, watch: Watch) -> None:
        """Look at parameters and buffers once, then hook the forward."""
        super().attach(watch)
        self._state = StateWatch(watch.model, parameters=self.parameters, buffers=self.buffers)
        if not watch.immediate and hasattr(watch.model, "register_state_dict_pre_hook"):
            self._hooks.before_state_dict(watch.model, _StateAskedFor(watch.model, self._state_asked_for))
        if self.outputs:
            watch.tap.watch_outputs(self._suspect, self.ignore, modules=self.modules)
        # What is bad already may yet be loaded: it is told when a forward or a step uses it.
        self._state.settle()
        self._untouched = self._state.buffer_versions()
        watch.groups_changed.append(self._groups_changed)
        watch.forward_begins.append(self._forward_begins)
        if not watch.immediate:
            watch.forward_ended.append(self._forward_ended)

    def detach(self) -> None:
        """Drop what belongs to this stretch of the run."""
        self._hooks.close()
        self._begin()
        super().detach()

    def companions(self) -> Iterable[Guard]:
        """The microscope, if there is one."""
        return () if self.microscope is None else (self.microscope,)

    def blind_spots(self) -> Iterable[str]:
        """Ignored modules and tensors of a kind that cannot be tested."""
        doors_only = self.outputs and not self.modules
        insides = ["the inside of the model: only what it returns is tested (modules=False)"] if doors_only else []
        return insides + sorted(self.watch.tap.unwatched)

    def _groups_changed(self) -> None:
        """What is bad in new tensors may yet be loaded, as on entry: it is told when a forward or a step uses it."""
        self._state.renew(self.watch.model)
        self._at_step = AtStep()

    def _forward_begins(self) -> None:
        self._reported.begin()
        self._reported.forward = False
        watch = self.watch
        if not watch.immediate:
            self._keep_forward()
        # What a forward writes to a buffer can only be told from what it was before.
        self._untouched = self._state.buffer_versions()
        if watch.immediate and self.outputs:
            batch = bad_batch(watch)
            if batch is not None:
                self._batch = (batch, self._here_now() | {"where": caller_line(watch.model) or user_line()})

    def _here_now(self) -> dict[str, Any]:
        micro_batch = before_now(self.watch) if self.watch.immediate else self._micro_batch
        return here_in(self.watch, micro_batch, evaluation=self.watch.evaluation) | {"where": user_line()}

    def _suspect(self, index: int, position: str, tensor: Tensor, entering: bool) -> None:
        if self._reported.forward or (stats := describe(tensor)) is None:
            return
        here = self._here_now()
        if stats.only_neg_inf and tensor is self._mask():
            # The same one, handed on by the module around.
            return
        if stats.only_neg_inf:
            self._mask = ref(tensor)
            self._context.note_mask(self.watch, index, Shown.read(position, stats), here)
            return
        tap, untouched, known = self.watch.tap, self._untouched, self._state.known
        culprit = first_seen(tap, index, position, tensor, entering=entering, untouched=untouched, known=known)
        if culprit.maker is None and culprit.receiver == 0 and self._batch is not None:
            culprit, here = self._batch
        self._accuse(culprit, tensor, here if culprit.where is None else here | {"where": culprit.where})

    def _accuse(self, culprit: FirstSeen, tensor: Tensor | None, here: dict[str, Any]) -> None:
        self._reported.forward = self._reported.step = True
        found = verdict(self.watch, self._state, self._context, culprit, tensor, here)
        if culprit.state is None and is_loss(self.watch, culprit) and not here["evaluation"]:
            # Whether it is a loss that matters, the backward tells: some loops leave a bad batch out themselves.
            self._waiting, self._reported.step = list(found), False
            return
        for each in found:
            self._reported.submit(self.watch.submit, each)

    def _explained(self) -> bool:
        """Whether the batch was bad: told instead of what follows from it."""
        if self._batch is None or self._batch[1]["evaluation"]:
            return False
        self._accuse(self._batch[0], None, self._batch[1])
        return True

    def _state_asked_for(self) -> None:
        """What the newest step has spoilt is told before it is given out, where it waits for the next step to be read.

        Reads the device. Of what has been written since, the next forward tells.
        """
        unread, self._unread = self._unread, None
        if unread is None or self._reported.after or self.watch.tap.paused:
            return
        seen, norms = unread
        bad = self._state.turned_bad(norms.tolist())
        for found in bad_after_step(self.watch, bad, seen, set()) if bad else ():
            self._reported.submit(self.watch.submit, found)

    def _changed_since(self) -> Iterator[Finding]:
        """What has become bad since it was last measured, after the newest step; reads the device once."""
        # What a halt has stopped may have spoilt statistics on its way: that follows from it.
        if not self._reported.stopped:
            yield from changed_outside(self.watch, self._state.newly_bad())

    def _forward_ended(self, _output: Any) -> None:
        self._keep_forward(evaluation=self.watch.evaluation)

    def _keep_forward(self, *, evaluation: bool = False) -> None:
        """Put what a forward has shown into the ledger, where reading has to wait."""
        self._readings.keep_forward(self.watch, self._micro_batch, self._untouched, evaluation=evaluation)

    def before_backward(self, loss: Tensor) -> None:
        """Test the loss itself before anything depends on it."""
        watch = self.watch
        self._reported.begin()
        if not watch.immediate:
            # Until the step, to tell the order of backward if a gradient is bad; its saved tensors are freed by then.
            self._loss = loss
            # What methods of the model have called: no call of the model itself has ended.
            self._keep_forward()
        if not watch.immediate or (self._reported.forward and not self._waiting) or is_finite_scalar(loss):
            self._leave_out()
            return
        stats = describe(loss)
        if stats is None or not watch.reaches(loss) or self._explained():
            self._leave_out()
            return
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._reported.forward = self._reported.step = True
            for found in waiting:
                self._reported.submit(watch.submit, found.model_copy(update={"moment": Moment.BEFORE_BACKWARD}))
            return
        self._reported.forward = self._reported.step = True
        here = {**self._here_now(), "moment": Moment.BEFORE_BACKWARD, "evaluation": False}
        for found in verdict_on_loss(watch, self._state, self._context, loss, stats, self._untouched, here):
            self._reported.submit(watch.submit, found)

    def _leave_out(self) -> None:
        """Note a bad loss that the model returned, and that no backward was called on."""
        waiting, self._waiting = self._waiting, []
        for found in waiting:
            self.watch.submit(left_out(found))

    def after_backward(self) -> None:
        """Look at the gradients before clipping can spread one NaN to all of them."""
        watch, norms = self.watch, self.watch.grad_norms
        micro_batch, self._micro_batch = watch.micro_batch - 1, watch.micro_batch
        if not watch.immediate:
            self._readings.keep_backward(watch, micro_batch, self._loss, gradients=self.gradients and not watch.scaling)
            return
        if self.gradients and norms is not None and not watch.scaling and not self._reported.step:
            bad = confirmed(watch, norms.names, norms.norms)
            if bad and not self._explained():
                self._reported.step = True
                here = {"step": watch.step, "micro_batch": micro_batch, "where": watch.backward_line or user_line()}
                self._reported.submit(watch.submit, bad_gradient(watch, bad, watch.loss, here))

    def before_step(self, optimizer: Optimizer) -> None:
        """Hand what waited to the host read that follows."""
        if not self.watch.immediate:
            self._keep_forward()

    def after_step(self, optimizer: Optimizer) -> None:
        """One fused norm over parameters and float buffers: NaN and infinity survive it."""
        watch, self._micro_batch = self.watch, 0
        if (norms := self._state.read() if watch.immediate else self._state.norms()) is not None:
            watch.ledger.put("finite.state", norms)
            self._unread = None if self._stepping is None else (self._stepping, norms)

    def finish(self) -> Iterable[Finding]:
        """What was written after the last step, and is used by no forward any more."""
        self._leave_out()
        return self._changed_since()

    def judge(self, seen: Observation) -> Iterable[Finding]:
        """What the host read brought: forward and gradients before the step, parameters and buffers after it."""
        return self._reported.each(self._judge(seen))

    def _judge(self, seen: Observation) -> Iterator[Finding]:
        if seen.moment is Moment.AFTER_STEP:
            yield from self._after_step(seen)
            if self.watch.immediate:
                self._reported.forward = self._reported.step = False
            self._reported.after = False
            return
        if not self.watch.immediate:
            yield from judge_on_device(self.watch, self._readings, self._state, self._context, self._reported, seen)
        self._leave_out()
        if seen.moment is Moment.BEFORE_STEP and not seen.skipped:
            gradients = self.gradients and not self._reported.step
            yield from self._at_step.judge(self.watch, self._state, seen, gradients=gradients)
            self._reported.step = self._reported.step or self._at_step.bad
        if seen.skipped:
            self._micro_batch = 0
        if seen.moment is Moment.BEFORE_STEP:
            self._stepping = None if self.watch.immediate else seen
            yield from self._context.note_step(self.watch, seen)
            self._loss = self._batch = None
            self._reported.after = self._reported.after or self._reported.step
            if seen.skipped or not self.watch.immediate:
                self._reported.forward = self._reported.step = False

    def _after_step(self, seen: Observation) -> Iterable[Finding]:
        self._unread = None
        bad = self._state.turned_bad(seen.readings.get("finite.state", []))
        if not bad and not self._reported.after:
            self._state.went_well()
        if not bad or self._reported.after:
            return ()
        step = seen.optimizer, seen.step
        return bad_after_step(
            self.watch, bad, seen, {name for name in bad if self.watch.versions.written_between(name, step)}
        )


class _StateAskedFor(Uncopied):
    """A hook on `state_dict()` of one model."""

    __slots__ = ("_act", "_module")

    def __init__(self, module: nn.Module, act: Callable[[], None]) -> None:
        self._module = module
        self._act = act

    def __call__(self, module: nn.Module, _prefix: str, _keep_vars: Any) -> None:
        if module is self._module:
            self._act()


def _none() -> None:
    return None
