"""Clipping on most steps: a warning where learning has stalled, information while the loss falls, silence otherwise."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from gpt_guard.callbacks.gradients.clipping import Clipping, clearly_falling
from gpt_guard.callbacks.gradients.guard import GradNormMonitor
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Moment, Observation, Severity

VOCAB, CONTEXT, WIDTH = 16, 12, 32


class TinyGPT(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tok.weight
        nn.init.normal_(self.tok.weight, std=0.02)
        nn.init.normal_(self.pos.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.tok(tokens) + self.pos(torch.arange(length))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1), targets.flatten())


def progressions(batch: int = 8) -> tuple[Tensor, Tensor]:
    start, stride = torch.randint(VOCAB, (batch, 1)), torch.randint(1, 4, (batch, 1))
    rows = (start + torch.arange(CONTEXT + 1) * stride) % VOCAB
    return rows[:, :-1], rows[:, 1:]


def test_a_tiny_gpt_with_clipping_at_one_is_quiet() -> None:
    model = TinyGPT()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))
    with Guardian(model, optimizer, guards=[GradNormMonitor()], summary=False, sinks=[]) as guardian:
        losses = []
        for _ in range(200):
            optimizer.zero_grad()
            loss = model(*progressions())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert not guardian.findings


def train(lr: float, clip: float, *, learn: bool, steps: int = 120) -> list[Finding]:
    """A regression whose target can be noise alone: then the loss cannot fall, and the gradient stays large."""
    model = nn.Linear(8, 1)
    optimizer = SGD(model.parameters(), lr=lr)
    with Guardian(model, optimizer, guards=[GradNormMonitor()], summary=False, sinks=[]) as guardian:
        for _ in range(steps):
            x = torch.randn(8, 8)
            y = 5.0 * x.sum(1, keepdim=True) if learn else 5.0 * torch.randn(8, 1)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return list(guardian.findings)


def test_clipping_that_hides_a_stalled_run_is_a_warning_once() -> None:
    findings = [f for f in train(0.5, 0.1, learn=False) if f.code == "GG206"]
    (finding,) = [f for f in findings if f.severity is Severity.WARNING]
    assert len(findings) <= 2
    assert finding.evidence["lr"] == [0.5]
    assert finding.evidence["share"] > 0.9  # type: ignore[operator]  # a float
    assert "clipped to a norm of 0.1" in finding.seen
    assert "5.0e-01" in finding.seen
    assert "learning rate is too high" in finding.causes[0]


def test_while_the_loss_falls_it_is_only_information() -> None:
    (finding,) = train(1.0, 0.1, learn=True, steps=80)
    assert (finding.code, finding.severity, finding.step) == ("GG206", Severity.INFO, 49)


def fed(ratio: float, loss: Callable[[int], float], steps: int = 200) -> list[tuple[int | None, Severity]]:
    clipping = Clipping(window=50, share=0.9, ratio=2.0)
    seen = (observation(step, ratio, 1.0, loss(step)) for step in range(steps))
    return [(f.step, f.severity) for each in seen for f in clipping.judge(each)]


def noise(step: int) -> float:
    return 2.0 + random.Random(step).gauss(0.0, 0.3)


def test_a_loss_that_does_not_fall_is_a_warning_only_under_hard_clipping() -> None:
    # Policies and GANs have such losses, and are clipped to a part of their norm as a habit.
    assert fed(2.6, noise) == [(49, Severity.INFO)]
    assert fed(40.0, noise) == [(49, Severity.WARNING)]


def test_a_loss_that_rises_is_a_warning() -> None:
    assert fed(2.6, lambda step: noise(step) + 0.1 * step) == [(49, Severity.WARNING)]


def test_a_loss_that_stops_to_fall_is_not_told_twice() -> None:
    assert fed(40.0, lambda step: noise(step) + max(0.0, 5.0 - 0.1 * step)) == [(49, Severity.INFO)]


def test_clipping_of_few_steps_is_quiet() -> None:
    assert train(0.01, 20.0, learn=False) == []


def test_division_by_micro_batches_is_no_clipping() -> None:
    model = nn.Linear(8, 1)
    optimizer = SGD(model.parameters(), lr=0.01)
    with Guardian(model, optimizer, guards=[GradNormMonitor()], summary=False, sinks=[]) as guardian:
        for _ in range(80):
            optimizer.zero_grad()
            for _ in range(4):
                x = torch.randn(8, 8)
                F.mse_loss(model(x), torch.randn(8, 1)).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= 4
            optimizer.step()
    assert not guardian.findings


def observation(step: int, before: float, after: float, loss: float | None = 1.0) -> Observation:
    return Observation(
        step=step,
        moment=Moment.BEFORE_STEP,
        lr=(0.1,),
        loss=loss,
        grad_norm=before,
        grad_norm_clipped=after,
        clipped=after < before,
    )


def test_a_resumed_run_goes_on_counting_and_does_not_repeat_itself() -> None:
    def fed(clipping: Clipping, steps: range) -> list[int | None]:
        return [f.step for step in steps for f in clipping.judge(observation(step, 5.0, 1.0))]

    whole = Clipping(window=50, share=0.9, ratio=2.0)
    assert fed(whole, range(40)) == []
    resumed = Clipping(window=50, share=0.9, ratio=2.0)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert fed(resumed, range(40, 90)) == [49]
    again = Clipping(window=50, share=0.9, ratio=2.0)
    again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
    assert fed(again, range(90, 200)) == []


def test_norms_that_are_unknown_or_infinite_are_left_out() -> None:
    clipping = Clipping(window=10, share=0.9, ratio=2.0)
    for step in range(30):
        assert list(clipping.judge(observation(step, math.inf, 1.0))) == []
    assert clipping.state_dict()["steps"] == []


def test_clearly_falling() -> None:
    draw = random.Random(0)
    assert clearly_falling([3.0 - 0.02 * step for step in range(50)])
    assert clearly_falling([3.0 - 0.02 * step + draw.gauss(0.0, 0.2) for step in range(50)])
    assert not clearly_falling([3.0 + draw.gauss(0.0, 0.2) for step in range(50)])
    assert not clearly_falling([3.0 + 0.02 * step for step in range(50)])
    assert not clearly_falling([None, math.nan, 3.0, 2.0, 1.0])
