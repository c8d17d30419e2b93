"""The table of verdicts: what was said in each test, one line a finding, so that a rewrite can show that all stays.

    pytest -n 2 -k "not -light" --verdicts tests/verdicts.tsv tests/gallery tests/cases ...
    python tests/verdicts.py OLD.tsv NEW.tsv

The first writes a table, the second compares two: a test is known by its name and parameters, wherever it lies. Only
public names are used, so the same file serves older and newer code. A finding is noted when a Guardian is left, when a
preflight report is made, when an error or a failed assertion is made of it, and when a test reads back what another
process has found. A test in which nothing is found has a line too. Tests that share the outcome of one run share its
findings: they stand under the first of them.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

COLUMNS = ("test", "code", "severity", "place", "line", "step", "causes", "operation")
_SILENT = "-"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--verdicts", metavar="FILE", help="write what is found in each test, one line a finding")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("verdicts") is not None:
        if config.pluginmanager.hasplugin("xdist") and config.getoption("dist") != "no":
            # Tests of one file share outcomes: which of them comes first must not depend on chance.
            config.option.dist = "loadfile"
        # A worker of xdist writes nothing: its reports go to the controller.
        writes = not hasattr(config, "workerinput")
        config.pluginmanager.register(Verdicts(Path(config.getoption("verdicts")), writes=writes))


class Verdicts:
    """Notes the findings of each test, in whichever process it runs; writes them as they come, in order at the end."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path, self.writes = path, writes
        self.lines: set[str] = set()
        self.skipped: set[str] = set()
        self.seen: set[str] = set()
        if writes:
            path.write_text("", encoding="utf-8")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Begin to listen where tests run: a controller of xdist runs none."""
        if session.items:
            _listen(self._note)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Hand over what was found; fixtures may find something as late as here."""
        yield
        name = f"{Path(str(item.path)).name}::{item.nodeid.partition('::')[2]}"
        for line in self.seen or {"\t".join([_SILENT] * (len(COLUMNS) - 1))}:
            item.user_properties.append(("verdict", f"{name}\t{line}"))
        self.seen = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take over what a test has found, so that a run which is broken off leaves what it had; nothing for skips."""
        if report.outcome == "skipped":
            self.skipped.add(report.nodeid)
        elif self.writes and report.when == "teardown" and report.nodeid not in self.skipped:
            new = {str(value) for key, value in report.user_properties if key == "verdict"} - self.lines
            self.lines |= new
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in new)

    def pytest_sessionfinish(self) -> None:
        """Write the table in order."""
        if self.writes:
            table = ["\t".join(COLUMNS), *sorted(self.lines)]
            self.path.write_text("\n".join(table) + "\n", encoding="utf-8")

    def _note(self, findings: Iterable[Any]) -> None:
        self.seen |= {"\t".join(_plain(cell) for cell in _cells(found)) for found in findings}


def _listen(note: Callable[[Iterable[Any]], None]) -> None:
    """Wrap the public ends through which findings leave."""
    import gpt_guard

    def after(owner: Any, name: str, findings: Callable[[Any], Iterable[Any]]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self, *args, **kwargs)
            finally:
                note(findings(self))

        setattr(owner, name, wrapped)

    def read_back(name: str) -> None:
        original = getattr(gpt_guard.Finding, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            note([found])
            return found

        setattr(gpt_guard.Finding, name, staticmethod(wrapped))

    after(gpt_guard.Guardian, "__exit__", lambda guardian: guardian.findings)
    after(gpt_guard.Guardian, "stop", lambda guardian: guardian.findings)
    after(gpt_guard.PreflightReport, "__init__", lambda report: getattr(report, "findings", ()))
    after(gpt_guard.CheckFailed, "__init__", lambda error: getattr(error, "findings", ()))
    after(gpt_guard.GuardError, "__init__", lambda error: [error.finding] if hasattr(error, "finding") else [])
    read_back("model_validate")
    read_back("model_validate_json")


def _cells(found: Any) -> Iterator[str]:
    yield found.code
    yield str(found.severity)
    yield " ".join(_path(path) for path in (found.module, found.parameter) if path is not None) or _SILENT
    yield _line(found.where)
    yield _SILENT if found.step is None else f"{found.step}" + _micro_batch(found)
    yield " ".join(_keys(found)) or _SILENT
    yield _SILENT if found.operation is None else _operation(found.operation)


def _micro_batch(found: Any) -> str:
    return "" if found.micro_batch is None else f"/{found.micro_batch}"


def _path(path: str) -> str:
    return path or "(model)"


def _line(where: Any) -> str:
    return _SILENT if where is None else f"{Path(where.file).name}: {where.text}"


def _keys(found: Any) -> list[str]:
    """The causes in order, by their keys in the catalogue; those that a test has made up by their first words."""
    from gpt_guard.catalogue import entries, entry

    known = {one.text: one.key for one in entry(found.code).causes} if found.code in entries() else {}
    return [known.get(cause) or "_".join(cause.split()[:4]) for cause in found.causes]


def _operation(made: Any) -> str:
    module = _SILENT if made.module is None else _path(made.module)
    causes = " ".join(each.key for each in made.causes)
    return f"{made.phase} {made.kind} {made.name} in {module}, {_line(made.where)}, {causes}"


def _plain(cell: str) -> str:
    return " ".join(cell.split())


def _table(path: str) -> dict[str, Counter[str]]:
    """Findings by test, its file left out."""
    tests: dict[str, Counter[str]] = defaultdict(Counter)
    for row in Path(path).read_text(encoding="utf-8").splitlines():
        test, _, found = row.partition("\t")
        if "::" not in test:
            continue
        tests[test.partition("::")[2]][found] += not found.startswith(_SILENT)
    return tests


def compare(old: str, new: str) -> int:
    """Print what differs between two tables, and return how many findings are lost or new in tests that both have."""
    before, after = _table(old), _table(new)
    for title, names in (("gone", before.keys() - after.keys()), ("added", after.keys() - before.keys())):
        findings = sum(sum((before if title == "gone" else after)[name].values()) for name in names)
        print(f"tests {title}: {len(names)}, with {findings} findings")
        for name in sorted(names):
            print(f"  {name}")
    both = before.keys() & after.keys()
    if not both:
        sys.exit("no test stands in both tables")
    lost = {name: +(before[name] - after[name]) for name in both}
    made = {name: +(after[name] - before[name]) for name in both}
    for name in sorted(both):
        for mark, some in (("-", lost), ("+", made)):
            for row in sorted(some[name].elements()):
                print(f"{mark} {name}\t{row}")
    everywhere = [set().union(*(+rows for rows in table.values())) for table in (before, after)]
    unsaid = sorted(everywhere[0] - everywhere[1])
    print(f"findings that no test has any longer: {len(unsaid)}")
    print("".join(f"  {row}\n" for row in unsaid), end="")
    count = sum(some[name].total() for name in both for some in (lost, made))
    print(f"tests in both: {len(both)}; findings lost or new in them: {count}")
    return count


if __name__ == "__main__":
    sys.exit(1 if compare(*sys.argv[1:3]) else 0)
