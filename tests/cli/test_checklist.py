"""Checklists: every item is answered from a run directory where it can be, and says what to run where it cannot."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from typer.testing import CliRunner

from char_tokenizer import CharTokenizer
from gpt_guard import Guardian, NonFiniteError
from gpt_guard.checks.runner.base import NAMES
from gpt_guard.checks.runner.report import PreflightReport
from gpt_guard.cli.app import app
from gpt_guard.cli.checklists import PHASES, Phase, answers, checklists, open_run
from gpt_guard.cli.checklists.questions import ANSWERS
from gpt_guard.errors import GuardUsageError
from gpt_guard.records import CheckResult
from mini_gpt import MiniGPT, MiniGPTConfig

TEXT = "".join(f"{n} and {n + 1} make {2 * n + 1}. " for n in range(200))
TOKENIZER = CharTokenizer.from_text(TEXT)
STEPS = 60
COMMANDS: dict[str, Any] = vars(typer.main.get_command(app))["commands"]


def run(*args: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["checklist", *map(str, args)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small training that went well, as the example leaves it."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    config = MiniGPTConfig(len(TOKENIZER), block_size=16, embedding_dim=32, num_heads=2, num_layers=1, dropout=0.0)
    model, ids = MiniGPT(config), torch.tensor(TOKENIZER.encode(TEXT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    (folder / "tokenizer").mkdir()
    (folder / "checkpoints").mkdir()
    TOKENIZER.save(folder / "tokenizer" / "char_tokenizer.json")
    with Guardian(model, optimizer, tokenizer=TOKENIZER, run_dir=folder, sinks=[], summary=False) as guardian:
        for step in range(1, STEPS + 1):
            rows = ids[torch.randint(len(ids) - 17, (8, 1)) + torch.arange(17)]
            optimizer.zero_grad()
            loss = model(rows[:, :-1], rows[:, 1:])[1]
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                guardian.log(val_loss=loss.item(), val_accuracy=step / 100)
    payload = {
        "model_state_dict": model.state_dict(),
        "config": dataclasses.asdict(config),
        "step": STEPS,
        "tokenizer_fingerprint": TOKENIZER.fingerprint,
        "settings": {"steps": STEPS},
    }
    torch.save(payload, folder / "checkpoints" / "best.pt")
    return folder


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    for path in trained.rglob("*"):
        if path.is_file():
            target = tmp_path / "run" / path.relative_to(trained)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path / "run"


def known(folder: Path, phase: Phase) -> dict[str, bool | None]:
    return {item.key: answer.ok for item, answer in answers(phase, open_run(folder))}


def change_steps(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Rewrite the step lines of the run log; None drops one."""
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    changed = [change(line) if line["kind"] == "step" else line for line in lines]
    (folder / "steps.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in changed if line is not None))


def append(folder: Path, **line: Any) -> None:
    with (folder / "steps.jsonl").open("a") as log:
        log.write(f"{json.dumps(line)}\n")


def change_checkpoint(folder: Path, **parts: Any) -> None:
    path = folder / "checkpoints" / "best.pt"
    torch.save({**torch.load(path), **parts}, path)


def finding(folder: Path, code: str, severity: str) -> None:
    append(folder, kind="finding", code=code, title="A title", severity=severity, seen="seen so", step=7)


def test_every_item_can_be_answered_or_says_what_to_run() -> None:
    for phase in PHASES:
        items = checklists()[phase]
        assert len(items) >= 10
        assert len({item.key for item in items}) == len(items)
        assert all(item.stage is None or item.stage in NAMES for item in items)
        assert {item.key for item in items if item.stage is None} <= set(ANSWERS[phase])
        assert set(ANSWERS[phase]) <= {item.key for item in items}


def test_commands_in_the_lists_can_be_run() -> None:
    for phase in PHASES:
        for item in checklists()[phase]:
            if item.run.startswith("gpt-guard"):
                _, name, *args = shlex.split(item.run.partition(", ")[0].partition(" for each")[0])
                asked = COMMANDS[name].make_context(name, args).params
                assert set(asked.get("only") or ()) <= set(NAMES)
            else:
                assert "gpt_guard" in item.run or "ardian" in item.run or "RUN_DIR" in item.run or "save" in item.run


def test_without_a_run_directory_it_is_a_list_of_commands() -> None:
    for phase in PHASES:
        status, out, err = run(phase)
        assert (status, err) == (0, "")
        items = checklists()[phase]
        commands = sum(item.run.startswith("gpt-guard ") for item in items)
        assert (out.count("run: "), out.count("do: ")) == (commands, len(items) - commands)
        assert all(item.ask in " ".join(out.split()) for item in items)
    assert len(run()[1]) > len(run("before")[1])


def test_a_good_run_has_no_cross(trained: Path) -> None:
    status, out, err = run(trained)
    assert (status, err) == (0, "")
    assert "✗" not in out
    assert set(known(trained, "during").values()) == {True} | {None for _ in range(1)}
    assert [key for key, ok in known(trained, "during").items() if ok is None] == ["pace"]
    assert [key for key, ok in known(trained, "after").items() if ok is None] == ["test", "generation", "report"]
    before = known(trained, "before")
    assert [key for key, ok in before.items() if ok] == ["environment", "initial-loss", "gradients", "optimizer"]
    assert f"not known from here; run: gpt-guard check --json {trained}/report.json" in " ".join(out.split())


def test_a_report_answers_what_preflight_asked(run_dir: Path) -> None:
    lines = [
        CheckResult(stage="batches", title="shift", status="passed", measured="1"),
        CheckResult(stage="causality", title="suffix", status="passed", measured="0"),
        CheckResult(stage="causality", title="gradient", status="failed", measured="0.3"),
        CheckResult(stage="overfit", title="Overfit", status="skipped", measured="skipped on request"),
        CheckResult(stage="gradients", title="norm", status="failed", measured="0"),
    ]
    PreflightReport(checks=tuple(lines)).save(run_dir / "report.json")
    before = known(run_dir, "before")
    assert (before["batches"], before["causality"], before["overfit"]) == (True, False, None)
    assert before["gradients"] is False, "what preflight found counts more than what no guard said"
    assert known(run_dir, "after")["report"] is True
    status, out, _ = run("before", run_dir)
    assert status == 1
    assert "gradient: 0.3 (report.json)" in out


Damage = Callable[[Path], None]


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def two_test_losses(folder: Path) -> None:
    for step in (1, 2):
        append(folder, kind="metrics", step=step, metrics={"test_loss": 1.0})


def _set(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda line: {**line, **values}


DAMAGES: list[tuple[Phase, str, Damage]] = [
    ("before", "initial-loss", lambda run: change_steps(run, _set(loss=9.0))),
    ("before", "gradients", lambda run: finding(run, "GG202", "warning")),
    ("before", "optimizer", lambda run: finding(run, "GG302", "warning")),
    ("during", "log", lambda run: change_steps(run, lambda line: None if line["step"] == 30 else line)),
    ("during", "finite", lambda run: change_steps(run, lambda at: {**at, "loss": "NaN"} if at["step"] == 9 else at)),
    ("during", "falls", lambda run: change_steps(run, lambda line: {**line, "loss": 2.0 + line["step"]})),
    ("during", "findings", lambda run: finding(run, "GG209", "error")),
    ("during", "grad-norm", lambda run: finding(run, "GG203", "warning")),
    ("during", "lr", lambda run: finding(run, "GG403", "warning")),
    ("during", "updates", lambda run: finding(run, "GG308", "warning")),
    ("during", "skipped", lambda run: change_steps(run, lambda line: {**line, "skipped": line["step"] % 2 == 0})),
    ("during", "validation-best", lambda run: append(run, kind="metrics", step=60, metrics={"val_loss": 9.0})),
    ("during", "saved", lambda run: change_checkpoint(run, step=5)),
    ("after", "finished", lambda run: change_checkpoint(run, settings={"steps": 1000})),
    ("after", "loads", lambda run: write(run / "checkpoints" / "best.pt", b"PK\x03\x04 cut off")),
    ("after", "repeatable", lambda run: change_checkpoint(run, config=None)),
    ("after", "tokenizer", lambda run: change_checkpoint(run, tokenizer_fingerprint="0" * 64)),
    ("after", "best", lambda run: change_checkpoint(run, step=20)),
    ("after", "overfitted", lambda run: append(run, kind="metrics", step=60, metrics={"val_loss": 9.0})),
    ("after", "test", lambda run: two_test_losses(run)),
    ("after", "unresolved", lambda run: finding(run, "GG206", "warning")),
    ("after", "report", lambda run: write(run / "report.json", b"{")),
]


@pytest.mark.parametrize(("phase", "key", "damage"), DAMAGES, ids=[f"{phase}-{key}" for phase, key, _ in DAMAGES])
def test_each_fault_is_a_cross_on_its_line(run_dir: Path, phase: Phase, key: str, damage: Damage) -> None:
    assert known(run_dir, phase)[key] is not False
    damage(run_dir)
    assert known(run_dir, phase)[key] is False
    status, out, _ = run(phase, run_dir)
    assert status in (1, 2)
    assert "✗" in out


def test_weights_that_are_not_finite_are_named(run_dir: Path) -> None:
    weights = torch.load(run_dir / "checkpoints" / "best.pt")["model_state_dict"]
    weights["head.weight"][0, 0] = math.nan
    change_checkpoint(run_dir, model_state_dict=weights)
    assert "not finite: head.weight" in " ".join(run("after", run_dir)[1].split())


def test_a_validation_loss_that_never_left_log_v(run_dir: Path) -> None:
    lines = [line for line in (run_dir / "steps.jsonl").read_text().splitlines() if '"metrics"' not in line]
    (run_dir / "steps.jsonl").write_text("\n".join(lines) + "\n")
    assert known(run_dir, "after")["below-even"] is None
    append(run_dir, kind="metrics", step=59, metrics={"val_loss": math.log(len(TOKENIZER))})
    assert known(run_dir, "after")["below-even"] is False


@pytest.mark.parametrize(("slower", "ok"), [(1.2, True), (3.0, False)])
def test_steps_that_get_slower(run_dir: Path, slower: float, ok: bool) -> None:
    first = json.loads((run_dir / "steps.jsonl").read_text().splitlines()[1])
    for step in range(STEPS, 400):
        append(run_dir, **{**first, "step": step})
    factor = (slower - 1) / 400
    change_steps(run_dir, lambda line: {**line, "step_time": 0.01 * (1 + factor * line["step"])})
    assert known(run_dir, "during")["pace"] is ok


def test_a_few_steps_that_other_programs_slowed_down_are_no_cross(run_dir: Path) -> None:
    first = json.loads((run_dir / "steps.jsonl").read_text().splitlines()[1])
    for step in range(STEPS, 400):
        append(run_dir, **{**first, "step": step})
    change_steps(run_dir, lambda at: {**at, "step_time": 1.0 if at["step"] > 370 and at["step"] % 2 else 0.01})
    assert known(run_dir, "during")["pace"] is True


def test_a_guard_that_was_not_on_answers_nothing(run_dir: Path) -> None:
    text = (run_dir / "steps.jsonl").read_text()
    (run_dir / "steps.jsonl").write_text(text.replace('"GradNormMonitor"', '"MyOwnGuard"', 1))
    assert known(run_dir, "during")["grad-norm"] is None
    assert "GradNormMonitor was not on" in run("during", run_dir)[1]


def train_until(folder: Path, bad: int, *, steps: int = 6, goes_on: bool = False) -> None:
    """A run whose batch holds NaN at one step; with `goes_on` the loop leaves that step out."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, run_dir=folder, sinks=[], summary=False, replay=False) as guardian:
        for step in range(steps):
            x = torch.randn(8, 4)
            if step == bad:
                x[0] = math.nan
            optimizer.zero_grad()
            try:
                model(x).square().mean().backward()
            except NonFiniteError:
                if not goes_on:
                    raise
                continue
            optimizer.step()
        assert guardian.latest is not None


def test_a_run_that_was_halted_did_not_come_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError):
        train_until(tmp_path, bad=3)
    status, out, _ = run("after", tmp_path)
    assert status == 1
    assert "✗  The run came to its end: halted by GG103 Non-finite values in the batch (step 3)" in out
    # A start anew in the same folder is another run.
    train_until(tmp_path, bad=-1)
    assert known(tmp_path, "after")["finished"] is None


def test_a_run_that_went_on_after_a_halt_is_none(tmp_path: Path) -> None:
    train_until(tmp_path, bad=3, goes_on=True)
    assert known(tmp_path, "after")["finished"] is None


def test_a_halt_after_a_step_may_stand_before_that_steps_own_line(run_dir: Path) -> None:
    last = json.loads((run_dir / "steps.jsonl").read_text().splitlines()[1])
    halt = {"kind": "finding", "action": "halt", "code": "GG106", "title": "A title", "severity": "error", "seen": "so"}
    with (run_dir / "steps.jsonl").open("a") as log:
        for line in ({**halt, "step": STEPS}, {**last, "step": STEPS}):
            log.write(json.dumps(line, separators=(",", ":")) + "\n")
    assert known(run_dir, "after")["finished"] is False


def test_one_of_a_kind_is_said_in_the_singular(tmp_path: Path) -> None:
    train_until(tmp_path, bad=-1, steps=1)
    said = {item.key: answer.seen for item, answer in answers("during", open_run(tmp_path))}
    assert said["finite"] == "1 loss"


@pytest.mark.parametrize("name", ["steps.jsonl", "report.json"])
def test_a_damaged_file_is_named_and_exits_with_2(run_dir: Path, name: str) -> None:
    (run_dir / name).write_text("no json\n")
    status, out, err = run("after", run_dir)
    assert status == 2
    assert name in err
    assert "After training" in out


@pytest.mark.parametrize(
    ("args", "said"), [(("later",), "no checklist 'later'"), (("during", "nowhere"), "no such folder")]
)
def test_what_cannot_be_used_exits_with_2(tmp_path: Path, args: tuple[str, ...], said: str) -> None:
    status, out, err = run(*args)
    assert (status, out) == (2, "")
    assert said in err


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GuardUsageError, match=r"neither steps\.jsonl nor report\.json"):
        open_run(tmp_path)


def test_output_fits_a_terminal_without_ticks(trained: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from gpt_guard.cli.app import main; main()", "checklist", str(trained)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    text = done.stdout.decode("ascii")
    assert "   + " in text
    assert all(len(line) <= 100 for line in text.splitlines() if not re.search("(run|do): ", line))
