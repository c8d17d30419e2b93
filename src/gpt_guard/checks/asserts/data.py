"""Assertions about data for a person's own tests: targets shifted by one, ids in range, a lossless tokenizer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gpt_guard.checks.asserts.failed import CheckFailed
from gpt_guard.checks.batches.batch_form import bad_batch_shape
from gpt_guard.checks.batches.labels import hardly_any, supervised
from gpt_guard.checks.batches.shift import not_shifted
from gpt_guard.checks.runner.gather import as_ids
from gpt_guard.checks.token_ids.ids import id_stats, is_integer, not_integers, out_of_range
from gpt_guard.checks.tokenizer.roundtrip import roundtrip
from gpt_guard.checks.tokenizer.tokenizers import adapt
from gpt_guard.errors import GuardUsageError


def assert_shifted(x: Any, y: Any, *, shift: int = 1, ignore_index: int = -100) -> None:
    """Assert that `y[:, t]` is `x[:, t + shift]`, for token ids `[B, T]` or one row `[T]`; ignored ones aside.

    The message says which shift was found. `shift=0` is right for models that shift inside, as those of Hugging Face.
    Raises CheckFailed, with GG603, GG600 for shapes that differ, GG632 for other than integers, or GG606 where no
    target counts; GuardUsageError where the rows are too short to tell.
    """
    x, y = _integers("x", x), _integers("y", y)
    if x.dim() == y.dim() == 1:
        x, y = x[None], y[None]
    if (found := bad_batch_shape(x, y, None, ignore_index)) is not None:
        raise CheckFailed(found)
    seen, problem = not_shifted(x, y, shift, ignore_index, model_known=shift == 0)
    if problem is not None:
        raise CheckFailed(problem)
    if seen.positions == 0:
        if (none := hardly_any(supervised([(x, y)], ignore_index), ignore_index)) is not None:
            raise CheckFailed(none)
        raise GuardUsageError(f"rows of {x.size(1)} ids are too short to see a shift in; give rows of 8 or more")


def assert_ids_in_range(ids: Any, vocab_size: int) -> None:
    """Assert that all ids, of any shape, are in 0 ... vocab_size - 1. Reads the device.

    Raises CheckFailed with GG631 (how many are outside, the first of them and its place) or GG632 for other than
    integers; GuardUsageError where there are no ids.
    """
    tensor = _integers("ids", ids)
    if (
        found := out_of_range("ids", tensor, id_stats(tensor), vocab_size, f"vocab_size is {vocab_size}", ())
    ) is not None:
        raise CheckFailed(found)


def assert_roundtrip(tokenizer: Any, text: str) -> None:
    """Assert that `decode(encode(text))` is `text`, for anything with `encode` and `decode`, or a list of characters.

    Raises CheckFailed with GG621: where the two part and what was done to the text, or the exception; TypeError for
    something that is no tokenizer.
    """
    if (found := roundtrip(adapt(tokenizer), text, "the text")) is not None:
        raise CheckFailed(found)


def _integers(name: str, ids: Any) -> Tensor:
    tensor = as_ids(name, ids)
    if tensor.numel() == 0:
        raise GuardUsageError(f"{name} holds no token ids")
    if not is_integer(tensor):
        raise CheckFailed(not_integers(name, tensor))
    return tensor
