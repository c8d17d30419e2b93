"""Where observations and findings go."""

from gpt_guard.sinks.base import Sink
from gpt_guard.sinks.console import ConsoleSink
from gpt_guard.sinks.files import JsonlSink

__all__ = ["ConsoleSink", "JsonlSink", "Sink"]
