"""Answer a checklist from a run directory: by the report's own lines where there are any, else by what the run left."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpt_guard.cli.checklists import after, before, during
from gpt_guard.cli.checklists.lists import Answer, Item, Phase, checklists
from gpt_guard.cli.checklists.run_dir import REPORT_FILE, RunDir

Answering = Callable[[RunDir], Answer]
ANSWERS: dict[Phase, dict[str, Answering]] = {
    "before": before.ANSWERS,
    "during": during.ANSWERS,
    "after": after.ANSWERS,
}
NOT_KNOWN = Answer(None, "")


def answers(phase: Phase, run: RunDir | None) -> Iterator[tuple[Item, Answer]]:
    """Each item of one list with its answer; without a run directory none is known."""
    for item in checklists()[phase]:
        yield item, NOT_KNOWN if run is None else _answer(item, ANSWERS[phase].get(item.key), run)


def _answer(item: Item, own: Answering | None, run: RunDir) -> Answer:
    reported = _reported(item.stage, run) if item.stage is not None else NOT_KNOWN
    return own(run) if reported.ok is None and own is not None else reported


def _reported(stage: str, run: RunDir) -> Answer:
    """What preflight found: failed if one line of the stage did, passed if one did and none failed."""
    lines = [line for line in run.report.checks if line.stage == stage] if run.report is not None else []
    failed = [line for line in lines if line.status == "failed"]
    passed = [line for line in lines if line.status == "passed"]
    if failed:
        return Answer(False, "; ".join(f"{line.title}: {line.measured}" for line in failed) + f" ({REPORT_FILE})")
    if passed:
        said = f"{len(passed)} lines passed" if len(passed) > 1 else passed[0].measured
        return Answer(True, f"{said} ({REPORT_FILE})")
    return NOT_KNOWN
