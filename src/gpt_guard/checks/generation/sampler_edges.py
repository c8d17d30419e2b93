"""The edges of a model's own `generate`: long prompts, its mode, temperature 0, a large top_k, the seed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.checks.generation.decoding import last_logits
from gpt_guard.checks.generation.faithful import compare
from gpt_guard.checks.generation.user_generate import Misfit, UserGenerate
from gpt_guard.checks.generation.witness import BadDraw, witnessing
from gpt_guard.checks.runner.raised import user_line
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.evaluation import evaluation_mode
from gpt_guard.hooks.isolation.eval_no_grad import quiet
from gpt_guard.hooks.isolation.random_state import seed_all
from gpt_guard.hooks.isolation.tolerance import across_shapes
from gpt_guard.records import Finding

_MISPLACED = ("crop_end", "prompt", "position", "too_many")


class Answer(NamedTuple):
    """What was measured, the finding that fails it, and those that are only worth knowing."""

    measured: str
    finding: Finding | None = None
    notes: tuple[Finding, ...] = ()


def long_text(
    model: nn.Module, generate: UserGenerate, ids: Tensor, length: int, block_size: int, count: int, seed: int
) -> Answer:
    """Generate from the first `length` of ids `[1, ...]` past block_size, and compare with our own cropped decoding."""
    prompt = ids[:, :length]
    with witnessing(model, greedy=True) as seen:
        try:
            done = compare(model, generate, prompt, count, limit=block_size, seed=seed)
        except (GuardUsageError, Misfit):
            raise
        except Exception as error:
            if not seen.calls and isinstance(error, (ValueError, AssertionError)) and length > block_size:
                return Answer(f"refused: {type(error).__name__}")
            longest = max((call.ids.size(1) for call in seen.calls), default=length)
            words = " ".join(str(error).split())[:160]
            asked = f"a prompt of {length} and {count} new tokens, block_size {block_size}"
            text = f"{asked}: {type(error).__name__}: {words}"
            likely = ["not_cropped"] if length > block_size else ["prompt_only", "off_by_one", "not_cropped"]
            return Answer(
                f"{type(error).__name__} with {longest} tokens",
                finding("GG682", text, likely=likely, where=user_line(error.__traceback__), cause_id=str(length)),
            )
    longest = max((call.ids.size(1) for call in seen.calls), default=0)
    if longest > block_size:
        return Answer(f"the model takes {longest} tokens, beyond block_size {block_size}")
    # A cache may rightly remember more than block_size: then other logits, and other tokens, are no fault.
    wrong = done.finding if done.finding is not None and done.finding.cause_id in _MISPLACED else None
    return Answer(f"{done.equal} of {done.total} tokens as the logits of the last {block_size} say", wrong)


def mode(model: nn.Module, generate: UserGenerate, prompt: Tensor) -> Answer:
    """Call it in eval and in training mode: which mode does the model run in, and which is it left in?"""
    has_dropout = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules())
    notes: list[Finding] = []
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with witnessing(model) as seen:
            generate(prompt, 2)
        if any(call.training for call in seen.calls):
            text = "called in eval mode, the model is in training mode while it generates"
            return Answer("training mode", finding("GG683", text, likely=["train_inside"], severity="error"))
        if any(module.training for module in model.modules()):
            text = "called in eval mode, generate leaves the model in training mode"
            return Answer("left in training mode", finding("GG683", text, likely=["left_in_train"]))
        model.train()
        with witnessing(model) as seen:
            generate(prompt, 2)
        if not any(module.training for module in model.modules()):
            text = "called in training mode, generate leaves the model in eval mode"
            return Answer("left in eval mode", finding("GG683", text, likely=["left_in_eval"]))
        if has_dropout and any(call.training for call in seen.calls):
            text = "called in training mode, generate runs with dropout on"
            notes.append(finding("GG683", text, likely=["caller"], severity="info"))
    finally:
        for module, training in before:
            module.training = training
    return Answer("eval mode, and the mode it was called in afterwards", None, tuple(notes))


def temperature_zero(
    model: nn.Module, generate: UserGenerate, prompt: Tensor, *, limit: int | None, vocab: int, seed: int
) -> Answer:
    """Temperature 0: the likeliest token, or a ValueError; an obscure exception is a note, a wrong text a failure."""
    name = generate.temperature
    assert name is not None, "asked by the stage"
    default = generate.options[name]
    if isinstance(default, (int, float)) and default < 0:
        text = f"the default temperature is {default}: unlikely tokens become the likeliest"
        return Answer(f"default {default}", finding("GG684", text, likely=["default_temperature"], severity="error"))
    with quiet(model), witnessing(model):
        seed_all(seed)
        try:
            new = generate(prompt, 4, **{**generate.neutral, name: 0.0})
        except (ValueError, AssertionError):
            return Answer("refused")
        except Exception as error:
            why = "NaN is drawn from" if isinstance(error, BadDraw) else f"{type(error).__name__}"
            text = f"temperature 0 ends in {why}: the logits are divided by it"
            used = default == 0
            found = finding(
                "GG684", text, likely=["default_temperature" if used else "zero_temperature"],
                severity="error" if used else "warning", cause_id="temperature",
            )  # fmt: skip
            return Answer(why, found) if used else Answer(why, None, (found,))
    greedy = generate_matches_greedy(model, prompt, new, limit)
    if greedy:
        return Answer("the likeliest token each time")
    if new.numel() and not 0 <= int(new.min()) <= int(new.max()) < vocab:
        text = f"with temperature 0 generate gives ids from {int(new.min())} to {int(new.max())} of {vocab}"
    else:
        text = "with temperature 0 generate gives tokens that are not the likeliest, without a word"
    return Answer("not the likeliest token", finding("GG684", text, likely=["zero_temperature"], severity="error"))


def generate_matches_greedy(model: nn.Module, prompt: Tensor, new: Tensor, limit: int | None) -> bool:
    """Whether each new id is, within rounding, the likeliest after those before it."""
    running = prompt
    with quiet(model):
        for place in range(new.size(1)):
            logits = last_logits(model, running if limit is None else running[:, -limit:])[0]
            chosen = int(new[0, place])
            if not 0 <= chosen < len(logits) or float(logits.max() - logits[chosen]) > across_shapes(logits):
                return False
            running = torch.cat([running, new[:, place : place + 1].to(running)], dim=1)
    return True


def temperature_two(
    model: nn.Module, generate: UserGenerate, prompt: Tensor, *, limit: int | None, seed: int
) -> Answer | None:
    """What is drawn from at temperature 2, against `softmax(logits / 2)`; None where that is right or unseen."""
    name = generate.temperature
    assert name is not None, "asked by the stage"
    with quiet(model):
        seed_all(seed)
        with witnessing(model) as seen:
            generate(prompt, 1, **{**generate.neutral, name: 2.0})
        logits = last_logits(model, prompt if limit is None else prompt[:, -limit:])[0]
    if len(seen.draws) != 1 or seen.draws[0].shape[-1] != logits.numel():
        return None
    draw = seen.draws[0][0].to(logits)
    draw = draw / draw.sum()
    ways = {
        "divided": (logits / 2).softmax(dim=-1),
        "multiplied": (logits * 2).softmax(dim=-1),
        "not used": logits.softmax(dim=-1),
    }
    apart = {way: float((draw - probabilities).abs().max()) for way, probabilities in ways.items()}
    nearest = min(apart, key=apart.__getitem__)
    # A model that is sure of nothing has the same distribution at every temperature.
    spread = float((ways["multiplied"] - ways["divided"]).abs().max())
    if nearest == "divided" or spread < 0.01 or apart[nearest] > 0.1 * spread:
        return None
    text = f"at temperature 2 the logits are {'multiplied by it' if nearest == 'multiplied' else 'as they were'}"
    code, likely = ("GG681", "temperature") if nearest == "multiplied" else ("GG684", "ignored")
    return Answer(f"the temperature is {nearest}", finding(code, text, likely=[likely], severity="error"))


def large_top_k(model: nn.Module, generate: UserGenerate, prompt: Tensor, vocab: int, seed: int) -> Answer:
    """top_k of 1 must give one possible token; one above the vocabulary all of them, or a ValueError."""
    with quiet(model):
        seed_all(seed)
        try:
            with witnessing(model) as seen:
                generate(prompt, 1, **{**generate.neutral, "top_k": 1})
        except (ValueError, AssertionError):
            return Answer("refused")
        possible = [int((draw[0] > 0).sum()) for draw in seen.draws]
        if possible and max(possible) > max(2, vocab // 10):
            text = f"with top_k=1 one of {max(possible)} tokens is drawn"
            return Answer("top_k is ignored", finding("GG684", text, likely=["ignored"], severity="error"))
        try:
            generate(prompt, 1, **{**generate.neutral, "top_k": vocab + 1})
        except (ValueError, AssertionError):
            return Answer("refused above the vocabulary")
        except Exception as error:
            text = f"top_k={vocab + 1} with {vocab} tokens: {type(error).__name__}"
            note = finding("GG684", text, likely=["top_k"], cause_id="top_k")
            return Answer(f"{type(error).__name__} above the vocabulary", None, (note,))
    return Answer("one token for 1, all for V + 1")


def same_seed(model: nn.Module, generate: UserGenerate, prompt: Tensor, count: int, seed: int) -> Answer:
    """Twice with the same seed, with its default settings."""
    texts = []
    with evaluation_mode(model):
        for _ in range(2):
            seed_all(seed)
            texts.append(generate(prompt, count))
    if torch.equal(*texts):
        return Answer(f"{count} tokens equal")
    text = "two generations under the same seed differ, in eval mode and with the same prompt"
    return Answer("another text", finding("GG685", text, likely=["own_generator", "state"]))
