"""A Lightning callback that puts a Guardian round `trainer.fit`; works with `lightning` and `pytorch_lightning`."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from gpt_guard.guardian import Guardian
from gpt_guard.integrations.figures import Figures, checked_options, required, with_figures

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_class() -> Any:
    """The base of the package that the program uses. Lightning asks for it only where a callback comes without list."""
    loaded = [name for name in _PACKAGES if name in sys.modules]
    if not loaded:
        from importlib.util import find_spec

        loaded = ["pytorch_lightning" if find_spec("lightning") is None and find_spec(_PACKAGES[1]) else _PACKAGES[0]]
    return required(loaded[0], "lightning").Callback


class GuardianCallback(_callback_class()):  # type: ignore[misc]  # which package it comes from is known at run time only
    """Watches the training of `Trainer(callbacks=[GuardianCallback()])`, with automatic and manual optimisation.

    Takes the options of Guardian; model, optimizers, schedulers and the step to start from are the trainer's. Watches
    from the start of training, after the sanity check, to its end; validation on the way is seen as evaluation. Logs
    `gpt_guard/grad_norm`, `grad_norm_clipped`, `update_ratio` and `lr` through `self.log`, unless `log=False`; for a
    second optimizer with `_1` behind the name. What Guardian needs to go on stands in Lightning's checkpoints. Detaches
    on every way out, an exception and a Ctrl-C included. A halt is a GuardError that `trainer.fit` raises.

    `guardian` is that of the newest fit, None before it. Raises GuardUsageError for an option that is none.
    """

    def __init__(self, *, log: bool = True, **options: Any) -> None:
        super().__init__()
        self.guardian: Guardian | None = None
        self._options = checked_options(options)
        self._log = log
        self._figures = Figures()
        self._saved: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Begin to watch."""
        self._leave(None)
        optimizers = list(trainer.optimizers)
        self.guardian = guardian = Guardian(
            pl_module,
            optimizers or None,
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs] or None,
            # Lightning counts the steps of all optimizers together.
            start_step=trainer.global_step // max(1, len(optimizers)),
            **with_figures(self._options, self._figures),
        )
        if self._saved:
            guardian.load_state_dict(self._saved)
            self._saved = {}
        guardian.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the figures of the steps made for this batch, if there were any."""
        figures = self._figures.take()
        if self._log and figures:
            pl_module.log_dict(figures, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Stop watching; raises a finding that halts at the end."""
        self._leave(None)

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Detach; the exception goes first, whatever there is to say at the end."""
        self._leave(exception)

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Detach, where Lightning ends a run without either of the two above."""
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if self.guardian is not None:
            self.guardian.__exit__(type(error) if error is not None else None, error, None)

    def state_dict(self) -> dict[str, Any]:
        """What Guardian needs to go on counting and judging, for Lightning's checkpoint."""
        return self._saved if self.guardian is None else self.guardian.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until the training starts, since there is no optimizer before."""
        self._saved = dict(state_dict)
