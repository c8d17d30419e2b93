"""Sink: the one class to subclass for an output of your own; whatever fails in it never reaches the training loop."""

from __future__ import annotations

import errno
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar

from gpt_guard.catalogue import finding as make_finding
from gpt_guard.records import Action, Finding, Observation, Report
from gpt_guard.records.render import render_short

_logger = logging.getLogger("gpt_guard")


class Sink(ABC):
    """Where observations and findings go.

    Guardian calls `open` on entry, `observe` once for each step and evaluation forward, `find` for each finding, `log`
    for the user's own numbers, and `close` on every way out. In every subclass these are guarded: an exception (a full
    disk, a folder that cannot be written, an error in a sink of your own) is said once as GG905 through the
    `gpt_guard` logger and kept in `trouble`, then the sink is silent until it is opened again. `close` always runs.
    """

    trouble: Finding | None = None
    _guarded: ClassVar[tuple[str, ...]] = ("open", "observe", "find", "log", "close")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in cls._guarded:
            if name in vars(cls):
                setattr(cls, name, _never_raising(vars(cls)[name]))

    @property
    def name(self) -> str:
        """How warnings and the report call this sink."""
        return type(self).__name__

    def open(self, header: Mapping[str, Any]) -> None:
        """Runs on entry; `header` holds the run's facts as plain JSON values."""
        self.trouble = None

    @abstractmethod
    def observe(self, observation: Observation) -> None:
        """Runs once per optimizer step and evaluation forward, on the training thread: keep it short."""

    @abstractmethod
    def find(self, finding: Finding, action: Action) -> None:
        """Runs for each finding, before Guardian raises where `action` is HALT."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Runs when the user calls `guardian.log(**metrics)`; `step` counts optimizer steps."""

    def close(self, report: Report | None) -> None:
        """Runs on every way out, maybe twice; `report` is None where the run failed before it could be made."""

    def _give_up(self, error: Exception) -> None:
        # A subclass that calls super() has both methods guarded: the inner one speaks, the outer one stays quiet.
        if self.trouble is not None:
            return
        self.trouble = make_finding(
            "GG905",
            f"{self.name} is silent from here on: {type(error).__name__}: {error}. Training goes on.",
            likely=[likely_cause(error)],
            evidence={"sink": self.name, "error": type(error).__name__},
        )
        _logger.warning(render_short(self.trouble), exc_info=None if isinstance(error, OSError) else error)


def likely_cause(error: Exception) -> str:
    """The key of the likeliest cause (GG905) of an output that cannot be written."""
    if not isinstance(error, OSError):
        return "own_sink"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    denied = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
    return "not_writable" if error.errno in denied else "gone"


def _never_raising(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap one of a sink's methods so that trouble in it is said once and goes no further."""

    @wraps(method)
    def guarded(self: Sink, *args: Any, **kwargs: Any) -> None:
        if method.__name__ == "open":
            self.trouble = None
        if method.__name__ == "close" or self.trouble is None:
            try:
                method(self, *args, **kwargs)
            except Exception as error:
                # Everything but KeyboardInterrupt and SystemExit: an output must never cost a training run.
                self._give_up(error)

    return guarded
