"""The words of each finding code, of symptoms and of what operations point to; data, without torch."""

from gpt_guard.catalogue.entries import Cause, Entry, Remedy, entries, entry, finding

__all__ = ["Cause", "Entry", "Remedy", "entries", "entry", "finding"]
