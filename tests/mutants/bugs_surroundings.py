"""Settings of the process that change what every model does in it."""

from __future__ import annotations

import torch

from gpt_guard.checks.environment import stage as environment

from .project import Project
from .table import mutant


@mutant("environment", "GG514", "default_dtype")
def the_default_dtype_is_float64(project: Project) -> None:
    project.patch(environment, "process_settings", lambda: (torch.float64, True, False))


@mutant("environment", "GG514", "default_dtype")
def the_default_dtype_is_float16(project: Project) -> None:
    project.patch(environment, "process_settings", lambda: (torch.float16, True, False))


@mutant("environment", "GG514", "grad_disabled")
def gradients_are_disabled(project: Project) -> None:
    project.patch(environment, "process_settings", lambda: (torch.float32, False, False))


@mutant("environment", "GG514", "anomaly")
def anomaly_mode_is_left_on(project: Project) -> None:
    project.patch(environment, "process_settings", lambda: (torch.float32, True, True))
