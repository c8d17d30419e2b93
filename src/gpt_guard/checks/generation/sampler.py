"""The lines about the model's own `generate`: its choice, its mode, long texts, temperature, top_k and the seed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.checks.generation.decoding import cropped, last_logits
from gpt_guard.checks.generation.greedy_comparison import compare, is_greedy
from gpt_guard.checks.generation.user_generate import BadDraw, Misfit, UserGenerate, find_generate, recorded
from gpt_guard.checks.runner.base import Stage, Subject, vocabulary
from gpt_guard.checks.runner.forward import raised, user_line
from gpt_guard.checks.runner.perturb import probe_ids
from gpt_guard.errors import GuardUsageError
from gpt_guard.hooks.isolation.preserve import quiet, seed_all
from gpt_guard.hooks.modes import evaluation_mode
from gpt_guard.records import CheckResult, Finding, Severity

COMPARED = 12
"""New tokens that are compared one by one: a sampling loop that is wrong is so from the first or second on."""
CONTEXT = ("long prompt", "text past block_size")
"""The lines that ask for more than block_size."""
LONGEST = 4096
"""A block_size above this is not filled: one forward would take longer than all other checks."""
_MISPLACED = ("crop_end", "prompt", "position", "too_many")


def sampler(
    stage: Stage, model: nn.Module, prompt: Tensor, block_size: int | None
) -> tuple[CheckResult, UserGenerate | None]:
    """The line that says what generates, and the model's own method if it can be asked. Tries it on one token."""
    title = "sampler"
    generate = find_generate(model, block_size)
    if isinstance(generate, str):
        return stage.line(title, f"gpt_guard's own: {generate}"), None
    try:
        with quiet(model):
            generate(prompt, 1)
    except Misfit as why:
        return stage.line(title, f"gpt_guard's own: {why}"), None
    except Exception as error:  # the user's own method may raise anything
        if _takes_other(error):
            return stage.line(title, f"gpt_guard's own: {generate} does not take token ids ({error})"), None
        cause = raised(error, f"{generate} on {prompt.size(1)} ids")
        likely = ["defaults"] if generate.options.get(generate.temperature or "") == 0 else ["raised"]
        found = finding("GG680", cause.seen, likely=likely, where=cause.where)
        return stage.line(title, type(error).__name__, f"{generate} runs", found), None
    return stage.line(title, str(generate)), generate


def _takes_other(error: Exception) -> bool:
    words = str(error)
    called = isinstance(error, TypeError) and "generate()" in words
    of_a_tensor = "'Tensor' object" in words or words.startswith("Tensor.")
    return called or (isinstance(error, (AttributeError, TypeError)) and of_a_tensor)


