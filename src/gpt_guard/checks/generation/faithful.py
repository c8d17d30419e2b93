"""Does the model's own `generate` choose what the model predicts? Token by token against our own greedy decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.checks.generation.decoding import last_logits
from gpt_guard.checks.generation.user_generate import UserGenerate
from gpt_guard.checks.generation.witness import Call, Witness, witnessing
from gpt_guard.hooks.isolation.eval_no_grad import quiet
from gpt_guard.hooks.isolation.random_state import seed_all
from gpt_guard.hooks.isolation.tolerance import across_shapes
from gpt_guard.records import Finding, Severity

_ROUNDED = 0.05
"""Share of the logits' spread that a cache in half precision or int8 may cost."""
_FAR = 10
"""A token that is this far down the model's list is no matter of a penalty or of a tie."""


@dataclass(eq=False)
class Step:
    """One new token: the text before it, the model's own logits for it `[V]`, what was chosen, and the call seen."""

    running: Tensor
    logits: Tensor
    chosen: int
    call: Call | None
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
        if outcome.comparable and outcome.finding is None:
            break
        if outcome.comparable and not options:
            break
    return outcome


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
    seed_all(seed)
    with quiet(model), witnessing(model, greedy=True) as seen:
        new = generate(prompt, count, **{**generate.neutral, **options})
    if not seen.draws and not _repeats(model, generate, prompt, count, options, new, seed):
        return Comparison(comparable=False)
    if new.size(1) > count:
        text = f"{new.size(1)} new tokens for a prompt of {prompt.size(1)}, where {count} were asked for"
        return Comparison(int(new.numel()), 0, finding("GG680", text, likely=["too_many"], cause_id="too_many"))
    vocab = _steps_vocab(seen)
    if new.numel() and vocab is not None and not 0 <= int(new.min()) <= int(new.max()) < vocab:
        text = f"generate gives ids from {int(new.min())} to {int(new.max())}, the model has {vocab}"
        return Comparison(int(new.numel()), 0, finding("GG680", text, likely=["output"]))
    steps = _steps(model, prompt, new, seen, limit)
    wrong = [step for step in steps if step.behind > step.tolerance]
    outcome = Comparison(len(steps), len(steps) - len(wrong))
    outcome.finding = _judge(model, steps, wrong, limit)
    return outcome


def _repeats(
    model: nn.Module,
    generate: UserGenerate,
    prompt: Tensor,
    count: int,
    options: dict[str, Any],
    new: Tensor,
    seed: int,
) -> bool:
    """True where another seed gives the same tokens: nothing is drawn, and the choice can be judged."""
    seed_all(seed + 1)
    with quiet(model):
        again = generate(prompt, count, **{**generate.neutral, **options})
    return torch.equal(again, new)


def _steps_vocab(seen: Witness) -> int | None:
    return next((call.logits.size(-1) for call in seen.calls if call.logits is not None), None)


def _steps(model: nn.Module, prompt: Tensor, new: Tensor, seen: Witness, limit: int | None) -> list[Step]:
    """Calls and draws belong to the tokens in order only where there are as many of them."""
    count = new.size(1)
    calls: list[Call | None] = [*seen.calls] if len(seen.calls) == count else [None] * count
    draws: list[Tensor | None] = [*seen.draws] if len(seen.draws) == count else [None] * count
    steps = []
    running = prompt
    with quiet(model):
        for place in range(count):
            context = running if limit is None else running[:, -limit:]
            logits = last_logits(model, context)[0]
            chosen = int(new[0, place])
            steps.append(Step(running, logits, chosen, calls[place], draws[place]))
            running = torch.cat([running, new[:, place : place + 1].to(running)], dim=1)
    return steps


