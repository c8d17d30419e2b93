"""Records as plain text, as a person reads them in a terminal at night: what, where, since when, why, what next.

The exceptions, the log and the command line all print through here, so that the words are the same everywhere. Only
records are imported: an exception's message must never depend on anything that can fail.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Sequence
from math import isfinite

from gpt_guard.records import Finding, Observation, Operand, OperationSeen, SourceLine, TensorStats

WIDTH = 100
LABEL = 11
_SHORT = 360
_CAUSES = 5
_KINDS = {"input": "batch", "constant": "tensor"}


def learning_rate(value: float | None) -> str:
    """A learning rate in the one form that is easy to compare ("3.0e-04", "2.973e-04"); "0" for zero, "-" for None."""
    if value is None:
        return "-"
    if not isfinite(value):
        return f"{value:g}"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.3e}".split("e")
    whole, fraction = mantissa.split(".")
    return f"{whole}.{fraction.rstrip('0') or '0'}e{exponent}"


def learning_rates(values: Sequence[float]) -> str:
    """The learning rates of all groups, said once where they are equal; "-" where there is none.

    Of more than three different ones the first two are shown; one that is not finite always is.
    """
    texts = list(dict.fromkeys(learning_rate(value) for value in sorted(values, key=isfinite)))
    return (", ".join(texts) if len(texts) <= 3 else f"{texts[0]}, {texts[1]}, ... ({len(values)} groups)") or "-"


def render_finding(finding: Finding, width: int = WIDTH) -> str:
    """The whole finding as plain text, at most `width` columns wide; what is not known is left out."""

    def beside(label: str, text: str) -> list[str]:
        return block(label, text, width)

    seen = finding.operation
    # What a replay has proven stands in place of what is likely for findings of this kind.
    proven = seen.causes if seen is not None else ()
    next_test, fix = (proven[0].test, proven[0].fix) if proven else (finding.next_test, finding.fix)
    line = finding.where if seen is None or seen.where != finding.where else None
    parts = [
        textwrap.wrap(clean(f"{finding.code} {finding.title}"), width),
        beside("seen", finding.seen) + beside("tensor", _tensor_text(finding.tensor)),
        beside("where", _where(finding)) + _line_of_code(line, width) + beside("made by", finding.origin or ""),
        (_operation_lines(seen, width) if seen is not None else []) + beside("replay", finding.replay or ""),
        beside("healthy", _healthy(finding.last_healthy)) + _table(finding.history),
        numbered("likely", [cause.text for cause in proven] or finding.causes[:_CAUSES], width),
        beside("next test", next_test) + beside("fix", fix) + beside("more", _explain(finding)),
        beside("black box", _bundle(finding, width)),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def render_short(finding: Finding) -> str:
    """Up to five lines for a log: title and place; what was seen; the operation; the likeliest cause; the bundle."""
    at = [f"{_from_here(finding.where.file)}:{finding.where.line}"] if finding.where is not None else []
    place = ", ".join(_place(finding) + at)
    lines = [_one_line(f"{finding.code} {finding.title}" + (f": {place}" if place else "")), _one_line(finding.seen)]
    proven = [cause.text for cause in finding.operation.causes] if finding.operation is not None else []
    if finding.operation is not None:
        lines.append(_one_line(_operation_short(finding.operation)))
    if likely := proven or finding.causes:
        more = f" [gpt-guard explain {finding.code}]" if finding.code.startswith("GG") else ""
        lines.append(f"Most likely: {_one_line(likely[0])}{more}")
    if finding.bundle is not None:
        lines.append(f"Black box: {clean(_replay_command(finding))}")
    return "\n  ".join(line for line in lines if line)


def _one_line(text: str) -> str:
    words = " ".join(clean(text).split())
    return words if len(words) <= _SHORT else f"{words[: _SHORT - 4].rsplit(' ', 1)[0]} ..."


def _explain(finding: Finding) -> str:
    if not finding.code.startswith("GG"):
        return ""
    left = len(finding.causes) - _CAUSES
    return f"gpt-guard explain {finding.code}" + (f"  ({left} more cause{'s' * (left > 1)})" if left > 0 else "")


def _bundle(finding: Finding, width: int) -> str:
    if finding.bundle is None:
        return ""
    opened = f"open it with: {_replay_command(finding)}"
    if len(opened) > width - LABEL:  # a command that is wrapped anywhere else cannot be pasted into a shell
        opened = opened.replace("gpt-guard", "\ngpt-guard", 1).replace(" --model", " \\\n    --model", 1)
    return f"{finding.bundle}\n{opened}"


def _replay_command(finding: Finding) -> str:
    # A class out of a notebook, or out of a function, has no name that another process could import.
    return f"gpt-guard replay {finding.bundle} --model {finding.bundle_model or 'package.module:Class'}"


def _place(finding: Finding) -> list[str]:
    parts: list[str] = []
    if finding.module is not None:
        kind = f" ({finding.module_class})" if finding.module_class else ""
        parts.append((finding.module or "the model itself") + kind)
    if finding.parameter:
        parts.append(finding.parameter)
    if finding.step is not None:
        parts.append(f"step {finding.step}")
    return parts


def _where(finding: Finding) -> str:
    what = _place(finding.model_copy(update={"step": None, "parameter": None}))
    what = [f"module {what[0]}" if finding.module else what[0]] if what else []
    if finding.position:
        what.append(finding.position)
    if finding.parameter:
        what.append(f"parameter {finding.parameter}")
    when = [f"step {finding.step}"] if finding.step is not None else []
    if finding.micro_batch is not None:
        when.append(f"micro-batch {finding.micro_batch}")
    if finding.moment is not None:
        when.append(finding.moment.value)
    if finding.evaluation:
        when.append("during evaluation")
    return "\n".join(", ".join(parts) for parts in (what, when) if parts)


def _healthy(seen: Observation | None) -> str:
    if seen is None:
        return ""
    facts: dict[str, str] = {
        "loss": number(seen.loss),
        "lr": learning_rates(seen.lr),
        "grad norm": number(seen.grad_norm),
    }
    known = ", ".join(f"{name} {text}" for name, text in facts.items() if text != "-")
    return f"last at step {seen.step}" + (f": {known}" if known else "")


_COLUMNS: dict[str, Callable[[Observation], str]] = {
    "step": lambda seen: str(seen.step),
    "loss": lambda seen: number(seen.loss),
    "lr": lambda seen: learning_rates(seen.lr),
    "grad_norm": lambda seen: number(seen.grad_norm),
    "clipped to": lambda seen: number(seen.grad_norm_clipped) if seen.clipped else "-",
    "update ratio": lambda seen: number(seen.update_ratio),
    "": lambda seen: "skipped" if seen.skipped else "evaluation" if seen.evaluation else "",
}


def _table(history: Sequence[Observation]) -> list[str]:
    """The steps before as aligned columns; a column in which nothing is known is left out."""
    if not history:
        return []
    columns = [[name, *(cell(seen) for seen in history)] for name, cell in _COLUMNS.items()]
    known = [column for column in columns if any(text not in ("-", "") for text in column[1:])]
    widths = [max(map(len, column)) for column in known]
    rows = zip(*known, strict=True)
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    return [f"{'before' if first else '':<{LABEL}}{line.rstrip()}" for first, line in _marked(lines)]


def _operation_lines(seen: OperationSeen, width: int) -> list[str]:
    """The operation and its line, the evidence in one sentence, and the figures of its inputs and its result."""
    lines = block("operation", _operation_name(seen), width) + _line_of_code(seen.where, width)
    lines += block("shows", seen.shows, width)
    if seen.kind == "operation":
        lines += block("inputs", "\n".join(_operand(operand) for operand in seen.operands), width)
    lines += block("result" if seen.kind == "operation" else "tensor", _tensor_text(seen.output), width)
    return lines + (block("hidden at", str(seen.hidden), width) if seen.hidden is not None else [])


def _operation_name(seen: OperationSeen) -> str:
    """`softmax in blocks.0.attn (Attention)`, `the derivative of sqrt ...`, or the tensor that was bad before."""
    if seen.kind != "operation":
        return f"none: the {_KINDS.get(seen.kind, seen.kind)} was bad before any operation ran"
    place = "" if seen.module is None else f" in {seen.module or 'the model itself'}"
    kind = f" ({seen.module_class})" if seen.module is not None and seen.module_class else ""
    return f"{'the derivative of ' if seen.phase == 'backward' else ''}{seen.name}{place}{kind}"


def _operation_short(seen: OperationSeen) -> str:
    """One line for a log."""
    at = f" at {_from_here(seen.where.file)}:{seen.where.line}" if seen.where is not None else ""
    return f"Replay: {_operation_name(seen)}{at}: {seen.shows}" if seen.kind == "operation" else f"Replay: {seen.shows}"


def _operand(operand: Operand) -> str:
    figures = number(operand.value) if operand.tensor is None else _tensor_text(operand.tensor).partition("\n")[0]
    return f"{operand.name}: {figures}" + "".join(f"; {fact}" for fact in operand.facts)


def number(value: float | None) -> str:
    """A figure with four significant digits ("0.8123", "1.2e+05", "nan", "-inf"); "-" for None."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def clean(text: str) -> str:
    """Make control characters visible, line breaks excepted: text from a file must not steer the terminal."""
    visible = (c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text.expandtabs(4))
    return "".join(visible)


