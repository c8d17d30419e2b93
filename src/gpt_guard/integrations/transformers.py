"""A callback for the Hugging Face Trainer that puts a Guardian round its training."""

from __future__ import annotations

import base64
import io
import sys
from functools import partial
from types import FrameType
from typing import Any

import torch

from gpt_guard.errors import GuardUsageError
from gpt_guard.guardian import Guardian
from gpt_guard.hooks.patches import Patch
from gpt_guard.integrations.figures import Figures, checked_options, required, with_figures

_transformers = required("transformers", "transformers")
_Base: Any = _transformers.TrainerCallback
_NAME = "gpt_guard"

# The trainer tells no callback of an exception: what it calls in training does, and is put back on the way out.
_STEPS = ("training_step", "get_batch_samples", "evaluate", "save_model")


class GuardianCallback(_Base):  # type: ignore[misc]  # its package need not be installed
    """Watches the training of `Trainer(callbacks=[GuardianCallback()])`.

    Takes the options of Guardian; model, optimizer, scheduler and the step to start from are the trainer's. Its figures
    (`gpt_guard/grad_norm`, `grad_norm_clipped`, `update_ratio`, `lr`) stand beside the loss in the trainer's logs,
    unless `log=False`. What Guardian needs to go on is kept in the trainer's checkpoints. A halt is a GuardError that
    `trainer.train()` raises; then, as after any exception from a step, the data, an evaluation or a callback,
    everything is detached. `stop()` does that by hand.

    `guardian` is that of the newest training, None before it. Raises GuardUsageError for an option that is none.
    """

    def __init__(self, *, log: bool = True, **options: Any) -> None:
        self.guardian: Guardian | None = None
        self._options = checked_options(options)
        self._log = log
        self._figures = Figures()
        self._patches: list[Patch] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch."""
        self.stop()
        trainer = _calling_trainer()
        self.guardian = guardian = Guardian(
            kwargs["model"],
            kwargs["optimizer"],
            scheduler=_plain(kwargs["lr_scheduler"]),
            start_step=state.global_step,
            **with_figures(self._options, self._figures),
        )
        # A checkpoint of a run that was not watched has none.
        if saved := (state.stateful_callbacks or {}).get(_NAME):
            guardian.load_state_dict(_unpacked(saved))
        try:
            self._attach(trainer)
            guardian.start()
        except BaseException as error:
            self.stop(error)
            raise

    def _attach(self, trainer: Any) -> None:
        owners = [(trainer, name) for name in _STEPS]
        owners += [(trainer.optimizer, "step"), (trainer.callback_handler, "call_event")]
        self._patches = [Patch(owner, name, _noticed) for owner, name in owners if hasattr(owner, name)]
        self._patches.append(Patch(trainer, "log", _logged))
        for patch in self._patches:
            patch.add(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint may follow."""
        if control.should_save:
            self._note(state)

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Where the best model is kept, it is decided after this whether to save."""
        self._note(state)

    def _note(self, state: Any) -> None:
        if self.guardian is not None and self._patches:
            state.stateful_callbacks[_NAME] = _packed(self.guardian.state_dict())

    def add_figures(self, logs: dict[str, Any]) -> None:
        """Put what was measured since the last log of the training beside it."""
        if self._log and "loss" in logs:
            logs.update(self._figures.take())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop watching; raises a finding that halts at the end."""
        self.stop()

    def stop(self, error: BaseException | None = None) -> None:
        """Stop watching and detach everything; does nothing if not watching."""
        try:
            if self.guardian is not None:
                self.guardian.__exit__(type(error) if error is not None else None, error, None)
        finally:
            for patch in self._patches:
                patch.remove(self)
            self._patches = []


def _noticed(original: Any, listeners: tuple[GuardianCallback, ...], *args: Any, **kwargs: Any) -> Any:
    try:
        return original(*args, **kwargs)
    except BaseException as error:
        for listener in listeners:
            listener.stop(error)
        raise


def _logged(
    original: Any, listeners: tuple[GuardianCallback, ...], logs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    for listener in listeners:
        listener.add_figures(logs)
    return _noticed(partial(original, logs), listeners, *args, **kwargs)


def _calling_trainer() -> Any:
    """The trainer that is training here; it gives callbacks all that it has but itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(trainer := frame.f_locals.get("self"), _transformers.Trainer):
            return trainer
        frame = frame.f_back
    raise GuardUsageError(
        "GuardianCallback was called by something that is no transformers.Trainer. Where the loop is your own, write "
        "`with Guardian(model, optimizer):` round it."
    )


def _plain(scheduler: Any) -> Any:
    """The scheduler that accelerate has wrapped."""
    return getattr(scheduler, "scheduler", scheduler)


def _packed(state: dict[str, Any]) -> str:
    """As text: the trainer keeps JSON, which has no tensors and no numbers for keys."""
    stream = io.BytesIO()
    torch.save(state, stream)
    return base64.b64encode(stream.getvalue()).decode()


def _unpacked(text: str) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return state
