"""What a replay has found as a person reads it: operation, line, inputs, what they show, and the way out."""

from __future__ import annotations

from typing import Any

from gpt_guard.catalogue import finding
from gpt_guard.records import LikelyCause, Operand, OperationSeen, SourceLine, TensorStats
from gpt_guard.records.render import render_finding, render_short
from gpt_guard.records.text import WIDTH

STATS = TensorStats(
    shape=(2, 3), dtype="float16", device="cpu", numel=6, neg_inf=3, finite_min=-1.0, finite_max=2.0, bad_rows=(1,)
)
LINE = SourceLine(file="model.py", line=12, function="forward", text="return scores.softmax(-1)")
CAUSES = (
    LikelyCause(key="a", text="A row is masked.", test="Test the mask.", fix="Leave one key."),
    LikelyCause(key="b", text="Something else.", test="Other test.", fix="Other fix."),
)


def seen(**changes: object) -> OperationSeen:
    fields = {
        "name": "softmax",
        "aten": "aten._softmax.default",
        "module": "blocks.0.attn",
        "module_class": "Attention",
        "where": LINE,
        "operands": (
            Operand(name="input", tensor=STATS, facts=("1 of 2 rows are -inf throughout",)),
            Operand(name="exponent", value=0.5),
        ),
        "output": STATS.model_copy(update={"nan": 3, "neg_inf": 0}),
        "shows": "softmax over 1 of 2 rows that is -inf throughout",
        "causes": CAUSES,
    }
    return OperationSeen.model_validate({**fields, **changes})


def text_of(operation: OperationSeen, **fields: Any) -> str:
    return render_finding(finding("GG101", "3 NaN", operation=operation, **fields))


def test_everything_is_said_in_order() -> None:
    text = text_of(seen(), replay="Reproduced: the output is non-finite again.")
    parts = [
        "operation  softmax in blocks.0.attn (Attention)",
        "line       model.py:12 in forward",
        "return scores.softmax(-1)",
        "shows      softmax over 1 of 2 rows",
        "inputs     input: [2, 3] float16 on cpu: 3 -inf of 6 elements; the finite rest lies between -1 and 2;",
        "1 of 2 rows are -inf throughout",
        "exponent: 0.5",
        "result     [2, 3] float16 on cpu: 3 NaN of 6 elements",
        "replay     Reproduced: the output is non-finite again.",
        "likely     1. A row is masked.",
        "2. Something else.",
        "next test  Test the mask.",
        "fix        Leave one key.",
    ]
    words = " ".join(text.split())
    places = [words.index(" ".join(part.split())) for part in parts]
    assert places == sorted(places)
    assert max(map(len, text.split("\n"))) <= WIDTH


def test_a_derivative_and_the_line_that_hid_it() -> None:
    text = text_of(seen(phase="backward", module="", hidden=LINE))
    assert "operation  the derivative of softmax in the model itself (Attention)" in text
    assert "hidden at  model.py:12 in forward: return scores.softmax(-1)" in text


def test_the_line_is_not_said_twice() -> None:
    assert text_of(seen(), where=LINE).count("model.py:12") == 1


def test_a_tensor_that_was_bad_before() -> None:
    text = text_of(seen(kind="parameter", name="lin.weight", shows="parameter lin.weight was non-finite"))
    assert "operation  none: the parameter was bad before any operation ran" in text
    assert "shows      parameter lin.weight was non-finite" in text
    assert "inputs" not in text
    assert "tensor     [2, 3] float16" in text


def test_without_causes_the_catalogue_speaks() -> None:
    plain = finding("GG101", "3 NaN")
    assert plain.causes[0][:40] in text_of(seen(causes=()))


def test_not_reproduced_is_said() -> None:
    text = render_finding(finding("GG101", "3 NaN", replay="Not reproduced: the loss is 1.5 now."))
    assert "replay     Not reproduced: the loss is 1.5 now." in text
    assert "operation" not in text


def test_the_short_form_names_the_operation_and_its_line() -> None:
    lines = render_short(finding("GG101", "3 NaN", operation=seen())).split("\n")
    assert (
        lines[2].strip().startswith("Replay: softmax in blocks.0.attn (Attention) at model.py:12: softmax over 1 of 2")
    )
    assert lines[3].strip().startswith("Most likely: A row is masked.")