def printable(text: object, limit: int = 80) -> str:
    """Return a name from a file fit to print: short, and without control characters, which could drive a terminal."""
    cleaned = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text)[: limit + 1])
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 3] + "..."


def some(names: Iterable[object], count: int = 4) -> str:
    """Return the first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - count} more" if len(listed) > count else ""
    return ", ".join(printable(name) for name in listed[:count]) + more


def block(label: str, text: str, width: int = WIDTH, *, label_width: int = LABEL) -> list[str]:
    """Lines of `text` wrapped to `width` columns beside `label`; no line at all where `text` is empty."""
    lines = [
        wrapped
        for line in clean(text).strip().split("\n")
        for wrapped in textwrap.wrap(line, width - label_width, break_on_hyphens=False)
    ]
    return [f"{label if first else '':<{label_width}}{line}" for first, line in _marked(lines)]


def numbered(label: str, texts: Iterable[str], width: int = WIDTH) -> list[str]:
    """The texts as an ordered list beside `label`."""
    lines: list[str] = []
    for position, text in enumerate(texts, start=1):
        mark = f"{position}. "
        room = width - LABEL - len(mark)
        for first, line in _marked(textwrap.wrap(clean(text), room, break_on_hyphens=False)):
            head = label if first and position == 1 else ""
            lines.append(f"{head:<{LABEL}}{mark if first else ' ' * len(mark)}{line}")
    return lines


def _marked(lines: Sequence[str]) -> list[tuple[bool, str]]:
    """Each line, and whether it is the first."""
    return [(position == 0, line) for position, line in enumerate(lines)]


def _tensor_text(stats: TensorStats | None) -> str:
    """A tensor in one or two lines: shape, dtype, what of it is not finite, and where."""
    if stats is None:
        return ""
    text = f"{list(stats.shape)} {stats.dtype.removeprefix('torch.')} on {stats.device}"
    if stats.bad:
        counts = {"NaN": stats.nan, "+inf": stats.pos_inf, "-inf": stats.neg_inf}
        text += f": {', '.join(f'{count} {name}' for name, count in counts.items() if count)} of {stats.numel} elements"
    if stats.finite_min is not None and stats.finite_max is not None:
        rest = "the finite rest lies" if stats.bad else "values lie"
        text += f"; {rest} between {number(stats.finite_min)} and {number(stats.finite_max)}"
    elif stats.bad:
        text += "; nothing in it is finite"
    return text + _rows(stats)


def _rows(stats: TensorStats) -> str:
    text = ""
    if stats.bad_rows and stats.shape:
        listed = ", ".join(map(str, stats.bad_rows)) + (", ..." if stats.bad_row_count > len(stats.bad_rows) else "")
        count = max(stats.bad_row_count, len(stats.bad_rows))
        text = f"\nrow{'' if count == 1 else 's'} {listed} of dimension 0 ({count} of {stats.shape[0]})"
    if stats.first_bad:
        text += f"{', ' if text else chr(10)}first at {list(stats.first_bad)}"
    return text


def _line_of_code(line: SourceLine | None, width: int = WIDTH) -> list[str]:
    """A line of the user's code: its place, and its text below."""
    if line is None:
        return []
    place = f"{_from_here(line.file)}:{line.line} in {line.function}"
    room = width - LABEL
    # A path is shortened at its front and never wrapped: its end, with the line number, is what gets copied.
    place = place if len(place) <= room else f"...{place[3 - room :]}"
    return block("line", f"{place}\n{line.text}", width)


def _from_here(file: str) -> str:
    """A file below the current folder by its path from there, as the person would open it."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)
