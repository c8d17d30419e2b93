"""Stage 14, the sampling loop: a healthy one passes, each planted fault fails on its line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard.checks.runner.run import check
from gpt_guard.records import Severity
from mini_gpt import MiniGPT, MiniGPTConfig

from ..variants import HEALTHY, asked
from .planted import BLOCK, TinyGPT, V, ask, draw, failures, line, with_generate, with_step


def argmax_only(self: TinyGPT, idx: Tensor, max_new_tokens: int) -> Tensor:
    for _ in range(max_new_tokens):
        idx = torch.cat([idx, self(idx[:, -BLOCK:])[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return idx


def only_new(self: TinyGPT, x: Tensor, steps: int) -> Tensor:
    return argmax_only(self, x, steps)[:, x.size(1) :]


def context_given(self: TinyGPT, idx: Tensor, max_new_tokens: int, context_size: int) -> Tensor:
    assert context_size == BLOCK
    return argmax_only(self, idx, max_new_tokens)


def with_penalty(self: TinyGPT, idx: Tensor, max_new_tokens: int, repetition_penalty: float = 1.3) -> Tensor:
    for _ in range(max_new_tokens):
        logits = self(idx[:, -BLOCK:])[:, -1]
        seen = logits.gather(1, idx)
        logits = logits.scatter(1, idx, torch.where(seen > 0, seen / repetition_penalty, seen * repetition_penalty))
        idx = torch.cat([idx, draw(logits)], dim=1)
    return idx


def bans_a_token(self: TinyGPT, idx: Tensor, max_new_tokens: int) -> Tensor:
    for _ in range(max_new_tokens):
        logits = self(idx[:, -BLOCK:])[:, -1]
        logits[:, :2] = -torch.inf
        idx = torch.cat([idx, draw(logits)], dim=1)
    return idx


def gumbel(self: TinyGPT, idx: Tensor, max_new_tokens: int, temperature: float = 1.0) -> Tensor:
    for _ in range(max_new_tokens):
        logits = self(idx[:, -BLOCK:])[:, -1]
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
        chosen = logits + (temperature * noise if temperature else 0)
        idx = torch.cat([idx, chosen.argmax(dim=-1, keepdim=True)], dim=1)
    return idx


def refuses_long_prompts(self: TinyGPT, idx: Tensor, max_new_tokens: int) -> Tensor:
    if idx.size(1) > BLOCK:
        raise ValueError(f"the prompt has {idx.size(1)} tokens, at most {BLOCK}")
    return argmax_only(self, idx, max_new_tokens)


def evaluates(self: TinyGPT, idx: Tensor, max_new_tokens: int) -> Tensor:
    was = self.training
    self.eval()
    idx = argmax_only(self, idx, max_new_tokens)
    self.train(was)
    return idx


@pytest.mark.parametrize(
    "method",
    [argmax_only, only_new, context_given, with_penalty, bans_a_token, gumbel, refuses_long_prompts, evaluates],
)
def test_healthy_loops_pass(method: Callable[..., Tensor]) -> None:
    report = ask(with_generate(method, dropout=0.3))
    assert failures(report) == []
    assert "model.generate" in line(report, "sampler").measured


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_tutorials_loop_passes_every_line(dropout: float) -> None:
    report = ask(TinyGPT(dropout=dropout))
    assert failures(report) == []
    assert line(report, "likeliest tokens").measured == "4 of 4 equal"
    assert line(report, "temperature 0").measured == "the likeliest token each time"
    assert line(report, "long prompt").status == line(report, "text past block_size").status == "passed"


def test_a_loop_that_leaves_the_mode_to_its_caller_is_a_note() -> None:
    (note,) = [found for found in ask(TinyGPT(dropout=0.2)).findings if found.code == "GG683"]
    assert note.severity is Severity.INFO
    assert not [found for found in ask(TinyGPT()).findings if found.code == "GG683"]


def test_the_examples_generate_passes_without_a_finding() -> None:
    report = ask(MiniGPT(MiniGPTConfig(V, block_size=BLOCK, embedding_dim=16, num_heads=2)))
    assert report.findings == ()
    assert {result.title for result in report.checks if result.status == "skipped"} == {"repetition and chaos"}


def wrong_position(model: TinyGPT, ids: Tensor) -> Tensor:
    return draw(model(ids[:, -BLOCK:])[:, -2])


def first_position(model: TinyGPT, ids: Tensor) -> Tensor:
    return draw(model(ids[:, -BLOCK:])[:, 0])


def crops_the_end(model: TinyGPT, ids: Tensor) -> Tensor:
    return draw(model(ids[:, :3])[:, -1])


def last_token_only(model: TinyGPT, ids: Tensor) -> Tensor:
    return draw(model(ids[:, -1:])[:, -1])


def drops_the_prompt(model: TinyGPT, ids: Tensor) -> Tensor:
    return draw(model(torch.full_like(ids[:, -BLOCK:], 5))[:, -1])


def softmax_twice(model: TinyGPT, ids: Tensor) -> Tensor:
    return draw(model(ids[:, -BLOCK:])[:, -1].softmax(dim=-1))


def unlikeliest(model: TinyGPT, ids: Tensor) -> Tensor:
    chosen: Tensor = model(ids[:, -BLOCK:])[:, -1].argmin(dim=-1, keepdim=True)
    return chosen


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (wrong_position, "another position than the last"),
        (first_position, "another position than the last"),
        (crops_the_end, "wrong end"),
        (last_token_only, "fewer tokens"),
        (drops_the_prompt, "something other than the prompt"),
        (softmax_twice, "Softmax is taken twice"),
        (unlikeliest, "a rule that is not the model's distribution"),
    ],
)
def test_a_wrong_step_is_found_and_named(step: Callable[[TinyGPT, Tensor], Tensor], words: str) -> None:
    torch.manual_seed(3)
    report = ask(with_step(step))
    result = line(report, "likeliest tokens")
    assert result.status == "failed"
    (finding,) = result.findings
    assert finding.code == "GG681"
    assert words in finding.causes[0]


def test_dropout_during_generation_is_found() -> None:
    def trains(model: TinyGPT, ids: Tensor) -> Tensor:
        model.train()
        return draw(model(ids[:, -BLOCK:])[:, -1])

    report = ask(with_step(trains, dropout=0.5))
    assert ("mode", "GG683") in failures(report)
    assert line(report, "mode").measured == "training mode"


def forgets_to_crop(model: TinyGPT, ids: Tensor) -> Tensor:
    return draw(model(ids)[:, -1])


def off_by_one(model: TinyGPT, ids: Tensor) -> Tensor:
    return draw(model(ids[:, -BLOCK - 1 :])[:, -1])


@pytest.mark.parametrize("step", [forgets_to_crop, off_by_one])
def test_a_context_that_is_not_cropped_is_found(step: Callable[[TinyGPT, Tensor], Tensor]) -> None:
    report = ask(with_step(step))
    assert failures(report) == [("long prompt", "GG682"), ("text past block_size", "GG682")]
    (finding, _) = report.findings
    assert finding.where is not None
    assert "self.positions" in finding.where.text


def test_a_prompt_that_alone_is_cropped_is_found() -> None:
    def crops_once(self: TinyGPT, idx: Tensor, max_new_tokens: int) -> Tensor:
        idx = idx[:, -BLOCK:]
        for _ in range(max_new_tokens):
            idx = torch.cat([idx, draw(self(idx)[:, -1])], dim=1)
        return idx

    assert ("text past block_size", "GG682") in failures(ask(with_generate(crops_once)))


def likeliest(model: TinyGPT, ids: Tensor, until: int) -> Tensor:
    while ids.size(1) < until:
        ids = torch.cat([ids, model(ids[:, -BLOCK:])[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return ids


def counted_from_the_whole(self: TinyGPT, ids: Tensor, max_new_tokens: int) -> Tensor:
    return likeliest(self, ids[:, -BLOCK:], ids.size(1) + max_new_tokens)


def once_too_often(self: TinyGPT, ids: Tensor, max_new_tokens: int) -> Tensor:
    return likeliest(self, ids, ids.size(1) + max_new_tokens + 1)


def cropped_first(self: TinyGPT, ids: Tensor, max_new_tokens: int) -> Tensor:
    ids = ids[:, -BLOCK:]
    return likeliest(self, ids, ids.size(1) + max_new_tokens)


def new_ones_alone(self: TinyGPT, ids: Tensor, max_new_tokens: int) -> Tensor:
    return cropped_first(self, ids, max_new_tokens)[:, -max_new_tokens:]


@pytest.mark.parametrize(
    ("method", "title"), [(counted_from_the_whole, "long prompt"), (once_too_often, "likeliest tokens")]
)
def test_more_than_was_asked_for_is_told(method: Callable[..., Tensor], title: str) -> None:
    report = ask(with_generate(method))
    assert failures(report)[0] == (title, "GG680")
    assert report.failed[0].findings[0].causes[0].startswith("It adds more ids than were asked for")


@pytest.mark.parametrize("method", [cropped_first, new_ones_alone])
def test_a_cropped_prompt_is_no_fault(method: Callable[..., Tensor]) -> None:
    assert failures(ask(with_generate(method))) == []


@pytest.mark.parametrize(
    ("before", "after", "measured"),
    [("eval", "train", "left in training mode"), ("eval", "eval", "left in eval mode")],
)
def test_a_mode_that_is_not_put_back_is_found(before: str, after: str, measured: str) -> None:
    def switches(self: TinyGPT, idx: Tensor, max_new_tokens: int) -> Tensor:
        getattr(self, before)()
        idx = argmax_only(self, idx, max_new_tokens)
        getattr(self, after)()
        return idx

    report = ask(with_generate(switches))
    assert failures(report) == [("mode", "GG683")]
    assert line(report, "mode").measured == measured


def divides(self: TinyGPT, idx: Tensor, max_new_tokens: int, temperature: float = 1.0) -> Tensor:
    for _ in range(max_new_tokens):
        idx = torch.cat([idx, draw(self(idx[:, -BLOCK:])[:, -1] / temperature)], dim=1)
    return idx


def divides_without_a_word(self: TinyGPT, idx: Tensor, max_new_tokens: int, temperature: float = 1.0) -> Tensor:
    for _ in range(max_new_tokens):
        logits = (self(idx[:, -BLOCK:])[:, -1] / temperature).softmax(dim=-1).nan_to_num(0.0)
        idx = torch.cat([idx, torch.multinomial(logits + 1e-9, 1)], dim=1)
    return idx


def multiplies(self: TinyGPT, idx: Tensor, max_new_tokens: int, temperature: float = 1.0) -> Tensor:
    for _ in range(max_new_tokens):
        idx = torch.cat([idx, draw(self(idx[:, -BLOCK:])[:, -1] * max(temperature, 1e-6))], dim=1)
    return idx


def ignores_settings(
    self: TinyGPT, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None
) -> Tensor:
    return divides(self, idx, max_new_tokens) if temperature else argmax_only(self, idx, max_new_tokens)


def test_a_division_by_a_temperature_of_zero_is_a_note_where_it_raises_and_a_failure_where_it_does_not() -> None:
    loud = ask(with_generate(divides))
    assert failures(loud) == []
    (note,) = loud.findings
    assert (note.code, note.severity) == ("GG684", Severity.WARNING)
    assert "divided by a temperature of 0" in note.causes[0]
    assert failures(ask(with_generate(divides_without_a_word))) == [("temperature 0", "GG684")]


def test_a_default_temperature_of_zero_that_cannot_work_is_a_failure() -> None:
    def by_default(self: TinyGPT, idx: Tensor, max_new_tokens: int, temperature: float = 0.0) -> Tensor:
        return divides(self, idx, max_new_tokens, temperature)

    report = ask(with_generate(by_default))
    assert failures(report) == [("sampler", "GG680")]
    assert "default settings" in report.findings[0].causes[0]


def test_settings_that_are_multiplied_or_ignored_are_found() -> None:
    assert ("temperature 2", "GG681") in failures(ask(with_generate(multiplies)))
    assert failures(ask(with_generate(ignores_settings))) == [("temperature 2", "GG684"), ("top_k", "GG684")]


def test_a_top_k_above_the_vocabulary_that_raises_is_a_note() -> None:
    def no_minimum(self: TinyGPT, idx: Tensor, max_new_tokens: int, top_k: int = 5) -> Tensor:
        for _ in range(max_new_tokens):
            logits = self(idx[:, -BLOCK:])[:, -1]
            idx = torch.cat([idx, draw(logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -1e9))], dim=1)
        return idx

    report = ask(with_generate(no_minimum))
    assert failures(report) == []
    assert [found.code for found in report.findings] == ["GG684"]


def test_another_text_under_the_same_seed_is_found() -> None:
    own = torch.Generator()

    def own_generator(model: TinyGPT, ids: Tensor) -> Tensor:
        return torch.multinomial(model(ids[:, -BLOCK:])[:, -1].softmax(dim=-1), 1, generator=own)

    torch.manual_seed(1)
    assert failures(ask(with_step(own_generator))) == [("same seed", "GG685")]


def test_a_generate_that_raises_is_a_line_with_its_place() -> None:
    def raises(self: TinyGPT, idx: Tensor, max_new_tokens: int) -> Tensor:
        return idx.view(3, 5, 7)

    report = ask(with_generate(raises))
    assert failures(report) == [("sampler", "GG680")]
    assert report.findings[0].where is not None
    assert report.findings[0].where.function == "raises"


def takes_text(self: TinyGPT, prompt: str, max_new_tokens: int) -> str:
    return prompt


def takes_text_without_saying(self: TinyGPT, prompt, max_new_tokens):  # type: ignore[no-untyped-def]  # on purpose
    return prompt.split()


def total_length(self: TinyGPT, idx: Tensor, max_length: int) -> Tensor:
    return idx


def needs_more(self: TinyGPT, idx: Tensor, max_new_tokens: int, tokenizer: Any) -> Tensor:
    return idx


def one_by_one(self: TinyGPT, idx: Tensor, max_new_tokens: int) -> Iterator[int]:
    yield 1


def gives_text(self: TinyGPT, idx: Tensor, max_new_tokens: int) -> str:
    return "text"


@pytest.mark.parametrize(
    "method", [takes_text, takes_text_without_saying, total_length, needs_more, one_by_one, gives_text, None]
)
def test_our_own_decoding_is_used_and_the_reason_is_told(method: Callable[..., Any] | None) -> None:
    report = ask(with_generate(method) if method is not None else with_generate("no method"))  # type: ignore[arg-type]  # an attribute that is not callable
    assert failures(report) == []
    assert line(report, "sampler").measured.startswith("gpt_guard's own: ")


def test_what_does_not_generate_is_skipped() -> None:
    report = ask(TinyGPT(), causal=False)
    assert [(result.status, result.measured) for result in report.checks] == [
        ("skipped", "causal=False: an encoder does not generate")
    ]


def test_nothing_is_left_changed() -> None:
    model = TinyGPT(dropout=0.2).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    ask(model, trained=True)
    assert model.training
    assert not model._forward_hooks
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_on_logits_and_loss_objects_is_decoded_too() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyGPT()

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
            return SimpleNamespace(logits=self.inner(input_ids), loss=None)

    report = ask(Wrapped())
    assert failures(report) == []


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_pass(name: str) -> None:
    build, options = HEALTHY[name]
    report = check(build(), only=["generation"], **asked(options))
    assert report.failed == ()
