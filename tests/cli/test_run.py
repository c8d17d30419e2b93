"""`gpt-guard run`: scripts that know nothing of gpt_guard, run as python would run them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from typer.testing import CliRunner, Result

from gpt_guard.cli.app import app

PLAIN = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
with torch.no_grad():
    model(torch.randn(2, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(8):
    x = torch.randn(8, 4)
    # HERE
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
    optimizer.step()
print("weights", [parameter.sum().item() for parameter in model.parameters()])
"""


@pytest.fixture(autouse=True)
def as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command changes what belongs to the process; each test gives it back, and no patch may be left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    call, made = nn.Module.__call__, Optimizer.__init__
    yield
    assert nn.Module.__call__ is call
    assert Optimizer.__init__ is made
    assert not hasattr(torch.autograd.backward, "__wrapped__")


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def ran(script: str, *arguments: str, options: tuple[str, ...] = ()) -> Result:
        (tmp_path / "train.py").write_text(script, encoding="utf-8")
        return CliRunner().invoke(app, ["run", *options, "train.py", *arguments])

    return ran


def test_a_plain_loop_is_watched_and_told_of_on_stderr(run: Run) -> None:
    done = run(PLAIN)
    assert done.exit_code == 0
    assert done.stdout.startswith("weights")
    assert "watching Sequential (49 parameters) and AdamW" in done.stderr
    assert "8 steps" in done.stderr


def test_nothing_in_the_run_differs_from_a_bare_one(run: Run, tmp_path: Path) -> None:
    done = run(PLAIN)
    bare = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == bare.stdout


def test_a_halt_prints_the_finding_from_the_scripts_line_on_and_fails(run: Run) -> None:
    done = run(PLAIN.replace("# HERE", "x[0, 0] = float('nan') if step == 5 else 0.0"))
    assert done.exit_code == 1
    assert "GG103 Non-finite values in the batch" in done.stderr
    assert "step 5" in done.stderr
    assert "cli/run.py" not in done.stderr
    assert "train.py" in done.stderr
    assert "weights" not in done.stdout


@pytest.mark.parametrize(
    ("act", "code", "said"),
    [
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("raise SystemExit(7)", 7, "0 steps"),
        ("raise SystemExit", 0, "0 steps"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
    ],
)
def test_other_ends_keep_their_exit_code(run: Run, act: str, code: int, said: str) -> None:
    done = run(PLAIN.replace("optimizer.step()", act))
    assert done.exit_code == code
    assert said in done.stderr


SEES = """
import sys
print(__name__, sys.argv, sys.path[0] == r"{folder}", __file__ == r"{folder}/train.py", __package__, __spec__)
print(sys.modules["__main__"].__dict__ is globals(), sys.excepthook is sys.__excepthook__)
"""


def test_a_script_sees_what_python_gives(run: Run, tmp_path: Path) -> None:
    script = SEES.format(folder=tmp_path)
    done = run(script, "--lr", "1", "--help", "-m", options=("--strict",))
    assert done.stdout.splitlines() == [
        "__main__ ['train.py', '--lr', '1', '--help', '-m'] True True None None",
        "True True",
    ]
    command = [sys.executable, "train.py", "--lr", "1", "--help", "-m"]
    bare = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == bare.stdout


def test_a_module_is_run_as_python_does(tmp_path: Path) -> None:
    package = tmp_path / "project_under_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("LR = 0.01\n", encoding="utf-8")
    script = PLAIN + "\nimport sys\nfrom .parts import LR\nprint(__name__, __package__, sys.argv, sys.path[0])\n"
    (package / "train.py").write_text(script, encoding="utf-8")
    command = ["-m", "project_under_test.train", "--epochs", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "gpt_guard", "run", *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    bare = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == bare.stdout
    assert "watching Sequential" in done.stderr


def test_a_module_that_is_not_there_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["run", "-m", "no_such_module_here"])
    assert done.exit_code == 2
    assert "No module named no_such_module_here" in done.stderr


def test_a_module_whose_own_import_fails_fails_as_it_would(tmp_path: Path) -> None:
    (tmp_path / "half_a_project.py").write_text("import not_there_either\n", encoding="utf-8")
    done = CliRunner().invoke(app, ["run", "-m", "half_a_project"])
    assert done.exit_code == 1
    assert "No module named 'not_there_either'" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["nowhere.py"]])
def test_nothing_to_run_is_said(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["run", *arguments])
    assert done.exit_code == 2
    assert done.stderr.startswith("gpt-guard run: ")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print('hello')", "this program made no optimizer"),
        ("import torch\nw = torch.ones(2, requires_grad=True)\ntorch.optim.SGD([w]).step()", "no module was called"),
        (PLAIN.replace("range(8)", "[]"), "no module was called"),
    ],
    ids=["nothing", "no-module", "no-steps"],
)  # fmt: skip
def test_a_script_that_trains_no_model_is_told_so(run: Run, script: str, said: str) -> None:
    done = run(script)
    assert "nothing was watched" in done.stderr
    assert said in done.stderr


