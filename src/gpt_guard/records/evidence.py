"""What was seen at one place: a line of code, a tensor, an operation and its inputs. Plain records, without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """Base of all records: frozen, closed to unknown fields, NaN kept in JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class SourceLine(Record):
    """A line of the user's own code."""

    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.text}" if self.text else "")


class TensorStats(Record):
    """An exact description of one tensor, read from the device only after a cheap test has raised suspicion."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    numel: int
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    finite_min: float | None = None
    finite_max: float | None = None
    first_bad: tuple[int, ...] | None = Field(default=None, description="index of the first non-finite element")
    bad_rows: tuple[int, ...] = Field(
        default=(), description="first few indices along dimension 0 that hold bad elements"
    )
    bad_row_count: int = 0

    @property
    def bad(self) -> int:
        """Number of elements that are NaN or infinite."""
        return self.nan + self.pos_inf + self.neg_inf

    @property
    def only_neg_inf(self) -> bool:
        """True for what an attention mask looks like: -inf, but neither NaN nor +inf."""
        return self.neg_inf > 0 and self.nan == 0 and self.pos_inf == 0


class Operand(Record):
    """One input of an operation, exact: what its values are, and what of them explains the result.

    `name` is the word for its part in the operation (`input`, `divisor`, `mask`). A Python number among the inputs has
    a `value` and no `tensor`. `facts` are figures as text, such as "3 zeros" or "2 of 8 rows are -inf throughout".
    """

    name: str
    tensor: TensorStats | None = None
    value: float | None = None
    facts: tuple[str, ...] = ()


class LikelyCause(Record):
    """A cause that fits the evidence of one operation, the test that tells it from the others, and the way out."""

    key: str
    text: str
    test: str
    fix: str


class OperationSeen(Record):
    """The operation that made the first non-finite values: where it stands, what went in, what that points to.

    `kind` is `operation`, or what was bad before any operation ran: `parameter`, `buffer`, `input` (the batch) or
    `constant` (any other tensor); `name` is then the name of that tensor. In the phase "backward", `name` and `where`
    are those of the forward operation whose derivative was computed. `module` is None outside of the model.
    """

    kind: Literal["operation", "parameter", "buffer", "input", "constant"] = "operation"
    name: str
    aten: str | None = None
    phase: Literal["forward", "backward"] = "forward"
    module: str | None = None
    module_class: str | None = None
    where: SourceLine | None = None
    operands: tuple[Operand, ...] = ()
    output: TensorStats | None = None
    shows: str = Field(description="the evidence in one sentence")
    causes: tuple[LikelyCause, ...] = ()
    hidden: SourceLine | None = Field(default=None, description="a line that has masked the bad values away, if any")

    @property
    def cause(self) -> str | None:
        """The key of the likeliest cause."""
        return self.causes[0].key if self.causes else None
