"""An operation that a replay has found, as text: its line, what went in, what that shows."""

from __future__ import annotations

from gpt_guard.records import Operand, OperationSeen
from gpt_guard.records.text import block, from_here, line_of_code, number, tensor_text

_KINDS = {"input": "batch", "constant": "tensor"}


def operation_lines(seen: OperationSeen, width: int) -> list[str]:
    """The operation and its line, the evidence in one sentence, and the figures of its inputs and its result."""
    lines = block("operation", operation_name(seen), width) + line_of_code(seen.where, width)
    lines += block("shows", seen.shows, width)
    if seen.kind == "operation":
        lines += block("inputs", "\n".join(_operand(operand) for operand in seen.operands), width)
    lines += block("result" if seen.kind == "operation" else "tensor", tensor_text(seen.output), width)
    return lines + (block("hidden at", str(seen.hidden), width) if seen.hidden is not None else [])


def operation_name(seen: OperationSeen) -> str:
    """`softmax in blocks.0.attn (Attention)`, `the derivative of sqrt ...`, or the tensor that was bad before."""
    if seen.kind != "operation":
        return f"none: the {_KINDS.get(seen.kind, seen.kind)} was bad before any operation ran"
    place = "" if seen.module is None else f" in {seen.module or 'the model itself'}"
    kind = f" ({seen.module_class})" if seen.module is not None and seen.module_class else ""
    return f"{'the derivative of ' if seen.phase == 'backward' else ''}{seen.name}{place}{kind}"


def operation_short(seen: OperationSeen) -> str:
    """One line for a log."""
    at = f" at {from_here(seen.where.file)}:{seen.where.line}" if seen.where is not None else ""
    return f"Replay: {operation_name(seen)}{at}: {seen.shows}" if seen.kind == "operation" else f"Replay: {seen.shows}"


def _operand(operand: Operand) -> str:
    said = number(operand.value) if operand.tensor is None else tensor_text(operand.tensor).partition("\n")[0]
    return f"{operand.name}: {said}" + "".join(f"; {fact}" for fact in operand.facts)
