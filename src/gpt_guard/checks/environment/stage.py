"""Stage 1: where this runs, and whether that is where it should run."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from gpt_guard.catalogue import finding
from gpt_guard.checks.runner.base import Stage, Subject
from gpt_guard.records import CheckResult, Severity

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 6)
"""The oldest versions that this package is declared for and tested with."""


class EnvironmentStage(Stage):
    """Versions, accelerators, the chosen device, threads and determinism; needs nothing, reads no tensor."""

    number = 1
    name = "environment"
    title = "Environment"

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        yield self._version("Python", platform.python_version(), tuple(sys.version_info[:2]), MIN_PYTHON)
        yield self._version("torch", str(torch.__version__), torch_version(), MIN_TORCH)
        yield self._device(subject)
        if subject.model is not None:
            yield self._model_device(subject, subject.model)
        if subject.device.type == "cpu":
            yield self._threads()
        yield self._determinism(subject)
        yield self._settings()

    def _version(self, what: str, text: str, version: tuple[int, ...], oldest: tuple[int, ...]) -> CheckResult:
        expected, found = f"{'.'.join(map(str, oldest))} or newer", None
        if version < oldest:
            seen = f"{what} is {text}; {expected} is needed ({sys.executable})"
            found = finding("GG614", seen, likely=["environment"])
        return self.line(what, text, expected, found)

    def _device(self, subject: Subject) -> CheckResult:
        chosen, here = subject.device, accelerators()
        listed = ", ".join(here) or "no accelerator"
        if problem := unusable_device(chosen):
            cause = "index" if "only" in problem else "cpu_build" if torch.version.cuda is None else "hidden"
            seen = f"{chosen} was chosen: {problem}; torch sees {listed}"
            return self.line("device", chosen, "usable", finding("GG612", seen, likely=[cause]))
        if chosen.type != "cpu" or "device" not in subject.sources:
            return self.line("device", f"{chosen} ({listed})", "usable")
        if here:
            seen = f"the model is on the CPU ({subject.sources['device']}), and torch sees {listed}"
            found = finding("GG611", seen, likely=["not_moved"])
            return self.line("device", f"{chosen}, though here is {listed}", here[0], found, fails=Severity.WARNING)
        notes = []
        if nvidia_device():
            # A note: whoever installed a CPU build of torch on such a machine may have meant it.
            cause = "cpu_build" if torch.version.cuda is None else "hidden"
            seen = f"an NVIDIA device is here, but torch {torch.__version__} cannot see it"
            notes.append(finding("GG611", seen, likely=[cause]))
        return self.line("device", f"{chosen} ({listed})", "the best that torch can use", notes)

    def _model_device(self, subject: Subject, model: nn.Module) -> CheckResult:
        title, wanted = "model on the device", subject.device
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        elsewhere = {name: t.device for name, t in tensors.items() if not same_device(t.device, wanted)}
        if not elsewhere or (subject.sources.get("device") and len(elsewhere) < len(tensors)):
            # Nobody chose a device: a model laid out over several is the user's own plan.
            devices = ", ".join(sorted({str(tensor.device) for tensor in tensors.values()})) or "no tensors"
            return self.line(title, devices, wanted)
        name, device = next(iter(elsewhere.items()))
        seen = f"{len(elsewhere)} of {len(tensors)} tensors are not on {wanted}: {name} is on {device}"
        cause = "not_moved" if len(elsewhere) == len(tensors) else "in_parts"
        found = finding("GG618", seen, likely=[cause], parameter=name)
        return self.line(title, ", ".join(sorted({str(d) for d in elsewhere.values()})), wanted, found)

    def _threads(self) -> CheckResult:
        threads, cores = torch.get_num_threads(), usable_cores()
        notes = []
        if threads > cores:
            seen = f"torch uses {threads} threads; this process may use {cores:g} cores"
            notes.append(finding("GG613", seen, likely=["quota" if threads <= (os.cpu_count() or 1) else "set"]))
        return self.line("threads", threads, f"at most {cores:g}, one for each usable core", notes)

    def _determinism(self, subject: Subject) -> CheckResult:
        wanted = torch.are_deterministic_algorithms_enabled()
        benchmark = torch.backends.cudnn.benchmark
        cublas = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        measured = f"deterministic algorithms {_on(wanted)}, cudnn.benchmark {_on(benchmark)}, seed {subject.seed}"
        broken = []
        if wanted and subject.device.type == "cuda":
            broken = [cause for cause, holds in (("cublas", cublas is None), ("benchmark", benchmark)) if holds]
        seen = f"torch.use_deterministic_algorithms(True), but CUBLAS_WORKSPACE_CONFIG={cublas}, {measured}"
        found = finding("GG619", seen, likely=broken) if broken else None
        return self.line("determinism", measured, "no contradiction", found, fails=Severity.WARNING)

    def _settings(self) -> CheckResult:
        """What is set for the whole process and changes every model in it."""
        title, expected = "settings of torch", "float32 by default, gradients on, anomaly mode off"
        default, gradients, anomaly = process_settings()
        name = str(default).removeprefix("torch.")
        measured = f"{name} by default, gradients {_on(gradients)}, anomaly mode {_on(anomaly)}"
        found = []
        if not gradients:
            seen = "gradients are disabled where the check was called: torch.is_grad_enabled() is False"
            found.append(finding("GG514", seen, likely=["grad_disabled"], severity=Severity.ERROR, cause_id="grad"))
        if default in (torch.float64, torch.float16):
            seen = f"torch.get_default_dtype() is {name}"
            found.append(finding("GG514", seen, likely=["default_dtype"], cause_id="dtype"))
        if anomaly:
            seen = "anomaly mode is on: torch.is_anomaly_enabled() is True"
            found.append(finding("GG514", seen, likely=["anomaly"], cause_id="anomaly"))
        return self.line(title, measured, expected, found, fails=Severity.WARNING)


def process_settings() -> tuple[torch.dtype, bool, bool]:
    """The default dtype, whether gradients are enabled, and whether anomaly mode is."""
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_anomaly_enabled()


def accelerators() -> list[str]:
    """The accelerators that torch can use here, best first, with their names."""
    count = torch.cuda.device_count() if _sees("cuda") else 0
    found = [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(count)]
    return [*found, *(kind for kind in ("mps", "xpu") if _sees(kind))]


def best_device() -> torch.device:
    """What `auto` means: the first accelerator that torch can use, else the CPU."""
    here = accelerators()
    return torch.device(here[0].split(":")[0] if here else "cpu")


def unusable_device(device: torch.device) -> str:
    """Why a device cannot be used, in words; empty if it can."""
    if not _sees(device.type):
        return f"this torch ({torch.__version__}) sees no {device.type} device"
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        return f"there are only {torch.cuda.device_count()} CUDA devices"
    return ""


def same_device(one: torch.device, other: torch.device) -> bool:
    """True for the same device, `cuda` standing for whichever CUDA device it is."""
    return one.type == other.type and (None in (one.index, other.index) or one.index == other.index)


def nvidia_device() -> bool:
    """True where this machine or container has an NVIDIA device (Linux), whatever torch was built for."""
    return Path("/dev/nvidia0").exists()


def usable_cores() -> float:
    """Cores this process may use: its affinity, and the quota of its control group (Linux)."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1.0, min(affinity, int(quota) / int(period)))
    except (OSError, ValueError):  # no control group of version 2, or "max": no quota
        return affinity


def torch_version() -> tuple[int, ...]:
    """Major and minor version of torch, as numbers."""
    return tuple(int(part) for part in str(torch.__version__).split(".")[:2])


def _sees(kind: str) -> bool:
    """True where torch can use devices of this type; those that this package does not know are believed."""
    homes = {"cuda": torch.cuda, "mps": torch.backends.mps, "xpu": torch.xpu}
    return kind not in homes or bool(homes[kind].is_available())


def _on(flag: bool) -> str:
    return "on" if flag else "off"
