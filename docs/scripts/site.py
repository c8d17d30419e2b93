"""What the site needs beside its pages: a folder in which their commands run, and a page for each finding code."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from gpt_guard.catalogue import Entry, entries

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "docs-work"
SPECIAL = re.compile(r"([\[\]*_<>|])")
FAMILIES = {
    "GG1": "Not finite",
    "GG2": "Gradients and the order of the loop",
    "GG3": "Parameters and updates",
    "GG4": "Learning rate and schedule",
    "GG5": "Modes and precision",
    "GG6": "Data, loss, model, generation",
    "GG7": "Checkpoints and caches",
    "GG8": "Several processes",
    "GG9": "What could not be seen",
}


def on_pre_build(config: MkDocsConfig) -> None:
    """Lay out the scripts that the pages run, each page's commands beside them; nothing of an earlier build is left."""
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.copytree(ROOT / "docs" / "scripts", WORK, ignore=shutil.ignore_patterns("site.py", "__pycache__"))
    for example in (ROOT / "examples").glob("*.py"):
        shutil.copy(example, WORK)
    shutil.copytree(ROOT / "benchmarks", WORK / "benchmarks")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # One width for all that is printed; and threads that share this little work only wait for each other.
    os.environ |= {"COLUMNS": "96", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the finding codes, made from the catalogue."""
    known = entries()
    files.append(File.generated(config, "codes/index.md", content="\n".join(overview(known))))
    for each in known.values():
        files.append(File.generated(config, f"codes/{each.code}.md", content="\n".join(page(each))))
    return files


def plain(text: str) -> str:
    """Text of the catalogue as Markdown that shows it as it is; what stands between backticks is code already."""
    parts = text.split("`")
    return "`".join(part if place % 2 else SPECIAL.sub(r"\\\1", part) for place, part in enumerate(parts))


def overview(known: dict[str, Entry]) -> Iterator[str]:
    """All codes, family by family."""
    yield "# Finding codes\n"
    yield "Each finding has a code that stays. `gpt-guard explain CODE` prints the same where there is no browser.\n"
    for family, title in FAMILIES.items():
        yield f"\n## {family}xx · {title}\n\n| code | finding | severity |\n|---|---|---|"
        for each in known.values():
            if each.code.startswith(family):
                yield f"| [{each.code}]({each.code}.md) | {plain(each.title)} | {each.severity.value} |"


def page(each: Entry) -> Iterator[str]:
    """What the catalogue says of one code."""
    yield f"# {each.code} · {plain(each.title)}\n\n*{each.severity.value}*\n\n{plain(each.meaning)}\n"
    yield "## Likely causes\n"
    for place, cause in enumerate(each.causes, start=1):
        yield f"{place}. {plain(cause.text)}"
    yield f"\n## The test that tells them apart\n\n{plain(each.next_test)}\n\n## Fix\n\n{plain(each.fix)}\n"
