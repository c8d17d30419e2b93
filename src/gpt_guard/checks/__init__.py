"""Preflight: one file per stage, from the environment to generation."""
