"""README and guide show the command that is printed for their examples, run as scripts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gpt_guard import NonFiniteError
from gpt_guard.catalogue import finding
from gpt_guard.records.render import render_finding

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
IMPORTS = "import torch\nfrom torch import nn\n\nfrom gpt_guard import Guardian\n"


@pytest.mark.parametrize(
    ("document", "script", "head", "holds"),
    [
        ("README.md", "scorer.py", IMPORTS, "class Scorer"),
        ("docs/replay.md", "train.py", "", "class Attention"),
    ],
)
def test_the_command_that_a_document_shows_is_printed(
    document: str,
    script: str,
    head: str,
    holds: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / document).read_text(encoding="utf-8")
    (source,) = [head + block for block in BLOCK.findall(text) if holds in block]
    Path(script).write_text(source, encoding="utf-8")
    said = ""
    try:
        exec(compile(source, str(tmp_path / script), "exec", dont_inherit=True), {"__name__": "__main__"})
    except NonFiniteError as error:
        said = str(error)
    (command,) = re.findall(r"^ {4}(?: *open it with: )?(gpt-guard replay \S+ --model \S+)$", text, re.MULTILINE)
    printed = re.search(r"open it with: (.*)$", said + capsys.readouterr().out.rstrip())
    assert printed is not None
    assert printed[1] == command


def test_a_command_that_needs_two_lines_can_be_pasted() -> None:
    named = {"bundle": f"runs/{'x' * 40}/crash-step-000000", "bundle_model": "examples/mini_gpt.py:MiniGPT"}
    told = render_finding(finding("GG101", "It is bad.").model_copy(update=named))
    _, _, command = told.partition("open it with:")
    assert "\\\n" in command
    assert shlex.split(command.replace("\\\n", "")) == [
        "gpt-guard",
        "replay",
        named["bundle"],
        "--model",
        named["bundle_model"],
    ]
