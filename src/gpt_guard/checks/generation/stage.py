"""Stage 14: the model's own generate against its logits, and the text that comes of it against the corpus."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.checks.generation.decoding import GREEDY, MODERATE, SETTINGS, Setting, decode
from gpt_guard.checks.generation.learned import (
    CLEARLY,
    COPIES,
    FEWEST,
    Corpus,
    Losses,
    bigram_loss,
    corpus,
    held_out_losses,
)
from gpt_guard.checks.generation.prompts import IGNORED, influence
from gpt_guard.checks.generation.sampler_lines import CONTEXT, sampler, sampler_lines
from gpt_guard.checks.generation.samples import Loops, Yardstick, judge_chaos, judge_loops
from gpt_guard.checks.generation.user_generate import UserGenerate
from gpt_guard.checks.runner.base import Stage, Subject
from gpt_guard.checks.runner.perturb import probe_ids, vocabulary
from gpt_guard.hooks.isolation.eval_no_grad import quiet
from gpt_guard.hooks.isolation.random_state import seed_all
from gpt_guard.records import CheckResult, Severity

PROMPTS = 4
PROMPT = 16
TOKENS = 192
"""Samples of each setting, ids of a prompt, and new ids of a sample: five settings in about a second on two cores."""
SECONDS = 4.0
FEWEST_TOKENS = 64
"""Samples are cut short after so many seconds, and not judged where they are shorter than this."""
_OWN = str(Setting())


class GenerationStage(Stage):
    """Sampling loop, mode, context, settings, seed and prompt for any model; loops and chaos for a trained one.

    Loops and chaos are judged only where the loss on held-out text is clearly below that of a bigram model: before
    that, babble and loops are what training has come to, and no fault.
    """

    number = 14
    name = "generation"
    title = "Generation"
    after = ("shapes", "causality")

    def missing(self, subject: Subject) -> str | None:
        if subject.model is None:
            return "no model was given"
        if not subject.causal:
            return "causal=False: an encoder does not generate"
        return "neither a batch nor a vocabulary size is known" if vocabulary(subject) is None else None

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        model = subject.model
        assert model is not None, "the runner asks missing() first"
        text = corpus(subject)
        prompts = _prompts(subject, text)
        line, generate = sampler(self, model, prompts[:1], subject.block_size)
        yield line
        if generate is not None:
            for result in sampler_lines(self, subject, generate, prompts[:1]):
                if result.status == "failed" and result.title in CONTEXT:
                    generate = None  # a text of some length cannot be had from it
                yield result
        yield self._prompts(model, prompts, trained=subject.trained)
        yield from self._text(subject, text, prompts, generate)

    def _prompts(self, model: nn.Module, prompts: Tensor, *, trained: bool) -> CheckResult:
        title, expected = "different prompts", f"predictions that differ by {IGNORED:g} or more of 1"
        found = influence(model, prompts)
        measured = f"{found.prompts:.2g} apart, {found.earlier:.2g} with the same last token"
        if found.finding is not None and not trained:
            return self.skipped(title, f"untrained: {measured}")
        if found.finding is not None:
            return self.failed(title, measured, expected, found.finding)
        return self.passed(title, measured, expected, notes=[found.note] if found.note is not None else [])

    def _text(
        self, subject: Subject, text: Corpus | None, prompts: Tensor, generate: UserGenerate | None
    ) -> Iterator[CheckResult]:
        model = subject.model
        assert model is not None, "asked in run()"
        why = _not_judged(subject, text)
        if why is not None or text is None:
            yield self.skipped("repetition and chaos", why or "no data")
            return
        with quiet(model):
            losses = held_out_losses(model, text, subject.block_size)
        yield self._end(losses)
        bigram = bigram_loss(text, vocabulary(subject) or 1)
        told = f"loss {losses.inside:.3f} on held-out text, a bigram model's {bigram:.3f}"
        learned, copies = losses.inside < CLEARLY * bigram, losses.copied < COPIES
        if not learned and not copies:
            yield self.skipped("repetition and chaos", f"not judged: {told}, so it has not learned enough yet")
            return
        if learned:
            yield self.passed("learned", told, f"at most {CLEARLY:g} of the bigram's, to judge the text")
        generator = torch.Generator().manual_seed(subject.seed)
        with quiet(model):
            rows = decode(
                model, prompts, TOKENS, SETTINGS, limit=subject.block_size, generator=generator, seconds=SECONDS
            ).cpu()
        if rows.size(2) < FEWEST_TOKENS:
            yield self.skipped(
                "repetition and chaos", f"not judged: {rows.size(2)} tokens in {SECONDS:g} s are too few"
            )
            return
        yardstick = Yardstick(text, vocabulary(subject) or 1, rows.size(2), subject.tokenizer, subject.seed)
        loops = [yardstick.loops(setting, part) for setting, part in zip(SETTINGS, rows, strict=True)]
        yield self._repetition(yardstick, loops, copies=copies)
        if learned:
            sampled = rows[SETTINGS.index(MODERATE)]
            yield self._chaos(yardstick, sampled, str(MODERATE), ["leak", "positions", "tokenizer"])
            if generate is not None:
                yield from self._defaults(subject, generate, prompts, yardstick, loops)

    def _end(self, losses: Losses) -> CheckResult:
        title, expected = "last position", "about the loss inside the rows"
        told = f"loss {losses.last:.3f}, inside the rows {losses.inside:.3f}"
        if not losses.falls_at_the_end:
            return self.passed(title, told, expected)
        seen = f"held-out rows: loss {losses.inside:.3f} inside them, {losses.last:.3f} at their last position"
        evidence = {"inside": losses.inside, "last": losses.last}
        return self.failed(title, told, expected, finding("GG689", seen, likely=["leak"], evidence=evidence))

    def _repetition(self, yardstick: Yardstick, loops: list[Loops], *, copies: bool) -> CheckResult:
        title = "repetition"
        own = next(one for one in loops if one.setting == _OWN)
        told = (
            f"samples that loop: {'; '.join(f'{one.setting}: {one.looping:.0%}' for one in loops)}; at {_OWN} "
            f"{own.median.distinct:.0%} distinct 4-grams, longest loop {own.worst.loop:.0%}"
        )
        expected = (
            f"no loop over {yardstick.loop_limit:.0%}, {1 - yardstick.repeated_limit:.0%} distinct or more; "
            f"the corpus has loops to {yardstick.usual.loop:.0%}; greedy may loop"
        )
        found = judge_loops(loops, _OWN, copies=copies)
        facts = {
            "repetition": {
                one.setting: {"looping": one.looping, "distinct_4": one.median.distinct, "loop": one.worst.loop}
                for one in loops
            }
        }
        if found is not None and found.severity is Severity.ERROR:
            return self.failed(title, told, expected, found, **facts)
        return self.passed(title, told, expected, notes=[found] if found is not None else [], **facts)

    def _chaos(self, yardstick: Yardstick, rows: Tensor, setting: str, likely: list[str]) -> CheckResult:
        title = "chaos" if setting == str(MODERATE) else f"chaos with {setting}"
        sample = yardstick.figures(rows)
        told = f"{setting}: {sample}" if title == "chaos" else str(sample)
        found = judge_chaos(sample, yardstick, setting, yardstick.decode(rows[0]), likely)
        expected = f"at most {yardstick.limits}; held-out text has {yardstick.held_out}"
        if found is not None:
            return self.failed(title, told, expected, found)
        return self.passed(title, told, expected)

    def _defaults(
        self, subject: Subject, generate: UserGenerate, prompts: Tensor, yardstick: Yardstick, loops: list[Loops]
    ) -> Iterator[CheckResult]:
        model = subject.model
        assert model is not None, "asked in run()"
        name, count = "generate's defaults", min(TOKENS, 96)
        seed_all(subject.seed)
        with quiet(model):
            rows = torch.cat([generate(prompts[:2], count)]).cpu()
        if rows.size(1) < count:
            yield self.skipped(name, f"it stops after {rows.size(1)} of {count} tokens")
            return
        yield self._chaos(yardstick, rows, name, ["decoding", "temperature", "mode"])
        ours = yardstick.loops(name, rows)
        found = judge_loops([ours, *(one for one in loops if one.setting != str(GREEDY))], "") if ours.loops else None
        measured = f"{ours.median.distinct:.0%} distinct 4-grams, longest loop {ours.worst.loop:.0%}"
        notes = [found] if found is not None else []
        yield self.passed(f"repetition with {name}", measured, notes=notes)


def _not_judged(subject: Subject, text: Corpus | None) -> str | None:
    if not subject.trained:
        return "not judged: the model is not trained, or nothing says that it is"
    if text is None:
        return f"not judged: needs at least {FEWEST:,} ids of training or validation data to compare with"
    low = min(int(text.seen.min()), int(text.held_out.min()))
    high = max(int(text.seen.max()), int(text.held_out.max()))
    if low < 0 or high >= (vocabulary(subject) or 1):
        return "not judged: the data hold ids that the model does not have"
    return None


def _prompts(subject: Subject, text: Corpus | None) -> Tensor:
    """Prompts `[4, T]` from held-out text, else from the batch or at random, on the model's device."""
    limit = subject.block_size or 2 * PROMPT
    length = max(1, min(PROMPT, limit // 2))
    drawn = probe_ids(subject, PROMPTS, length)
    vocab = vocabulary(subject) or 1
    if text is None or int(text.held_out.max()) >= vocab or int(text.held_out.min()) < 0:
        return drawn
    starts = torch.linspace(0, text.held_out.numel() - length, PROMPTS).long()
    return text.held_out[starts[:, None] + torch.arange(length)].to(drawn.device)
