"""`guardian.stage`: preprocessing under watch, with the findings on the way of all others."""

from __future__ import annotations

from typing import TypeVar

from gpt_guard.runtime.data_stages import StageLog
from gpt_guard.runtime.dispatch import Dispatch

T = TypeVar("T")


class Staged:
    """The part of Guardian that looks at stages of preprocessing; it works inside and outside of an active one."""

    _dispatch: Dispatch
    _stage_log: StageLog | None = None

    def stage(self, name: str, data: T) -> T:
        """Look at data as it comes out of a stage of preprocessing, and return it: `x = guardian.stage("scale", x)`.

        Each call is compared with the one before it, until a name comes again: then the pipeline begins anew. Named
        with the stage are non-finite values (GG150, which halts by default) with the constant features that they come
        from, and constant features, dropped dimensions and dropped digits (GG639). `data` may be any structure of
        tensors; reads the device.
        """
        self._stage_log = log = self._stage_log or StageLog()
        return log.note(name, data, self._dispatch.submit)
