"""For tests of guards, yours and ours: break a model on purpose, record what is seen, refuse hidden host reads."""

from gpt_guard.testing.inject import Injection, inject_nonfinite
from gpt_guard.testing.reads import HostReadError, HostReads, refuse_host_reads
from gpt_guard.testing.recorder import Recorder

__all__ = ["HostReadError", "HostReads", "Injection", "Recorder", "inject_nonfinite", "refuse_host_reads"]
