"""Replay: run a failing step again under the microscope, and leave no trace of it."""
