"""Stage 14: the model's own generate against its logits, and the text that comes of it against the corpus."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor, nn

from gpt_guard.catalogue import finding
from gpt_guard.checks.generation.corpus import (
    CLEARLY,
    COPIES,
    FEWEST,
    Corpus,
    HeldOutLosses,
    bigram_loss,
    corpus,
    held_out_losses,
)
from gpt_guard.checks.generation.decoding import GREEDY, MODERATE, SETTINGS, Setting, decode, last_logits
from gpt_guard.checks.generation.sampler import CONTEXT, SamplerLines, sampler
from gpt_guard.checks.generation.text_quality import CorpusBaseline, Loops, judge_chaos, judge_loops
from gpt_guard.checks.generation.user_generate import UserGenerate
from gpt_guard.checks.runner.base import MODEL, VOCABULARY, Need, Stage, Subject
from gpt_guard.checks.runner.perturb import probe_ids
from gpt_guard.hooks.isolation.preserve import quiet, seed_all
from gpt_guard.records import CheckResult, Severity

PROMPTS = 4
PROMPT = 16
TOKENS = 192
"""Samples of each setting, ids of a prompt, and new ids of a sample: five settings in about a second on two cores."""
SECONDS = 4.0
FEWEST_TOKENS = 64
"""Samples are cut short after so many seconds, and not judged where they are shorter than this."""
IGNORED = 0.01
"""Prompts count as ignored where the predictions after any two of them differ by less than this share of probability
(total variation distance, from 0 to 1); a bigram model of text is at 0.5 and above."""
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
    needs = (
        Need(MODEL.find, "no model was given"),
        Need(lambda subject: subject.causal or None, "causal=False: an encoder does not generate"),
        Need(VOCABULARY.find, "neither a batch nor a vocabulary size is known"),
    )

    def run(self, subject: Subject) -> Iterator[CheckResult]:
        model = MODEL(subject)
        text = corpus(subject)
        prompts = _prompts(subject, text)
        line, generate = sampler(self, model, prompts[:1], subject.block_size)
        yield line
        if generate is not None:
            for result in SamplerLines(self, subject, model, generate, prompts[:1]).lines():
                if result.status == "failed" and result.title in CONTEXT:
                    generate = None  # a text of some length cannot be had from it
                yield result
        yield self._prompts(model, prompts, trained=subject.trained)
        yield from self._text(model, subject, text, prompts, generate)

    def _prompts(self, model: nn.Module, prompts: Tensor, *, trained: bool) -> CheckResult:
        """Does what it says depend on the prompt, and on more than its last token?

        Compared are the next-token probabilities, so that a loop which all texts end in counts for nothing here.
        """
        same_end = prompts.clone()
        same_end[:, -1] = prompts[0, -1]
        with quiet(model):
            distance = _mean_distance(last_logits(model, prompts))
            earlier = _mean_distance(last_logits(model, same_end))
        title, expected = "different prompts", f"predictions that differ by {IGNORED:g} or more of 1"
        measured = f"{distance:.2g} apart, {earlier:.2g} with the same last token"
        evidence = {"distance": distance, "distance_same_last_token": earlier, "prompts": prompts.size(0)}
        if not distance >= IGNORED:
            if not trained:
                return self.skipped(title, f"untrained: {measured}")
            seen = f"the predictions after {prompts.size(0)} different prompts differ by {distance:.2g} of 1 on average"
            found = finding("GG686", seen, likely=["constant", "collapsed"], evidence=evidence)
            return self.line(title, measured, expected, found)
        only_last = None
        if earlier < 1e-6 and prompts.size(1) > 1:
            only_last = finding(
                "GG686",
                f"with the same last token all {prompts.size(0)} prompts give the same prediction",
                title="Only the last token of the prompt counts",
                severity=Severity.WARNING,
                likely=["last_token"],
                evidence=evidence,
            )
        return self.line(title, measured, expected, only_last)

    def _text(
        self,
        model: nn.Module,
        subject: Subject,
        text: Corpus | None,
        prompts: Tensor,
        generate: UserGenerate | None,
    ) -> Iterator[CheckResult]:
        why = _not_judged(subject, text)
        if why is not None or text is None:
            yield self.skipped("repetition and chaos", why or "no data")
            return
        with quiet(model):
            losses = held_out_losses(model, text, subject.block_size)
        yield self._end(losses)
        bigram = bigram_loss(text, VOCABULARY(subject))
        measured = f"loss {losses.inside:.3f} on held-out text, a bigram model's {bigram:.3f}"
        learned, copies = losses.inside < CLEARLY * bigram, losses.copied < COPIES
        if not learned and not copies:
            yield self.skipped("repetition and chaos", f"not judged: {measured}, so it has not learned enough yet")
            return
        if learned:
            yield self.line("learned", measured, f"at most {CLEARLY:g} of the bigram's, to judge the text")
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
        baseline = CorpusBaseline(text, VOCABULARY(subject), rows.size(2), subject.tokenizer, subject.seed)
        loops = [baseline.loops(setting, part) for setting, part in zip(SETTINGS, rows, strict=True)]
        yield self._repetition(baseline, loops, copies=copies)
        if learned:
            sampled = rows[SETTINGS.index(MODERATE)]
            yield self._chaos(baseline, sampled, str(MODERATE), ["leak", "positions", "tokenizer"])
            if generate is not None:
                seed_all(subject.seed)
                yield from self._defaults(model, generate, prompts, baseline, loops)

    def _end(self, losses: HeldOutLosses) -> CheckResult:
        title, expected = "last position", "about the loss inside the rows"
        measured = f"loss {losses.last:.3f}, inside the rows {losses.inside:.3f}"
        if not losses.falls_at_the_end:
            return self.line(title, measured, expected)
        seen = f"held-out rows: loss {losses.inside:.3f} inside them, {losses.last:.3f} at their last position"
        evidence = {"inside": losses.inside, "last": losses.last}
        return self.line(title, measured, expected, finding("GG689", seen, likely=["leak"], evidence=evidence))

    def _repetition(self, baseline: CorpusBaseline, loops: list[Loops], *, copies: bool) -> CheckResult:
        title = "repetition"
        own = next(one for one in loops if one.setting == _OWN)
        measured = (
            f"samples that loop: {'; '.join(f'{one.setting}: {one.looping:.0%}' for one in loops)}; at {_OWN} "
            f"{own.median.distinct:.0%} distinct 4-grams, longest loop {own.worst.loop:.0%}"
        )
        expected = (
            f"no loop over {baseline.loop_limit:.0%}, {1 - baseline.repeated_limit:.0%} distinct or more; "
            f"the corpus has loops to {baseline.loop:.0%}; greedy may loop"
        )
        found = judge_loops(loops, _OWN, copies=copies)
        figures = {
            one.setting: {"looping": one.looping, "distinct_4": one.median.distinct, "loop": one.worst.loop}
            for one in loops
        }
        return self.line(title, measured, expected, found, repetition=figures)

    def _chaos(self, baseline: CorpusBaseline, rows: Tensor, setting: str, likely: list[str]) -> CheckResult:
        title = "chaos" if setting == str(MODERATE) else f"chaos with {setting}"
        sample = baseline.figures(rows)
        measured = f"{setting}: {sample}" if title == "chaos" else str(sample)
        found = judge_chaos(sample, baseline, setting, baseline.decode(rows[0]), likely)
        expected = f"at most {baseline.limits}; held-out text has {baseline.held_out}"
        return self.line(title, measured, expected, found)

    def _defaults(
        self, model: nn.Module, generate: UserGenerate, prompts: Tensor, baseline: CorpusBaseline, loops: list[Loops]
    ) -> Iterator[CheckResult]:
        name, count = "generate's defaults", min(TOKENS, 96)
        with quiet(model):
            rows = torch.cat([generate(prompts[:2], count)]).cpu()
        if rows.size(1) < count:
            yield self.skipped(name, f"it stops after {rows.size(1)} of {count} tokens")
            return
        yield self._chaos(baseline, rows, name, ["decoding", "temperature", "mode"])
        ours = baseline.loops(name, rows)
        found = judge_loops([ours, *(one for one in loops if one.setting != str(GREEDY))], "") if ours.loops else None
        measured = f"{ours.median.distinct:.0%} distinct 4-grams, longest loop {ours.worst.loop:.0%}"
        yield self.line(f"repetition with {name}", measured, findings=found)


def _not_judged(subject: Subject, text: Corpus | None) -> str | None:
    if not subject.trained:
        return "not judged: the model is not trained, or nothing says that it is"
    if text is None:
        return f"not judged: needs at least {FEWEST:,} ids of training or validation data to compare with"
    low = min(int(text.seen.min()), int(text.held_out.min()))
    high = max(int(text.seen.max()), int(text.held_out.max()))
    if low < 0 or high >= (VOCABULARY(subject)):
        return "not judged: the data hold ids that the model does not have"
    return None


def _prompts(subject: Subject, text: Corpus | None) -> Tensor:
    """Prompts `[4, T]` from held-out text, else from the batch or at random, on the model's device."""
    limit = subject.block_size or 2 * PROMPT
    length = max(1, min(PROMPT, limit // 2))
    drawn = probe_ids(subject, PROMPTS, length)
    vocab = VOCABULARY(subject)
    if text is None or int(text.held_out.max()) >= vocab or int(text.held_out.min()) < 0:
        return drawn
    starts = torch.linspace(0, text.held_out.numel() - length, PROMPTS).long()
    return text.held_out[starts[:, None] + torch.arange(length)].to(drawn.device)


def _mean_distance(logits: Tensor) -> float:
    """The mean total variation distance between the probabilities of any two rows of logits `[B, V]`."""
    probabilities = logits.softmax(dim=-1)
    pairs = combinations(probabilities, 2)
    distances = [float((one - other).abs().sum() / 2) for one, other in pairs]
    return float(torch.tensor(distances).mean()) if distances else 0.0
