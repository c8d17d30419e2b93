"""Does the model's own `generate` choose what the model predicts? Token by token against our own greedy decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.checks.generation.decoding import cropped, last_logits
from gpt_guard.checks.generation.user_generate import GenerateRecord, ModelCall, UserGenerate, recorded
from gpt_guard.hooks.isolation.compare import across_shapes
from gpt_guard.hooks.isolation.preserve import quiet, seed_all
from gpt_guard.records import Finding, Severity

_ROUNDED = 0.05
"""Share of the logits' spread that a cache in half precision or int8 may cost."""
_FAR = 10
"""A token that is this far down the model's list is no matter of a penalty or of a tie."""


@dataclass
class NewToken:
    """One new token: all before it, what of that fits the context, the model's own logits `[V]`, the token chosen.

    `call` and `draw` are the call that it came from and the probabilities that it was drawn from, where they are known.
    """

    running: Tensor
    context: Tensor
    logits: Tensor
    chosen: int
    call: ModelCall | None
    draw: Tensor | None

    @property
    def tolerance(self) -> float:
        """How far logits may differ between one forward and another of other shape."""
        return across_shapes(self.logits)

    @property
    def behind(self) -> float:
        """By how much the chosen token's logit is below the largest."""
        return float(self.logits.max() - self.logits[self.chosen])

    @property
    def wrong(self) -> bool:
        """Whether another token is likelier than the chosen one."""
        return self.behind > self.tolerance

    @property
    def rank(self) -> int:
        """How many tokens the model finds likelier than the chosen one."""
        return int((self.logits > self.logits[self.chosen]).sum())


@dataclass
class Comparison:
    """How many tokens were compared and agree, and what is to be said about the others."""

    total: int = 0
    equal: int = 0
    finding: Finding | None = None
    comparable: bool = True


def compare(
    model: nn.Module, generate: UserGenerate, prompt: Tensor, count: int, *, limit: int | None, seed: int
) -> Comparison:
    """Let `generate` take the likeliest token each time, and compare each with the logits of a full forward.

    `prompt` is `[1, T]`. Draws are answered with the likeliest token; a generate that draws in another way is asked
    with top_k=1 or a tiny temperature, and not compared where it stays random. Raises what generate raises.
    """
    outcome = Comparison(comparable=False)
    for options in _ways(generate):
        outcome = _compare(model, generate, prompt, count, options, limit, seed)
        if outcome.comparable and (outcome.finding is None or not options):
            break
    return outcome


def is_greedy(model: nn.Module, prompt: Tensor, new: Tensor, limit: int | None) -> bool:
    """Whether each new id is, within rounding, the likeliest after those before it."""
    with quiet(model):
        tokens = _new_tokens(model, prompt, new, limit)
        return all(0 <= token.chosen < len(token.logits) and not token.wrong for token in tokens)


def _ways(generate: UserGenerate) -> Iterator[dict[str, Any]]:
    yield {}
    if "do_sample" in generate.options:
        yield {"do_sample": False}
    if "top_k" in generate.options:
        yield {"top_k": 1}
    if generate.temperature is not None:
        yield {generate.temperature: 1e-4}


def _compare(
    model: nn.Module,
    generate: UserGenerate,
    prompt: Tensor,
    count: int,
    options: dict[str, Any],
    limit: int | None,
    seed: int,
) -> Comparison:
    options = {**generate.neutral, **options}
    seed_all(seed)
    with quiet(model), recorded(model, greedy=True) as record:
        new = generate(prompt, count, **options)
    if not record.draws:
        # Where another seed gives the same tokens nothing is drawn, and the choice can be judged.
        seed_all(seed + 1)
        with quiet(model):
            again = generate(prompt, count, **options)
        if not torch.equal(again, new):
            return Comparison(comparable=False)
    if new.size(1) > count:
        text = f"{new.size(1)} new tokens for a prompt of {prompt.size(1)}, where {count} were asked for"
        return Comparison(int(new.numel()), 0, finding("GG680", text, likely=["too_many"], cause_id="too_many"))
    vocab = next((call.logits.size(-1) for call in record.calls if call.logits is not None), None)
    if new.numel() and vocab is not None and not 0 <= int(new.min()) <= int(new.max()) < vocab:
        text = f"generate gives ids from {int(new.min())} to {int(new.max())}, the model has {vocab}"
        return Comparison(int(new.numel()), 0, finding("GG680", text, likely=["output"]))
    with quiet(model):
        tokens = list(_new_tokens(model, prompt, new, limit, record))
    wrong = sum(token.wrong for token in tokens)
    return Comparison(len(tokens), len(tokens) - wrong, _judge(tokens))