def _judge(model: nn.Module, steps: list[Step], wrong: list[Step], limit: int | None) -> Finding | None:
    """The finding for the cause that most of the steps show, even where the likeliest token happens to agree."""
    shown: Counter[str] = Counter(cause for step in steps if (cause := _cause(step, step in wrong, limit)) is not None)
    evidence = {"tokens": len(steps), "wrong": len(wrong), "shown": dict(shown)}
    if wrong and not shown and (position := _other_position(steps)) is not None:
        seen = f"{len(wrong)} of {len(steps)} tokens are not the likeliest; all are the likeliest by {position}"
        return finding("GG681", seen, likely=["position"], evidence=evidence, cause_id="position")
    if shown:
        cause = shown.most_common(1)[0][0]
        step = next(one for one in steps if _cause(one, one in wrong, limit) == cause)
        first = steps[0].call
        if cause == "short_context" and first is not None and first.ids.size(1) >= steps[0].running.size(1) > 1:
            cause = "cache"  # the prompt went in whole: what came after it was to be remembered
        seen = f"{len(wrong)} of {len(steps)} tokens are not the likeliest; {_words(cause, step)}"
        return finding("GG681", seen, likely=[cause], evidence=evidence, cause_id=cause)
    if not wrong:
        return None
    ranks = sorted(step.rank for step in wrong)
    median, vocab = ranks[len(ranks) // 2], steps[0].logits.numel()
    seen = (
        f"{len(wrong)} of {len(steps)} tokens are not the likeliest: the first has rank {wrong[0].rank + 1} of {vocab} "
        f"and is {wrong[0].behind:.3g} behind in its logit"
    )
    far = median >= min(_FAR, vocab // 4)
    likely, severity = (["other", "cache"], Severity.ERROR) if far else (["penalty", "other"], Severity.WARNING)
    return finding("GG681", seen, likely=likely, severity=severity, evidence=evidence)


def _cause(step: Step, wrong: bool, limit: int | None) -> str | None:
    call = step.call
    if call is None:
        return None
    context = step.running if limit is None else step.running[:, -limit:]
    if call.ids.size(1) > 1 or step.running.size(1) == 1:
        misplaced = _misplaced(call.ids[0], step.running[0])
        if misplaced is not None:
            return misplaced
    if wrong and call.training:
        return "training"
    if call.logits is not None and call.logits.dim() == 3 and call.ids.size(1) < context.size(1):
        apart = float((call.logits[0, -1].float() - step.logits).abs().max())
        spread = float(step.logits.max() - step.logits.min())
        # A cache of half precision or of small integers rounds, which is meant; other logits are not.
        if apart > max(step.tolerance, _ROUNDED * spread):
            return "short_context"
    if step.draw is not None and _flattened(step.draw[0], step.logits):
        return "double_softmax"
    return None


def _misplaced(given: Tensor, running: Tensor) -> str | None:
    length = len(given)
    if length <= len(running) and torch.equal(given, running[-length:].to(given)):
        return None
    if length < len(running) and torch.equal(given, running[:length].to(given)):
        return "crop_end"
    return "prompt"


def _other_position(steps: list[Step]) -> str | None:
    """The position whose likeliest token was chosen in every step, counted from the end or the start; in words."""
    shared: set[tuple[str, int]] | None = None
    for step in steps:
        if step.call is None or step.call.logits is None or step.call.logits.dim() != 3:
            return None
        likeliest = step.call.logits[0].argmax(dim=-1).tolist()
        fits = {place for place, token in enumerate(likeliest) if token == step.chosen}
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


def _words(cause: str, step: Step) -> str:
    given = step.call.ids.size(1) if step.call is not None else 0
    text = step.running.size(1)
    return {
        "crop_end": f"of {text} tokens the model was called on the first {given}, not the last",
        "prompt": f"the model was called on {given} tokens that are not the end of the {text} there were",
        "training": "the model was called in training mode",
        "short_context": f"the model was called on {given} of {text} tokens, and gave other logits than for all",
        "cache": f"called on the last {given} of {text} tokens after the prompt, it gave other logits than for all",
        "double_softmax": "what is drawn from is the softmax of probabilities, not of logits",
    }[cause]