OWN = """
import torch
from torch import nn
from gpt_guard import Guardian

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model(torch.randn(2, 4))
with Guardian(model, optimizer, sinks=[]) as guardian:
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
print(guardian.step, guardian.findings)
"""


def test_a_script_with_a_guardian_of_its_own_is_only_run(run: Run) -> None:
    done = run(OWN)
    assert done.exit_code == 0
    assert done.stdout == "4 ()\n"
    assert "has a Guardian of its own" in done.stderr
    early = run(OWN.replace("model(torch.randn(2, 4))\n", ""))
    assert early.stdout == "4 ()\n"
    assert "watching" not in early.stderr


GAN = """
import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
ours = torch.optim.Adam(generator.parameters(), lr=1e-3)
theirs = torch.optim.Adam(critic.parameters(), lr=1e-3)
score = nn.BCEWithLogitsLoss()
for step in range(10):
    fake = generator(torch.randn(16, 2))
    theirs.zero_grad()
    real, made = critic(torch.randn(16, 4)), critic(fake.detach())
    (score(real, torch.ones_like(real)) + score(made, torch.zeros_like(made))).backward()
    theirs.step()
    ours.zero_grad()
    made = critic(fake)
    score(made, torch.ones_like(made)).backward()
    ours.step()
"""


def test_of_two_models_the_first_that_trains_is_watched(run: Run) -> None:
    done = run(GAN)
    assert done.exit_code == 0
    assert "watching Sequential (60 parameters) and Adam\n" in done.stderr
    assert "findings     none" in done.stderr


PARTS = """
import torch
from torch import nn

torch.manual_seed(0)
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
whole = Whole()
optimizer = torch.optim.AdamW([{"params": whole.body.parameters()}, {"params": whole.head.parameters(), "lr": 0.1}])
for step in range(6):
    x = torch.randn(8, 4)
    optimizer.zero_grad()
    nn.functional.mse_loss(whole.head(whole.body(x)), x.sum(1, keepdim=True)).backward()
    optimizer.step()
"""


def test_a_model_that_is_only_called_in_parts_is_watched_whole(run: Run) -> None:
    done = run(PARTS)
    assert "watching Whole (49 parameters) and AdamW" in done.stderr
    assert "6 steps" in done.stderr


TWO_OPTIMIZERS = PLAIN.replace(
    "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)",
    "optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.01)\n"
    "other = torch.optim.SGD(model[2].parameters(), lr=0.01)",
).replace("    optimizer.step()", "    optimizer.step(), other.step(), other.zero_grad()")


def test_all_optimizers_of_the_model_are_taken(run: Run) -> None:
    done = run(TWO_OPTIMIZERS)
    assert "and AdamW and SGD" in done.stderr


def test_a_run_dir_gets_the_log(run: Run, tmp_path: Path) -> None:
    run(PLAIN, options=("--run-dir", "out"))
    assert (tmp_path / "out" / "steps.jsonl").is_file()
    assert (tmp_path / "out" / "run_report.json").is_file()


LOOPS = PLAIN.replace("for step in range(8):", "for step in range(10**9):").replace(
    "# HERE", "print(step, flush=True) if step == 20 else None"
)


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is sent otherwise there")
def test_a_ctrl_c_leaves_cleanly(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOPS, encoding="utf-8")
    command = [sys.executable, "-m", "gpt_guard", "run", "train.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "20\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "steps" in errors
    assert "Traceback" not in errors


TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32))
rows = [{"input_ids": row, "labels": row.clone()} for row in torch.randint(0, 32, (32, 12))]
Trainer(model, TrainingArguments(output_dir="out", max_steps=6, report_to=[], use_cpu=True, disable_tqdm=True,
    per_device_train_batch_size=4, save_strategy="no", dataloader_pin_memory=False), train_dataset=rows).train()
"""

LIGHTNING = """
import warnings
warnings.simplefilter("ignore")
import lightning
import torch
from torch import nn

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.head(torch.tanh(self.body(batch))), batch.sum(1, keepdim=True))
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

lightning.seed_everything(0)
data = torch.utils.data.DataLoader(torch.randn(48, 4), batch_size=8)
lightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
    enable_model_summary=False, devices=1).fit(Net(), data)
"""


@pytest.mark.parametrize(
    ("script", "package", "model"),
    [(TRAINER, "transformers", "LlamaForCausalLM"), (LIGHTNING, "lightning", "Net")],
    ids=["transformers", "lightning"],
)
def test_a_framework_owns_the_loop(tmp_path: Path, script: str, package: str, model: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed here")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "-m", "gpt_guard", "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"watching {model} (" in done.stderr
    assert "AdamW\n" in done.stderr
    assert "6 steps" in done.stderr
    assert "findings     none" in done.stderr
