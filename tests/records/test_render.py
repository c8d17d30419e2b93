"""The finding as a person reads it: everything known is there, nothing else is, and it fits the terminal."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from gpt_guard.catalogue import finding
from gpt_guard.errors import NonFiniteError, error_for
from gpt_guard.records import (
    Finding,
    LikelyCause,
    Moment,
    Observation,
    Operand,
    OperationSeen,
    Severity,
    SourceLine,
    TensorStats,
)
from gpt_guard.records.render import WIDTH, clean, learning_rate, learning_rates, number, render_finding, render_short


def seen(step: int, **fields: object) -> Observation:
    known = {"loss": 2.25, "lr": (3e-4,), "grad_norm": 0.5}
    return Observation.model_validate({"step": step, "moment": Moment.BEFORE_STEP, **known, **fields})


def full_finding(**changes: object) -> Finding:
    stats = TensorStats(
        shape=(4, 16, 32),
        dtype="torch.float16",
        device="cuda:0",
        numel=2048,
        nan=48,
        pos_inf=2,
        finite_min=-3.125,
        finite_max=60000.0,
        first_bad=(1, 0, 5),
        bad_rows=(1, 3),
        bad_row_count=2,
    )
    fields = {
        "code": "GG101",
        "title": "Non-finite values in a module's output",
        "severity": Severity.ERROR,
        "seen": "50 of 2048 elements of output[0] are not finite.",
        "step": 30,
        "micro_batch": 1,
        "moment": Moment.FORWARD,
        "module": "blocks.0.attn",
        "module_class": "PadAttn",
        "position": "output[0]",
        "origin": "Made between the children qkv and proj; proj only received it.",
        "where": SourceLine(file="train.py", line=12, function="forward", text="return self.proj(y)"),
        "tensor": stats,
        "causes": ("A row is masked entirely.", "float16 overflow."),
        "next_test": "Run it in float32.",
        "fix": "Leave each row one key.",
        "last_healthy": seen(29),
        "history": (seen(27), seen(28, skipped=True), seen(29, grad_norm=7.5, grad_norm_clipped=1.0, clipped=True)),
    }
    return Finding.model_validate({**fields, **changes})


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (math.nan, "nan"), (-math.inf, "-inf"), (0.0, "0"), (12, "12"), (0.81234, "0.8123"), (1e30, "1e+30")],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(3e-4, "3.0e-04"), (2.973e-4, "2.973e-04"), (0.0, "0"), (None, "-"), (math.nan, "nan"), (-1e-3, "-1.0e-03")],
)
def test_learning_rate(value: float | None, text: str) -> None:
    assert learning_rate(value) == text


def test_learning_rates_of_groups() -> None:
    assert learning_rates(()) == "-"
    assert learning_rates((3e-4, 3e-4)) == "3.0e-04"
    assert learning_rates((3e-4, 3e-5)) == "3.0e-04, 3.0e-05"
    many = learning_rates((*(0.1 * i for i in range(1, 30)), math.nan))
    assert many == "nan, 1.0e-01, ... (30 groups)"


def test_first_line_is_code_and_title() -> None:
    assert render_finding(full_finding()).split("\n")[0] == "GG101 Non-finite values in a module's output"


@pytest.mark.parametrize(
    "words",
    [
        "50 of 2048 elements of output[0]",
        "[4, 16, 32] float16 on cuda:0: 48 NaN, 2 +inf of 2048 elements",
        "the finite rest lies between -3.125 and 6e+04",
        "rows 1, 3 of dimension 0 (2 of 4), first at [1, 0, 5]",
        "module blocks.0.attn (PadAttn), output[0]",
        "step 30, micro-batch 1, forward",
        "train.py:12 in forward",
        "return self.proj(y)",
        "Made between the children qkv and proj; proj only received it.",
        "last at step 29: loss 2.25, lr 3.0e-04, grad norm 0.5",
        "1. A row is masked entirely.",
        "2. float16 overflow.",
        "Run it in float32.",
        "Leave each row one key.",
        "gpt-guard explain GG101",
    ],
)
def test_everything_known_is_said(words: str) -> None:
    assert words in " ".join(render_finding(full_finding()).replace("\n", " ").split())


def test_history_is_an_aligned_table() -> None:
    lines = render_finding(full_finding()).split("\n")
    start = next(i for i, line in enumerate(lines) if "grad_norm" in line)
    head, *rows = lines[start : start + 4]
    assert [row.split()[0] for row in rows] == ["27", "28", "29"]
    ends = head.index("grad_norm") + len("grad_norm")
    assert [row[:ends].split()[-1] for row in rows] == ["0.5", "0.5", "7.5"]
    assert rows[1].endswith("skipped")
    assert "clipped to" in head
    assert "update ratio" not in head


def test_what_is_not_known_has_no_line() -> None:
    text = render_finding(Finding(code="MY1", title="Loss spike", severity=Severity.WARNING, seen="loss 9 after 2"))
    assert text == "MY1 Loss spike\n\nseen       loss 9 after 2"


def test_the_model_itself_and_evaluation() -> None:
    text = render_finding(full_finding(module="", module_class="MiniGPT", evaluation=True))
    assert "the model itself (MiniGPT)" in text
    assert "during evaluation" in text


def test_a_parameter_is_named() -> None:
    text = render_finding(full_finding(module=None, module_class=None, position=None, parameter="tok.weight"))
    assert "where      parameter tok.weight" in text


def test_a_tensor_without_anything_finite() -> None:
    stats = TensorStats(shape=(), dtype="torch.float32", device="cpu", numel=1, nan=1, first_bad=())
    assert "[] float32 on cpu: 1 NaN of 1 elements; nothing in it is finite" in render_finding(
        full_finding(tensor=stats)
    )


def test_width_holds_for_long_words_paths_and_many_groups() -> None:
    deep = "/home/user/" + "nested/" * 30 + "train.py"
    finding = full_finding(
        title="t" * 150,
        seen="x" * 500 + " " + "word " * 100,
        module="blocks." * 40,
        where=SourceLine(file=deep, line=4321, function="forward", text="y = f(x) " * 30),
        history=(seen(1, lr=tuple(1e-3 / i for i in range(1, 25))),),
        causes=("cause " * 60, "z" * 300),
    )
    text = render_finding(finding)
    assert max(map(len, text.split("\n"))) <= WIDTH
    assert "nested/train.py:4321 in forward" in text


def test_only_the_likeliest_causes_are_listed() -> None:
    text = render_finding(full_finding(causes=tuple(f"cause number {i}" for i in range(8))))
    assert "5. cause number 4" in text
    assert "cause number 5" not in text
    assert "gpt-guard explain GG101  (3 more causes)" in text
    assert "(1 more cause)" in render_finding(full_finding(causes=tuple(f"cause number {i}" for i in range(6))))


def test_control_characters_cannot_steer_the_terminal() -> None:
    text = render_finding(full_finding(seen="a\x1b[2Jb\udc80\u2028", module="evil\x07"))
    assert text.replace("\n", "").isprintable()
    assert "a\\x1b[2Jb\\udc80\\u2028" in text
    assert clean("naïve ∞ 語") == "naïve ∞ 語"


def test_seen_keeps_its_lines() -> None:
    assert "seen       first\n             - second\n" in render_finding(full_finding(seen="first\n  - second"))


def test_short_is_three_lines_at_most() -> None:
    text = render_short(full_finding(seen="many\nlines\nof it " + "long " * 100))
    first, second, third = text.split("\n")
    assert first == "GG101 Non-finite values in a module's output: blocks.0.attn (PadAttn), step 30, train.py:12"
    assert second.strip().startswith("many lines of it")
    assert second.endswith("long ...")
    assert third.strip() == "Most likely: A row is masked entirely. [gpt-guard explain GG101]"


def test_short_of_a_bare_finding_is_one_line_and_its_evidence() -> None:
    bare = Finding(code="MY1", title="Loss spike", severity=Severity.WARNING, seen="loss 9")
    assert render_short(bare) == "MY1 Loss spike\n  loss 9"


def test_an_exception_says_the_whole_finding() -> None:
    error = error_for(full_finding())
    assert isinstance(error, NonFiniteError)
    assert str(error) == render_finding(full_finding())


def test_render_needs_no_torch() -> None:
    probe = "import sys, gpt_guard.records.render as r; assert 'gpt_guard.catalogue' not in sys.modules; print(r.WIDTH)"
    code = f"import sys; sys.modules['torch'] = None; {probe}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(WIDTH), done.stderr


STATS = TensorStats(
    shape=(2, 3), dtype="float16", device="cpu", numel=6, neg_inf=3, finite_min=-1.0, finite_max=2.0, bad_rows=(1,)
)
LINE = SourceLine(file="model.py", line=12, function="forward", text="return scores.softmax(-1)")
CAUSES = (
    LikelyCause(key="a", text="A row is masked.", test="Test the mask.", fix="Leave one key."),
    LikelyCause(key="b", text="Something else.", test="Other test.", fix="Other fix."),
)


def operation(**changes: object) -> OperationSeen:
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


def text_of(found: OperationSeen, **fields: Any) -> str:
    return render_finding(finding("GG101", "3 NaN", operation=found, **fields))


def test_everything_is_said_in_order() -> None:
    text = text_of(operation(), replay="Reproduced: the output is non-finite again.")
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
    text = text_of(operation(phase="backward", module="", hidden=LINE))
    assert "operation  the derivative of softmax in the model itself (Attention)" in text
    assert "hidden at  model.py:12 in forward: return scores.softmax(-1)" in text


def test_the_line_is_not_said_twice() -> None:
    assert text_of(operation(), where=LINE).count("model.py:12") == 1


def test_a_tensor_that_was_bad_before() -> None:
    text = text_of(operation(kind="parameter", name="lin.weight", shows="parameter lin.weight was non-finite"))
    assert "operation  none: the parameter was bad before any operation ran" in text
    assert "shows      parameter lin.weight was non-finite" in text
    assert "inputs" not in text
    assert "tensor     [2, 3] float16" in text


def test_without_causes_the_catalogue_speaks() -> None:
    plain = finding("GG101", "3 NaN")
    assert plain.causes[0][:40] in text_of(operation(causes=()))


def test_not_reproduced_is_said() -> None:
    text = render_finding(finding("GG101", "3 NaN", replay="Not reproduced: the loss is 1.5 now."))
    assert "replay     Not reproduced: the loss is 1.5 now." in text
    assert "operation" not in text


def test_the_short_form_names_the_operation_and_its_line() -> None:
    lines = render_short(finding("GG101", "3 NaN", operation=operation())).split("\n")
    assert (
        lines[2].strip().startswith("Replay: softmax in blocks.0.attn (Attention) at model.py:12: softmax over 1 of 2")
    )
    assert lines[3].strip().startswith("Most likely: A row is masked.")
