"""The lines that stage 14 prints about the model's own `generate`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.checks.generation import sampler_edges as edges
from gpt_guard.checks.generation.faithful import compare
from gpt_guard.checks.generation.user_generate import Misfit, UserGenerate, find_generate
from gpt_guard.checks.runner.base import Stage, Subject
from gpt_guard.checks.runner.perturb import probe_ids, vocabulary
from gpt_guard.checks.runner.raised import raised
from gpt_guard.hooks.isolation.eval_no_grad import quiet
from gpt_guard.records import CheckResult, Severity

COMPARED = 12
"""New tokens that are compared one by one: a sampling loop that is wrong is so from the first or second on."""
CONTEXT = ("long prompt", "text past block_size")
"""The lines that ask for more than block_size."""
LONGEST = 4096
"""A block_size above this is not filled: one forward would take longer than all other checks."""


def sampler(
    stage: Stage, model: nn.Module, prompt: Tensor, block_size: int | None
) -> tuple[CheckResult, UserGenerate | None]:
    """The line that says what generates, and the model's own method if it can be asked. Tries it on one token."""
    title = "sampler"
    generate = find_generate(model, block_size)
    if isinstance(generate, str):
        return stage.passed(title, f"gpt_guard's own: {generate}"), None
    try:
        with quiet(model):
            generate(prompt, 1)
    except Misfit as why:
        return stage.passed(title, f"gpt_guard's own: {why}"), None
    except Exception as error:  # the user's own method may raise anything
        if _takes_other(error):
            return stage.passed(title, f"gpt_guard's own: {generate} does not take token ids ({error})"), None
        cause = raised(error, f"{generate} on {prompt.size(1)} ids")
        likely = ["defaults"] if generate.options.get(generate.temperature or "") == 0 else ["raised"]
        found = finding("GG680", cause.seen, likely=likely, where=cause.where)
        return stage.failed(title, type(error).__name__, f"{generate} runs", found), None
    return stage.passed(title, str(generate)), generate


def sampler_lines(stage: Stage, subject: Subject, generate: UserGenerate, prompt: Tensor) -> Iterator[CheckResult]:
    """The likeliest tokens, mode, context, settings and seed of the model's own method."""
    model = subject.model
    assert model is not None, "the stage asks for it first"
    # What does not crop must not be told of in every line: all but two stay within block_size.
    room = _room(subject, prompt)
    faithful = _faithful(stage, model, subject, generate, prompt)
    yield faithful
    yield _edge(stage, "mode", "eval mode, put back afterwards", edges.mode(model, generate, prompt))
    yield from _context(stage, model, subject, generate)
    if faithful.status != "failed":  # with other tokens than the likeliest a setting cannot be told from the fault
        yield from _settings(stage, model, subject, generate, prompt)
    seeded = edges.same_seed(model, generate, prompt, room, subject.seed)
    yield _edge(stage, "same seed", "the same text", seeded)


def _faithful(stage: Stage, model: nn.Module, subject: Subject, generate: UserGenerate, prompt: Tensor) -> CheckResult:
    title, expected = "likeliest tokens", "those of a full forward's last position"
    done = compare(model, generate, prompt, _room(subject, prompt), limit=subject.block_size, seed=subject.seed)
    if not done.comparable:
        return stage.skipped(title, "generate draws in a way that cannot be made to take the likeliest")
    measured = f"{done.equal} of {done.total} equal"
    if done.finding is None:
        return stage.passed(title, measured, expected)
    if done.finding.severity is Severity.ERROR:
        return stage.failed(title, measured, expected, done.finding)
    return stage.passed(title, measured, expected, notes=[done.finding])


def _context(stage: Stage, model: nn.Module, subject: Subject, generate: UserGenerate) -> Iterator[CheckResult]:
    size = subject.block_size
    if size is None or size > LONGEST:
        yield stage.skipped("long prompt", "no block_size is known" if size is None else f"block_size is {size}")
        return
    ids = probe_ids(subject, 1, size + 4)
    expected = f"the last {size} tokens are looked at"
    for title, length in zip(CONTEXT, (size + 4, max(1, size - 1)), strict=True):
        answer = edges.long_text(model, generate, ids, length, size, 4, subject.seed)
        yield _edge(stage, title, expected, answer)


def _settings(
    stage: Stage, model: nn.Module, subject: Subject, generate: UserGenerate, prompt: Tensor
) -> Iterator[CheckResult]:
    vocab, limit, seed = vocabulary(subject) or 1, subject.block_size, subject.seed
    if generate.temperature is not None:
        zero = edges.temperature_zero(model, generate, prompt, limit=limit, vocab=vocab, seed=seed)
        yield _edge(stage, "temperature 0", "the likeliest token, or a ValueError", zero)
        if (two := edges.temperature_two(model, generate, prompt, limit=limit, seed=seed)) is not None:
            yield _edge(stage, "temperature 2", "softmax(logits / 2)", two)
    if "top_k" in generate.options:
        answer = edges.large_top_k(model, generate, prompt, vocab, seed)
        yield _edge(stage, "top_k", f"at most {vocab} tokens", answer)


def _room(subject: Subject, prompt: Tensor) -> int:
    limit = subject.block_size
    return COMPARED if limit is None else max(1, min(COMPARED, limit - prompt.size(1)))


def _edge(stage: Stage, title: str, expected: str, answer: edges.Answer) -> CheckResult:
    if answer.finding is not None:
        return stage.failed(title, answer.measured, expected, answer.finding)
    return stage.passed(title, answer.measured, expected, notes=answer.notes)


def _takes_other(error: Exception) -> bool:
    words = str(error)
    called = isinstance(error, TypeError) and "generate()" in words
    of_a_tensor = "'Tensor' object" in words or words.startswith("Tensor.")
    return called or (isinstance(error, (AttributeError, TypeError)) and of_a_tensor)
