"""The assertion about checkpoints for a person's own test suite."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpt_guard.checks.asserts.failed import CheckFailed
from gpt_guard.checks.checkpoint.reload import reload
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.gather import complete
from gpt_guard.checks.runner.perturb import probe_ids, vocabulary
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.isolation.preserve import preserved


def assert_checkpoint_roundtrip(
    model: nn.Module | Callable[[], nn.Module],
    x: Tensor | None = None,
    *,
    make_model: Callable[[], nn.Module] | None = None,
    vocab_size: int | None = None,
    block_size: int | None = None,
    seed: int = 42,
) -> None:
    """Assert that a model which is saved, built anew and loaded gives the same logits, bit for bit.

    `model` is a module, or a function that builds one, which then serves as `make_model`, too. Without `make_model` the
    model is built as `type(model)(model.config)`. `x` is token ids `[B, T]`; without them ids are drawn, for which
    `vocab_size` and `block_size` are found in the config or the embedding tables where they are not given. State and
    modes of the model, and the random state, are as before afterwards. Raises CheckFailed, and GuardUsageError where
    the model cannot be built anew or no ids can be made.
    """
    with preserved():
        torch.manual_seed(seed)
        build = make_model
        if not isinstance(model, nn.Module):
            build = make_model or model
            model = model()
        batch = (x, x) if x is not None else None
        subject = Subject(
            model=model, make_model=build, batch=batch, vocab_size=vocab_size, block_size=block_size, seed=seed
        )
        complete(subject)
        if subject.make_model is None:
            raise GuardUsageError(
                f"{type(model).__name__} cannot be built anew from a `config`: give make_model=lambda: "
                f"{type(model).__name__}(...)"
            )
        ids = x if x is not None else probe_ids(subject) if vocabulary(subject) is not None else None
        if ids is None:
            raise GuardUsageError("no ids to ask with: give x, token ids [B, T], or vocab_size=... and block_size=...")
        with preserved(model, tensors=[ids]):
            done = reload(model, subject.make_model, ids, seed)
    if not done.rebuilt:
        raise GuardUsageError("make_model gives back the model itself; give a function that builds a new one")
    if not done.repeatable:
        raise GuardUsageError(
            "the model's logits differ between two eval passes by themselves: nothing can be compared"
        )
    if done.finding is not None:
        raise CheckFailed(done.finding)