class SamplerLines:
    """Asks a model's own `generate`, with a prompt `[1, T]`; all but the two lines on context stay within block_size.

    What does not crop must not be told of in every line.
    """

    def __init__(
        self, stage: Stage, subject: Subject, model: nn.Module, generate: UserGenerate, prompt: Tensor
    ) -> None:
        self._stage = stage
        self._subject = subject
        self._model = model
        self._generate = generate
        self._prompt = prompt
        self._limit = subject.block_size
        self._vocab = vocabulary(subject) or 1
        room = COMPARED if self._limit is None else self._limit - prompt.size(1)
        self._count = max(1, min(COMPARED, room))

    def lines(self) -> Iterator[CheckResult]:
        """The likeliest tokens, mode, context, settings and seed."""
        likeliest = self._likeliest_tokens()
        yield likeliest
        yield self._mode()
        yield from self._past_block_size()
        if likeliest.status != "failed":  # with other tokens than the likeliest a setting cannot be told from the fault
            if self._generate.temperature is not None:
                yield self._temperature_zero(self._generate.temperature)
                yield from self._temperature_two(self._generate.temperature)
            if "top_k" in self._generate.options:
                yield self._top_k()
        yield self._same_seed()

    def _likeliest_tokens(self) -> CheckResult:
        title, expected = "likeliest tokens", "those of a full forward's last position"
        done = compare(
            self._model, self._generate, self._prompt, self._count, limit=self._limit, seed=self._subject.seed
        )
        if not done.comparable:
            return self._stage.skipped(title, "generate draws in a way that cannot be made to take the likeliest")
        measured = f"{done.equal} of {done.total} equal"
        return self._stage.line(title, measured, expected, done.finding)

    def _mode(self) -> CheckResult:
        before = [(module, module.training) for module in self._model.modules()]
        try:
            measured, found = self._asked_in_both_modes()
        finally:
            for module, training in before:
                module.training = training
        expected = "eval mode, put back afterwards"
        return self._stage.line("mode", measured, expected, found, fails=Severity.WARNING)

    def _asked_in_both_modes(self) -> tuple[str, Finding | None]:
        """Call it in eval and in training mode: which mode does the model run in, and which is it left in?"""
        model = self._model
        model.eval()
        with recorded(model) as record:
            self._generate(self._prompt, 2)
        if any(call.training for call in record.calls):
            text = "called in eval mode, the model is in training mode while it generates"
            return "training mode", finding("GG683", text, likely=["train_inside"], severity=Severity.ERROR)
        if any(module.training for module in model.modules()):
            text = "called in eval mode, generate leaves the model in training mode"
            return "left in training mode", finding("GG683", text, likely=["left_in_train"])
        model.train()
        with recorded(model) as record:
            self._generate(self._prompt, 2)
        if not any(module.training for module in model.modules()):
            text = "called in training mode, generate leaves the model in eval mode"
            return "left in eval mode", finding("GG683", text, likely=["left_in_eval"])
        note = None
        has_dropout = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules())
        if has_dropout and any(call.training for call in record.calls):
            text = "called in training mode, generate runs with dropout on"
            note = finding("GG683", text, likely=["caller"], severity=Severity.INFO)
        return "eval mode, and the mode it was called in afterwards", note

    def _past_block_size(self) -> Iterator[CheckResult]:
        size = self._limit
        if size is None or size > LONGEST:
            why = "no block_size is known" if size is None else f"block_size is {size}"
            yield self._stage.skipped(CONTEXT[0], why)
            return
        ids = probe_ids(self._subject, 1, size + 4)
        for title, length in zip(CONTEXT, (size + 4, max(1, size - 1)), strict=True):
            measured, found = self._long_text(ids[:, :length], size)
            yield self._stage.line(title, measured, f"the last {size} tokens are looked at", found)

    def _long_text(self, prompt: Tensor, block_size: int) -> tuple[str, Finding | None]:
        """Generate past block_size, and compare with our own cropped decoding."""
        length, count = prompt.size(1), 4
        with recorded(self._model, greedy=True) as record:
            try:
                done = compare(self._model, self._generate, prompt, count, limit=block_size, seed=self._subject.seed)
            except (GuardUsageError, Misfit):
                raise
            except Exception as error:
                if not record.calls and isinstance(error, (ValueError, AssertionError)) and length > block_size:
                    return f"refused: {type(error).__name__}", None
                longest = max((call.ids.size(1) for call in record.calls), default=length)
                words = " ".join(str(error).split())[:160]
                asked = f"a prompt of {length} and {count} new tokens, block_size {block_size}"
                text = f"{asked}: {type(error).__name__}: {words}"
                likely = ["not_cropped"] if length > block_size else ["prompt_only", "off_by_one", "not_cropped"]
                where = user_line(error.__traceback__)
                found = finding("GG682", text, likely=likely, where=where, cause_id=str(length))
                return f"{type(error).__name__} with {longest} tokens", found
        longest = max((call.ids.size(1) for call in record.calls), default=0)
        if longest > block_size:
            return f"the model takes {longest} tokens, beyond block_size {block_size}", None
        # A cache may rightly remember more than block_size: then other logits, and other tokens, are no fault.
        wrong = done.finding if done.finding is not None and done.finding.cause_id in _MISPLACED else None
        return f"{done.equal} of {done.total} tokens as the logits of the last {block_size} say", wrong

    def _temperature_zero(self, name: str) -> CheckResult:
        """Temperature 0: the likeliest token, or a ValueError; an obscure exception is a note, a wrong text a fault."""
        title, expected = "temperature 0", "the likeliest token, or a ValueError"
        default = self._generate.options[name]
        if isinstance(default, (int, float)) and default < 0:
            text = f"the default temperature is {default}: unlikely tokens become the likeliest"
            found = finding("GG684", text, likely=["default_temperature"], severity=Severity.ERROR)
            return self._stage.line(title, f"default {default}", expected, found)
        with quiet(self._model), recorded(self._model):
            seed_all(self._subject.seed)
            try:
                new = self._generate(self._prompt, 4, **{**self._generate.neutral, name: 0.0})
            except (ValueError, AssertionError):
                return self._stage.line(title, "refused", expected)
            except Exception as error:
                why = "NaN is drawn from" if isinstance(error, BadDraw) else f"{type(error).__name__}"
                text = f"temperature 0 ends in {why}: the logits are divided by it"
                used = default == 0
                found = finding(
                    "GG684",
                    text,
                    likely=["default_temperature" if used else "zero_temperature"],
                    severity=Severity.ERROR if used else Severity.WARNING,
                    cause_id="temperature",
                )
                return self._stage.line(title, why, expected, found)
        if is_greedy(self._model, self._prompt, new, self._limit):
            return self._stage.line(title, "the likeliest token each time", expected)
        text = "with temperature 0 generate gives tokens that are not the likeliest, without a word"
        if new.numel() and not 0 <= int(new.min()) <= int(new.max()) < self._vocab:
            text = f"with temperature 0 generate gives ids from {int(new.min())} to {int(new.max())} of {self._vocab}"
        found = finding("GG684", text, likely=["zero_temperature"], severity=Severity.ERROR)
        return self._stage.line(title, "not the likeliest token", expected, found)

    def _temperature_two(self, name: str) -> Iterator[CheckResult]:
        """What is drawn from at temperature 2, against `softmax(logits / 2)`; nothing where that is right or unseen."""
        with quiet(self._model):
            seed_all(self._subject.seed)
            with recorded(self._model) as record:
                self._generate(self._prompt, 1, **{**self._generate.neutral, name: 2.0})
            logits = last_logits(self._model, cropped(self._prompt, self._limit))[0]
        if len(record.draws) != 1 or record.draws[0].shape[-1] != logits.numel():
            return
        draw = record.draws[0][0].to(logits)
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
            return
        text = f"at temperature 2 the logits are {'multiplied by it' if nearest == 'multiplied' else 'as they were'}"
        code, likely = ("GG681", "temperature") if nearest == "multiplied" else ("GG684", "ignored")
        found = finding(code, text, likely=[likely], severity=Severity.ERROR)
        yield self._stage.line("temperature 2", f"the temperature is {nearest}", "softmax(logits / 2)", found)

    def _top_k(self) -> CheckResult:
        """top_k of 1 must give one possible token; one above the vocabulary all of them, or a ValueError."""
        title, expected, neutral = "top_k", f"at most {self._vocab} tokens", self._generate.neutral
        with quiet(self._model):
            seed_all(self._subject.seed)
            try:
                with recorded(self._model) as record:
                    self._generate(self._prompt, 1, **{**neutral, "top_k": 1})
            except (ValueError, AssertionError):
                return self._stage.line(title, "refused", expected)
            possible = max((int((draw[0] > 0).sum()) for draw in record.draws), default=0)
            if possible > max(2, self._vocab // 10):
                text = f"with top_k=1 one of {possible} tokens is drawn"
                found = finding("GG684", text, likely=["ignored"], severity=Severity.ERROR)
                return self._stage.line(title, "top_k is ignored", expected, found)
            try:
                self._generate(self._prompt, 1, **{**neutral, "top_k": self._vocab + 1})
            except (ValueError, AssertionError):
                return self._stage.line(title, "refused above the vocabulary", expected)
            except Exception as error:
                text = f"top_k={self._vocab + 1} with {self._vocab} tokens: {type(error).__name__}"
                note = finding("GG684", text, likely=["top_k"], cause_id="top_k")
                return self._stage.line(title, f"{type(error).__name__} above the vocabulary", expected, note)
        return self._stage.line(title, "one token for 1, all for V + 1", expected)

    def _same_seed(self) -> CheckResult:
        """Twice with the same seed, with its default settings."""
        title, expected, texts = "same seed", "the same text", []
        with evaluation_mode(self._model):
            for _ in range(2):
                seed_all(self._subject.seed)
                texts.append(self._generate(self._prompt, self._count))
        if torch.equal(*texts):
            return self._stage.line(title, f"{self._count} tokens equal", expected)
        text = "two generations under the same seed differ, in eval mode and with the same prompt"
        found = finding("GG685", text, likely=["own_generator", "state"])
        return self._stage.line(title, "another text", expected, found, fails=Severity.WARNING)
