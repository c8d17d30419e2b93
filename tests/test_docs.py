"""What the documents show works: every Python block in them is run, and every public thing has a docstring."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpt_guard

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# file: (\w+)\.py\n")


def blocks(document: str) -> Iterator[tuple[str, Any, str]]:
    """Name, compiled code and text of each block; a traceback through one points into the document."""
    text = (ROOT / document).read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        source = block[1]
        line = text.count("\n", 0, block.start(1))
        named = FILE.match(source)
        code = compile("\n" * line + source, str(ROOT / document), "exec", dont_inherit=True)
        yield (named[1] if named else "", code, source)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to write into, from which the documents' files can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_readmes_blocks_run_one_after_the_other(elsewhere: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "readme"}
    ran = 0
    for _, code, _ in blocks("README.md"):
        exec(code, namespace)
        ran += 1
    assert ran >= 1


def test_the_guard_in_contributing_passes_its_own_tests(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = []
    for name, code, source in blocks("CONTRIBUTING.md"):
        (elsewhere / f"{name}.py").write_text(source, encoding="utf-8")
        if name.startswith("test_"):
            namespace: dict[str, Any] = {"__name__": name}
            exec(code, namespace)
            tests += [run for found, run in namespace.items() if found.startswith("test_")]
    monkeypatch.delitem(sys.modules, "loss_spike")
    assert len(tests) == 2
    for run in tests:
        run()


def public_things() -> Iterator[tuple[str, Any]]:
    names = [module.name for module in pkgutil.walk_packages(gpt_guard.__path__, "gpt_guard.")]
    for name in ["gpt_guard", *names]:
        module = importlib.import_module(name)
        for thing_name, thing in vars(module).items():
            is_ours = getattr(thing, "__module__", None) == name and not thing_name.startswith("_")
            if is_ours and (inspect.isclass(thing) or inspect.isfunction(thing)):
                yield f"{name}.{thing_name}", thing
                if inspect.isclass(thing):
                    yield from methods(f"{name}.{thing_name}", thing)


def methods(prefix: str, cls: type) -> Iterator[tuple[str, Any]]:
    fields = inspect.get_annotations(cls)  # the default of a field may be a function
    for name, member in vars(cls).items():
        is_method = inspect.isroutine(member) or isinstance(member, property)
        if is_method and not name.startswith("_") and name not in fields:
            # Through the class: inspect.getdoc then falls back on the method that this one overrides.
            yield f"{prefix}.{name}", getattr(cls, name)


def test_every_public_thing_says_what_it_is_for() -> None:
    things = dict(public_things())
    assert "gpt_guard.callbacks.base.Guard.judge" in things
    assert [name for name, thing in things.items() if not inspect.getdoc(thing)] == []