def _new_tokens(
    model: nn.Module, prompt: Tensor, new: Tensor, limit: int | None, record: GenerateRecord | None = None
) -> Iterator[NewToken]:
    """Calls and draws belong to the tokens in order only where there are as many of them."""
    count = new.size(1)
    calls: list[ModelCall | None] = [None] * count
    draws: list[Tensor | None] = [None] * count
    if record is not None:
        calls = [*record.calls] if len(record.calls) == count else calls
        draws = [*record.draws] if len(record.draws) == count else draws
    running = prompt
    for place in range(count):
        context = cropped(running, limit)
        logits = last_logits(model, context)[0]
        yield NewToken(running, context, logits, int(new[0, place]), calls[place], draws[place])
        running = torch.cat([running, new[:, place : place + 1].to(running)], dim=1)


def _judge(tokens: list[NewToken]) -> Finding | None:
    """The finding for the cause that most of the tokens show, even where the likeliest one happens to agree."""
    wrong = [token for token in tokens if token.wrong]
    causes = [_cause(token) for token in tokens]
    shown = Counter(cause for cause in causes if cause is not None)
    evidence = {"tokens": len(tokens), "wrong": len(wrong), "shown": dict(shown)}
    start = f"{len(wrong)} of {len(tokens)} tokens are not the likeliest"
    if wrong and not shown and (position := _other_position(tokens)) is not None:
        seen = f"{start}; all are the likeliest by {position}"
        return finding("GG681", seen, likely=["position"], evidence=evidence, cause_id="position")
    if shown:
        cause = shown.most_common(1)[0][0]
        token, first = tokens[causes.index(cause)], tokens[0].call
        if cause == "short_context" and first is not None and first.ids.size(1) >= tokens[0].running.size(1) > 1:
            cause = "cache"  # the prompt went in whole: what came after it was to be remembered
        return finding("GG681", f"{start}; {_words(cause, token)}", likely=[cause], evidence=evidence, cause_id=cause)
    if not wrong:
        return None
    ranks = sorted(token.rank for token in wrong)
    median, vocab = ranks[len(ranks) // 2], tokens[0].logits.numel()
    seen = (
        f"{start}: the first has rank {wrong[0].rank + 1} of {vocab} and is {wrong[0].behind:.3g} behind in its logit"
    )
    far = median >= min(_FAR, vocab // 4)
    likely, severity = (["other", "cache"], Severity.ERROR) if far else (["penalty", "other"], Severity.WARNING)
    return finding("GG681", seen, likely=likely, severity=severity, evidence=evidence)


def _cause(token: NewToken) -> str | None:
    call = token.call
    if call is None:
        return None
    if call.ids.size(1) > 1 or token.running.size(1) == 1:
        misplaced = _misplaced(call.ids[0], token.running[0])
        if misplaced is not None:
            return misplaced
    if token.wrong and call.training:
        return "training"
    if call.logits is not None and call.logits.dim() == 3 and call.ids.size(1) < token.context.size(1):
        apart = float((call.logits[0, -1].float() - token.logits).abs().max())
        spread = float(token.logits.max() - token.logits.min())
        # A cache of half precision or of small integers rounds, which is meant; other logits are not.
        if apart > max(token.tolerance, _ROUNDED * spread):
            return "short_context"
    if token.draw is not None and _flattened(token.draw[0], token.logits):
        return "double_softmax"
    return None


def _misplaced(given: Tensor, running: Tensor) -> str | None:
    length = len(given)
    if length <= len(running) and torch.equal(given, running[-length:].to(given)):
        return None
    if length < len(running) and torch.equal(given, running[:length].to(given)):
        return "crop_end"
    return "prompt"


def _other_position(tokens: list[NewToken]) -> str | None:
    """The position whose likeliest token was chosen each time, counted from the end or the start; in words."""
    shared: set[tuple[str, int]] | None = None
    for token in tokens:
        if token.call is None or token.call.logits is None or token.call.logits.dim() != 3:
            return None
        likeliest = token.call.logits[0].argmax(dim=-1).tolist()
        fits = {place for place, best in enumerate(likeliest) if best == token.chosen}
        found = {("from the start", place) for place in fits} | {("", place - len(likeliest)) for place in fits}
        shared = found if shared is None else shared & found
    others = sorted(place for place in shared or () if place != ("", -1))
    return f"logits[:, {others[0][1]}]" if others else None


def _flattened(draw: Tensor, logits: Tensor) -> bool:
    """Whether what was drawn from is the softmax of the softmax."""
    if draw.shape != logits.shape:
        return False
    once = logits.softmax(dim=-1)
    twice = once.softmax(dim=-1)
    draw = draw.to(once) / draw.sum().to(once)
    return bool((draw - twice).abs().max() < 0.1 * (draw - once).abs().max())


def _words(cause: str, token: NewToken) -> str:
    given = token.call.ids.size(1) if token.call is not None else 0
    text = token.running.size(1)
    return {
        "crop_end": f"of {text} tokens the model was called on the first {given}, not the last",
        "prompt": f"the model was called on {given} tokens that are not the end of the {text} there were",
        "training": "the model was called in training mode",
        "short_context": f"the model was called on {given} of {text} tokens, and gave other logits than for all",
        "cache": f"called on the last {given} of {text} tokens after the prompt, it gave other logits than for all",
        "double_softmax": "what is drawn from is the softmax of probabilities, not of logits",
    }[cause]
