"""The table at the end of a run: what happened, what was found, who watched, and what nobody watched."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpt_guard.records import Finding, Report, Severity
from gpt_guard.records.render import clean, learning_rate, number

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}


def summary_text(report: Report) -> str:
    """The report as a table, ready to be written: with colours where stderr is a terminal, plain anywhere else."""
    # rich asks this console for width, colours and encoding only; the text is caught, never written by it.
    console = Console(file=sys.stderr, force_jupyter=False, highlight=False)
    with console.capture() as caught:
        console.print(summary_table(report))
    return caught.get()


def summary_table(report: Report) -> Table:
    """The rows of the summary; a figure that is not known has no row, except what was not watched."""
    table = Table(title="gpt_guard", title_justify="left", show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, text in _figures(report):
        table.add_row(name, text)
    for name, text in _findings(report):
        table.add_row(name, text)
    table.add_row("guards", escape(", ".join(report.guards)) or "none")
    table.add_row("not watched", escape(clean("\n".join(report.not_watched))) or "nothing was left out")
    return table


def _figures(report: Report) -> Iterator[tuple[str, str]]:
    skipped = f" ({report.skipped_steps} skipped)" if report.skipped_steps else ""
    yield "steps", f"{report.steps}{skipped}"
    if report.first_loss is not None or report.last_loss is not None:
        yield "loss", f"{number(report.first_loss)} first, {number(report.last_loss)} last"
    if report.lr_min is not None and report.lr_max is not None:
        low, high = learning_rate(report.lr_min), learning_rate(report.lr_max)
        yield "lr", low if low == high else f"{low} to {high}"
    if report.grad_norm_median is not None or report.grad_norm_max is not None:
        yield "grad norm", f"{number(report.grad_norm_median)} median, {number(report.grad_norm_max)} max"
    if report.clipped_share is not None:
        yield "clipped", f"{100 * report.clipped_share:.3g} % of steps"
    if report.inspected_steps:
        probes = ", ".join(report.probes)
        extra = f", with {sum(report.probes.values())} probes of the model ({escape(probes)})" if probes else ""
        yield "inspected", f"{report.inspected_steps} steps in {report.inspection_seconds:.2g} s{extra}"


def _findings(report: Report) -> Iterator[tuple[str, str]]:
    first: dict[str, Finding] = {}
    for finding in report.findings:
        first.setdefault(finding.code, finding)
    codes = sorted(first.keys() | report.counts.keys())
    if not codes:
        yield "findings", "none"
    for position, code in enumerate(codes):
        known = first.get(code)
        count = report.counts.get(code) or sum(finding.code == code for finding in report.findings)
        note = " (a note)" if known and known.severity is Severity.INFO else ""
        text = f"{code} x{count}" + (f"  {known.title}{note}" if known else "")
        style = _STYLES[known.severity] if known else "default"
        yield "" if position else "findings", f"[{style}]{escape(clean(text))}[/]"
