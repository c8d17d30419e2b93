"""Checkpoints that say what they belong to: written whole or not at all, read as data, verified before a copy."""

from gpt_guard.checkpoint.load import LoadedCheckpoint, load_checkpoint
from gpt_guard.checkpoint.save import save_checkpoint

__all__ = ["LoadedCheckpoint", "load_checkpoint", "save_checkpoint"]
