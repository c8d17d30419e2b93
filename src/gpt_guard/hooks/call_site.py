"""From where something is called, time after time: found by a walk at first, and where it was found last later."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from gpt_guard.hooks.frames import is_foreign, line_in
from gpt_guard.records import SourceLine


class CallSite:
    """The innermost code outside of torch, the standard library and gpt_guard, and how far it had come.

    A walk takes microseconds. A loop calls `backward()` from the same function each time, and that stands as many
    frames away each time: `again` looks there first. Both have to be called from the same depth. Keeps no frame, for a
    frame would hold all of its variables.
    """

    def __init__(self) -> None:
        self._code: CodeType | None = None
        self._at = 0
        self._depth = 1

    def find(self) -> None:
        """Look for it in the stack, from the caller on."""
        self._walk(sys._getframe(1))

    def again(self) -> None:
        """The same; cheap where it is the same function as last time, at whatever line."""
        try:
            frame = sys._getframe(self._depth)
        except ValueError:
            # The stack is not as deep any more.
            self._walk(sys._getframe(1))
            return
        if frame.f_code is self._code:
            self._at = frame.f_lasti
        else:
            self._walk(sys._getframe(1))

    def _walk(self, start: FrameType) -> None:
        frame: FrameType | None = start
        self._depth, self._code = 1, None
        while frame is not None and is_foreign(frame.f_code.co_filename):
            frame = frame.f_back
            self._depth += 1
        if frame is not None:
            self._code, self._at = frame.f_code, frame.f_lasti

    @property
    def line(self) -> SourceLine | None:
        """The line, or None where no code of the user's was found."""
        return None if self._code is None else line_in(self._code, self._at)
