"""The facts that a person who installs or clones the project relies on."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent


def requirements(lines: list[str]) -> dict[str, Requirement]:
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_distribution_is_ours_and_installed(project: dict[str, Any]) -> None:
    assert project["name"] == "gpt-guard-torch"
    installed = metadata.metadata("gpt-guard-torch")
    assert installed["Version"] == project["version"]
    assert installed["Requires-Python"] == ">=3.11"
    assert installed["License-Expression"] == "MIT"


def test_it_needs_torch_pydantic_typer_and_rich_and_nothing_else(project: dict[str, Any]) -> None:
    needed = requirements(project["dependencies"])
    assert set(needed) == {"torch", "pydantic", "typer", "rich"}
    assert str(needed["torch"].specifier) == ">=2.6"
    assert str(needed["pydantic"].specifier) == ">=2.8"


def test_the_development_tools_include_what_the_examples_need(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    assert set(extras["examples"]) <= set(extras["dev"])
    assert set(extras["examples"]) <= set(extras["docs"])


@pytest.mark.parametrize("extra", ["lightning", "transformers", "accelerate"])
def test_the_frameworks_are_installed_for_the_tests(project: dict[str, Any], extra: str) -> None:
    extras = project["optional-dependencies"]
    assert set(extras[extra]) <= set(extras["dev"])


def test_releases_that_carried_malware_are_excluded(project: dict[str, Any]) -> None:
    wanted = requirements(project["optional-dependencies"]["lightning"])
    for requirement in wanted.values():
        assert not any(requirement.specifier.contains(version) for version in ("2.6.2", "2.6.3"))


def test_what_make_installs_is_what_the_project_allows(project: dict[str, Any]) -> None:
    allowed = requirements(
        project["dependencies"] + project["optional-dependencies"]["dev"] + project["optional-dependencies"]["docs"]
    )
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = requirements([line for line in lines if not line.startswith("#")])
    assert set(pinned) == set(allowed)
    for name, requirement in pinned.items():
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        assert allowed[name].specifier.contains(pin.version), f"{requirement} against {allowed[name]}"


def test_the_console_script_starts() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="gpt-guard")
    assert script.value == "gpt_guard.cli.app:main"
    assert callable(script.load())


def test_types_and_words_are_part_of_the_package() -> None:
    package = resources.files("gpt_guard")
    assert package.joinpath("py.typed").is_file()
    assert any(file.name.endswith(".toml") for file in package.joinpath("catalogue", "words").iterdir())


def test_the_first_screen_of_the_readme_says_how_to_start(readme: str) -> None:
    first_screen = "\n".join(readme.splitlines()[:60])
    for line in ("make demo", "make test", "pip install gpt-guard-torch", "from gpt_guard import Guardian"):
        assert line in first_screen


def test_every_make_target_that_is_told_of_exists(readme: str) -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    told = set(re.findall(r"(?:`|^)make ([a-z-]+)", readme + contributing + makefile, re.MULTILINE))
    assert {"demo", "test", "check"} <= told <= targets


def test_ci_runs_the_checks_and_the_readmes_test_command() -> None:
    commands = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert "make check" in commands
    assert "make test" in commands


def test_the_changelog_knows_this_version(project: dict[str, Any]) -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(?P<version>[^\]]+)\]", changelog, re.MULTILINE)
    assert newest is not None
    assert Version(newest["version"]) == Version(project["version"])
