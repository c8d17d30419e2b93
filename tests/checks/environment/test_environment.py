"""Stage 1: versions, accelerators, the chosen device, threads, determinism."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpt_guard.checks.environment import stage as environment
from gpt_guard.checks.environment.stage import EnvironmentStage
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.run import check
from gpt_guard.records import CheckResult

from ..results import by_title

META = torch.device("meta")


def ask(subject: Subject) -> dict[str, CheckResult]:
    return by_title(EnvironmentStage().run(subject))


def codes(result: CheckResult) -> list[str]:
    return [finding.code for finding in result.findings]


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every machine: torch sees no accelerator, and none is here."""
    monkeypatch.setattr(environment, "accelerators", list)
    monkeypatch.setattr(environment, "nvidia_device", lambda: False)
    monkeypatch.setattr(environment, "usable_cores", lambda: 64)


def test_a_healthy_environment_passes_without_a_word() -> None:
    subject = Subject(model=nn.Linear(2, 2), sources={"device": "where the model is"})
    results = ask(subject)
    assert list(results) == [
        "Python",
        "torch",
        "device",
        "model on the device",
        "threads",
        "determinism",
        "settings of torch",
    ]
    assert all(result.status == "passed" and not result.findings for result in results.values())
    assert str(torch.__version__) == results["torch"].measured


def test_it_needs_nothing() -> None:
    assert EnvironmentStage().missing(Subject()) is None
    assert "model on the device" not in ask(Subject())


@pytest.mark.parametrize(("name", "line"), [("MIN_PYTHON", "Python"), ("MIN_TORCH", "torch")])
def test_an_old_version_fails(monkeypatch: pytest.MonkeyPatch, name: str, line: str) -> None:
    monkeypatch.setattr(environment, name, (99, 0))
    results = ask(Subject())
    assert codes(results[line]) == ["GG614"]
    assert results[line].expected == "99.0 or newer"


def test_a_model_forgotten_on_the_cpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "accelerators", lambda: ["cuda:0 A100"])
    subject = Subject(model=nn.Linear(2, 2), sources={"device": "where the model is"})
    result = ask(subject)["device"]
    assert (result.status, codes(result)) == ("failed", ["GG611"])
    assert "A100" in result.measured


def test_a_cpu_that_was_asked_for_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "accelerators", lambda: ["cuda:0 A100"])
    assert ask(Subject(model=nn.Linear(2, 2)))["device"].status == "passed"


def test_a_device_that_torch_cannot_see_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "nvidia_device", lambda: True)
    result = ask(Subject(sources={"device": "auto"}))["device"]
    assert (result.status, codes(result)) == ("passed", ["GG611"])


def test_a_device_that_is_not_there_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = ask(Subject(device=torch.device("cuda")))["device"]
    assert (result.status, codes(result)) == ("failed", ["GG612"])


def test_a_device_index_too_high_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert environment.unusable_device(torch.device("cuda:1")) == ""
    result = ask(Subject(device=torch.device("cuda:2")))["device"]
    assert "too high" in result.findings[0].causes[0]


def test_a_model_that_is_elsewhere_fails_and_says_which_part() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    result = ask(Subject(model=model))["model on the device"]
    assert (result.status, codes(result)) == ("failed", ["GG618"])
    assert result.findings[0].parameter == "1.weight"
    assert "Only a part was moved" in result.findings[0].causes[0]
    whole = ask(Subject(model=nn.Linear(2, 2, device="meta")))["model on the device"]
    assert "model.to(device) is missing" in whole.findings[0].causes[0]


def test_a_model_laid_out_over_devices_on_purpose_passes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    result = ask(Subject(model=model, sources={"device": "where the model is"}))["model on the device"]
    assert (result.status, result.measured) == ("passed", "cpu, meta")


def test_cuda_without_an_index_is_any_cuda_device() -> None:
    cuda, first, second = torch.device("cuda"), torch.device("cuda:0"), torch.device("cuda:1")
    assert environment.same_device(cuda, first)
    assert not environment.same_device(first, second)
    assert not environment.same_device(cuda, torch.device("cpu"))


def test_more_threads_than_cores_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "usable_cores", lambda: 0.5)
    result = ask(Subject())["threads"]
    assert (result.status, codes(result)) == ("passed", ["GG613"])


def test_the_cores_are_a_positive_number() -> None:
    monkeypatch_free = environment.usable_cores()
    assert monkeypatch_free >= 1


@pytest.mark.parametrize(("cublas", "benchmark", "code"), [(None, False, "GG619"), (":4096:8", True, "GG619")])
def test_half_a_determinism_fails_on_cuda(
    monkeypatch: pytest.MonkeyPatch, cublas: str | None, benchmark: bool, code: str
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if cublas is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", cublas)
    assert codes(ask(Subject(device=torch.device("cuda")))["determinism"]) == [code]
    assert ask(Subject())["determinism"].status == "passed"


def test_auto_takes_the_best_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.best_device() == torch.device("cpu")
    monkeypatch.setattr(environment, "accelerators", lambda: ["cuda:0 A100", "cuda:1 A100"])
    assert environment.best_device() == torch.device("cuda")


def test_gradients_disabled_fail_the_environment_and_crash_no_other_stage() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
    x = torch.randint(12, (4, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        stages = ["environment", "shapes", "gradients", "optimizer", "checkpoint"]
        report = check(model, batch=(x[:, :-1], x[:, 1:]), optimizer=optimizer, vocab_size=12, only=stages)
        assert not torch.is_grad_enabled()
    assert {(line.stage, line.title) for line in report.failed} == {("environment", "settings of torch")}, report


def test_anomaly_mode_and_float64_are_told() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autograd.set_detect_anomaly(True):
            report = check(nn.Embedding(4, 4), only=["environment"], device="cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    assert [finding.code for finding in report.findings if finding.code == "GG514"] == ["GG514"] * 2
