from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_guard.callbacks.base import Guard
from gpt_guard.callbacks.updates.guard import ParamDeltaProbe
from gpt_guard.callbacks.updates.ratio import RatioBounds, RatioWatch
from gpt_guard.callbacks.updates.sampling import sample_view
from gpt_guard.errors import GuardUsageError
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding, Moment, Observation, Severity


class TinyGPT(nn.Module):
    """Embedding, two blocks of attention-free MLPs, tied head: enough to train, with std 0.02 as GPT has."""

    def __init__(self, width: int = 32, vocab: int = 32, *, tie: bool = True) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        self.head = nn.Linear(width, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        if tie:
            self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


def text() -> tuple[Tensor, Tensor]:
    ids = (torch.randint(32, (8, 1)) + torch.arange(17)) % 32
    return ids[:, :-1], ids[:, 1:]


def loss_of(model: nn.Module) -> Tensor:
    x, y = text()
    return functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def watched(
    model: nn.Module,
    optimizer: Any,
    loop: Callable[[], None],
    *,
    reads: Literal["auto", "immediate", "per_step"] = "auto",
    guards: list[Guard] | None = None,
    **options: Any,
) -> Guardian:
    guardian = Guardian(model, optimizer, guards=guards or [ParamDeltaProbe(**options)], sinks=[], reads=reads)
    with guardian:
        loop()
    return guardian


def codes(guardian: Guardian) -> list[str]:
    return [found.code for found in guardian.findings]


def only(guardian: Guardian) -> Finding:
    (found,) = guardian.findings
    return found


class Recorder(Guard):
    """Keeps what was measured."""

    judged_at = frozenset({Moment.AFTER_STEP})

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def judge(self, seen: Observation) -> Iterable[Finding]:
        self.seen.append(seen)
        return ()


def make(lr: float = 3e-3, kind: Any = torch.optim.AdamW, **options: Any) -> tuple[TinyGPT, torch.optim.Optimizer]:
    model = TinyGPT()
    return model, kind(model.parameters(), lr=lr, **options)


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
@pytest.mark.parametrize("exact", [True, False])
def test_figures_are_those_of_the_real_change(exact: bool, reads: Any) -> None:
    model, optimizer = make(1e-2, torch.optim.SGD, momentum=0.9)
    recorder, probe = Recorder(), ParamDeltaProbe(exact=exact, sample=10_000)
    expected = []

    def loop() -> None:
        for _ in range(3):
            before = [p.detach().clone() for p in model.parameters()]
            train(model, optimizer, 1)
            pairs = [(p.detach() - old, old) for p, old in zip(model.parameters(), before, strict=True)]
            moved = sum(float(d.double().norm()) ** 2 for d, old in pairs if old.dim() >= 2)
            held = sum(float(old.double().norm()) ** 2 for _, old in pairs if old.dim() >= 2)
            expected.append((math.sqrt(moved / held), max(float(d.abs().max()) for d, _ in pairs)))

    assert codes(watched(model, optimizer, loop, reads=reads, guards=[probe, recorder])) == []
    measured = [(seen.update_ratio, seen.max_update) for seen in recorder.seen]
    assert [seen.step for seen in recorder.seen] == [0, 1, 2]
    assert torch.allclose(torch.tensor(measured), torch.tensor(expected), rtol=1e-4)
    assert set(probe.update_ratios) == {name for name, _ in model.named_parameters()}
    assert 0 < probe.update_ratios["tok.weight"] < 1


def test_a_sample_estimates_what_all_elements_say() -> None:
    ratios = []
    for exact in (True, False):
        torch.manual_seed(0)
        recorder = Recorder()
        model, optimizer = make()
        probe = ParamDeltaProbe(exact=exact)
        watched(model, optimizer, lambda m=model, o=optimizer: train(m, o, 5), guards=[probe, recorder])  # type: ignore[misc]  # bound now, on purpose
        ratios.append([seen.update_ratio or 0.0 for seen in recorder.seen])
    assert ratios[0] == pytest.approx(ratios[1], rel=0.25)


def test_a_guarded_run_is_bit_identical() -> None:
    results = []
    for guarded in (True, False):
        torch.manual_seed(0)
        model, optimizer = make()
        if guarded:
            watched(model, optimizer, lambda m=model, o=optimizer: train(m, o, 10))  # type: ignore[misc]  # bound now, on purpose
        else:
            train(model, optimizer, 10)
        results.append([p.detach().clone() for p in model.parameters()] + [torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_view_shares_storage_and_sees_every_column() -> None:
    weight = torch.arange(256 * 64.0).view(256, 64)
    view = sample_view(weight, 64)
    assert view.numel() == 64
    assert len(set((view % 64).tolist())) == 64
    assert view.max() > 250 * 64
    assert view.min() < 6 * 64
    weight.zero_()
    assert not view.any()


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3), torch.ones(()), torch.ones(8, 4).t(), torch.ones(9, 8)[:, ::2], torch.ones(1, 5).expand(4, 5)],
)
def test_any_layout_is_viewed_without_a_copy(tensor: Tensor) -> None:
    view = sample_view(tensor, 4)
    assert 1 <= view.numel() <= 4
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


# GG301: nothing moved.


@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_a_step_that_does_nothing(reads: Any) -> None:
    class Idle(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # broken on purpose
            return None

    model, optimizer = make(0.1, Idle)
    found = only(watched(model, optimizer, lambda: train(model, optimizer, 30), reads=reads))
    assert found.code == "GG301"
    assert found.step is not None
    assert found.step <= 4
    assert "changed none of" in found.seen
    assert found.guard == "ParamDeltaProbe"


def test_zero_grad_before_step_is_left_to_the_guard_of_gradients() -> None:
    model, optimizer = make(0.1, torch.optim.SGD)

    def loop() -> None:
        for _ in range(8):
            loss_of(model).backward()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()

    assert not watched(model, optimizer, loop).findings
    with Guardian(model, optimizer, summary=False, sinks=[]) as guardian:
        loop()
    assert only(guardian).code == "GG208"


def test_an_lr_below_rounding_is_named() -> None:
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-13)
    guardian = watched(model, optimizer, lambda: train(model, optimizer, 8))
    found = only(guardian)
    assert found.code == "GG301"
    assert "too small for float32" in found.causes[0]


def test_lr_zero_is_not_ours_to_say() -> None:
    model, optimizer = make(0.0)
    assert codes(watched(model, optimizer, lambda: train(model, optimizer, 30))) == []


# GG304: single parameters.


class Gated(nn.Module):
    def __init__(self, gate: float) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.out = nn.Linear(4, 1)
        self.register_buffer("gate", torch.tensor(gate))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(x + self.gate * self.inner(x))
        return y


def regress(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, 4)
        functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()


def test_a_gradient_of_zero_is_named_after_patience() -> None:
    model = Gated(0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = only(watched(model, optimizer, lambda: regress(model, optimizer, 40), patience=10))
    assert found.code == "GG304"
    assert found.step == 9
    assert found.parameter == "inner.weight"
    assert found.evidence["parameters"] == ["inner.weight", "inner.bias"]
    assert found.module == "inner"


def test_an_open_gate_is_quiet() -> None:
    model = Gated(0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert codes(watched(model, optimizer, lambda: regress(model, optimizer, 40), patience=10)) == []


def test_a_parameter_that_is_put_back_is_named() -> None:
    model = Gated(0.5)

    class Forgetful(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # broken on purpose
            kept = model.inner.weight.detach().clone()
            super().step()
            model.inner.weight.data.copy_(kept)

    optimizer = Forgetful(model.parameters(), lr=1e-2)
    found = only(watched(model, optimizer, lambda: regress(model, optimizer, 30), patience=10))
    assert found.code == "GG304"
    assert found.parameter == "inner.weight"
    assert "with a non-zero gradient never moved" in found.seen


class Experts(nn.Module):
    """A router that never chooses the last expert in the first steps: called, with no token in it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[: len(x) // 2], x[len(x) // 2 :], x[:0]]
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


def test_an_expert_without_tokens_waits_ten_times_as_long() -> None:
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    assert codes(watched(model, optimizer, lambda: regress(model, optimizer, 49), patience=5)) == []
    guardian = watched(model, optimizer, lambda: regress(model, optimizer, 60), patience=5)
    assert only(guardian).parameter == "experts.2.weight"


def test_an_adapter_with_one_half_at_zero_is_quiet() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(4, 1).requires_grad_(False)
            self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 1, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.base(x) + self.b(self.a(x))
            return y

    model = Adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    assert codes(watched(model, optimizer, lambda: regress(model, optimizer, 60))) == []
    # Everything in one optimizer is healthy too: without a gradient a frozen parameter is left alone.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert codes(watched(model, optimizer, lambda: regress(model, optimizer, 60))) == []


def test_zero_initialised_projections_with_momentum_are_quiet() -> None:
    model = TinyGPT(tie=False)
    for block in model.blocks:
        nn.init.zeros_(block.get_parameter("3.weight"))
    nn.init.zeros_(model.head.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert codes(watched(model, optimizer, lambda: train(model, optimizer, 60))) == []


@pytest.mark.parametrize(("kind", "sparse"), [(torch.optim.SGD, False), (torch.optim.SGD, True)])
def test_rows_that_are_never_used_are_quiet(kind: Any, sparse: bool) -> None:
    model = TinyGPT(tie=False)
    model.tok = nn.Embedding(20_000, 32, sparse=sparse)
    optimizer = kind(model.parameters(), lr=0.1)
    assert codes(watched(model, optimizer, lambda: train(model, optimizer, 60), patience=5)) == []


# GG305: half precision.


@pytest.mark.parametrize(("lr", "expected"), [(1e-6, ["GG305"]), (3e-3, [])])
@pytest.mark.parametrize("exact", [True, False])
def test_updates_lost_to_rounding(lr: float, expected: list[str], exact: bool) -> None:
    model = TinyGPT().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    guardian = watched(model, optimizer, lambda: train(model, optimizer, 40), exact=exact)
    assert codes(guardian) == expected
    if expected:
        found = only(guardian)
        assert "tok.weight" in str(found.evidence["parameters"])
        assert "bfloat16" in found.seen


def test_gains_that_never_move_are_told_with_their_names() -> None:
    model = TinyGPT().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.0)
    found = only(watched(model, optimizer, lambda: train(model, optimizer, 60)))
    assert (found.code, found.severity) == ("GG305", Severity.WARNING)
    gains = [name for name, each in model.named_parameters() if each.dim() == 1 and bool((each == 1).all())]
    assert gains
    names = found.evidence["parameters"]
    assert isinstance(names, list)
    assert set(names) == set(gains)


def test_rounding_at_the_end_of_a_decay_or_within_a_warm_up_is_quiet() -> None:
    model = TinyGPT().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)

    def loop() -> None:
        for step in range(90):
            optimizer.param_groups[0]["lr"] = 3e-3 * (min(1.0, step / 30) if step < 60 else 1e-4)
            train(model, optimizer, 1)

    assert codes(watched(model, optimizer, loop)) == []


# GG306: frozen.


def test_a_frozen_parameter_with_an_old_gradient_moves() -> None:
    model, optimizer = make(weight_decay=0.1)
    block = model.blocks[0]

    def loop() -> None:
        train(model, optimizer, 5)
        loss_of(model).backward()
        block.requires_grad_(False)
        for _ in range(10):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model).backward()
            optimizer.step()

    found = only(watched(model, optimizer, loop))
    assert found.code == "GG306"
    assert found.step == 6
    assert found.parameter == "blocks.0.0.weight"
    assert "old gradient" in found.seen


def test_freezing_with_the_gradient_removed_is_quiet() -> None:
    model, optimizer = make(weight_decay=0.1)

    def loop() -> None:
        train(model, optimizer, 5)
        model.blocks[0].requires_grad_(False)
        optimizer.zero_grad()
        train(model, optimizer, 10)

    assert codes(watched(model, optimizer, loop)) == []


# GG308, GG309: the ratio.


@pytest.mark.parametrize(("lr", "expected"), [(0.1, ["GG308"]), (3e-3, []), (1e-2, [])])
def test_steps_as_large_as_the_weights(lr: float, expected: list[str]) -> None:
    model, optimizer = make(lr)
    assert codes(watched(model, optimizer, lambda: train(model, optimizer, 20))) == expected


def test_a_quarter_is_judged_with_its_own_bound_while_the_loss_rises() -> None:
    def judge(losses: list[float], ratio: float) -> list[Finding]:
        watch = RatioWatch(RatioBounds(1.0, 1e-7, 10))
        each = (
            Observation(step=step, moment=Moment.AFTER_STEP, lr=(0.1,), grad_norm=1.0, loss=loss, update_ratio=ratio)
            for step, loss in enumerate(losses)
        )
        return [found for seen in each for found in watch.judge(seen, 1000, lambda: False)]

    (risen,) = judge([2.0, 2.1, 3.0], 0.538)
    assert "geometric mean 0.538, bound 0.25 where the loss has risen by a tenth" in risen.seen
    assert risen.seen.endswith(", and the loss rose from 2 to 3.")
    assert (risen.title, risen.evidence["bound"]) == (
        "Steps change a large part of the weights while the loss rises",
        0.25,
    )
    assert judge([2.0, 2.1, 2.0], 0.538) == []
    (over,) = judge([2.0, 2.1, 2.0], 1.5)
    assert "geometric mean 1.5, bound 1) at lr" in over.seen
    assert over.title == "Steps are as large as the weights"


def test_steps_too_small_to_train() -> None:
    model, optimizer = make(1e-10)
    guardian = watched(model, optimizer, lambda: train(model, optimizer, 60), patience=100)
    assert codes(guardian) == ["GG309"]
    assert "median update" in only(guardian).seen
    model, optimizer = make(1e-12)
    guardian = watched(model, optimizer, lambda: train(model, optimizer, 60))
    assert codes(guardian) == ["GG309"]
    assert "Hardly anything moves" in only(guardian).seen
    model, optimizer = make()
    assert codes(watched(model, optimizer, lambda: train(model, optimizer, 60), ratio_low=1e-9)) == []


def test_a_handful_of_weights_that_pass_through_zero_is_quiet() -> None:
    model = nn.Linear(4, 1)
    nn.init.constant_(model.weight, 0.01)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    assert codes(watched(model, optimizer, lambda: regress(model, optimizer, 20))) == []


# Healthy loops.


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_run_that_has_converged_is_quiet(kind: Any) -> None:
    model = nn.Linear(4, 1)
    optimizer = kind(model.parameters(), lr=0.1)
    assert codes(watched(model, optimizer, lambda: regress(model, optimizer, 600))) == []


class RefuseReads(TorchDispatchMode):
    """Raises where the host asks for a value, as an accelerator would have to stop for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refused = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")
        assert func.overloadpacket.__name__ not in refused, f"{func} reads the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"exact": True}])
def test_nothing_is_read_while_watching(options: dict[str, Any]) -> None:
    class Unreading(ParamDeltaProbe):
        def before_step(self, optimizer: torch.optim.Optimizer) -> None:
            with RefuseReads():  # type: ignore[no-untyped-call]  # torch's base has no types
                super().before_step(optimizer)

        def after_step(self, optimizer: torch.optim.Optimizer) -> None:
            with RefuseReads():  # type: ignore[no-untyped-call]  # torch's base has no types
                super().after_step(optimizer)

    # Lost to rounding: the exact comparison of suspects runs as well.
    model = TinyGPT().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    guards: list[Guard] = [Unreading(**options)]
    guardian = watched(model, optimizer, lambda: train(model, optimizer, 30), reads="per_step", guards=guards)
    assert codes(guardian) == ["GG305"]


@pytest.mark.parametrize(
    ("kind", "lr"),
    [(torch.optim.AdamW, 3e-3), (torch.optim.SGD, 0.1), (torch.optim.Adagrad, 1e-2), (torch.optim.RMSprop, 1e-3)],
)
@pytest.mark.parametrize("reads", ["immediate", "per_step"])
def test_healthy_training_is_quiet(kind: Any, lr: float, reads: Any) -> None:
    model, optimizer = make(lr, kind)
    assert codes(watched(model, optimizer, lambda: train(model, optimizer, 120), reads=reads)) == []


def test_warm_up_from_zero_is_quiet() -> None:
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))

    def loop() -> None:
        for _ in range(110):
            train(model, optimizer, 1)
            scheduler.step()

    assert codes(watched(model, optimizer, loop)) == []


def test_accumulation_is_quiet() -> None:
    model, optimizer = make()

    def loop() -> None:
        for _ in range(30):
            optimizer.zero_grad()
            for _ in range(3):
                (loss_of(model) / 3).backward()
            optimizer.step()

    assert codes(watched(model, optimizer, loop)) == []


def test_a_closure_is_quiet() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=4)
    x = torch.randn(32, 4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        return loss

    def loop() -> None:
        for _ in range(60):
            optimizer.step(closure)

    assert codes(watched(model, optimizer, loop)) == []


def test_two_models_of_a_gan_are_quiet() -> None:
    generator, critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    opt_g, opt_c = torch.optim.Adam(generator.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)
    bce = functional.binary_cross_entropy_with_logits

    def loop() -> None:
        for _ in range(40):
            real, noise = torch.randn(8, 4), torch.randn(8, 4)
            with torch.no_grad():
                fake = generator(noise)
            opt_c.zero_grad()
            (bce(critic(real), torch.ones(8, 1)) + bce(critic(fake), torch.zeros(8, 1))).backward()
            opt_c.step()
            opt_g.zero_grad()
            bce(critic(generator(noise)), torch.ones(8, 1)).backward()
            opt_g.step()

    guards: list[Guard] = [ParamDeltaProbe()]
    with Guardian(critic, opt_c, guards=guards, sinks=[]) as second:
        assert codes(watched(generator, opt_g, loop)) == []
    assert codes(second) == []


def test_several_optimizers_are_judged_apart() -> None:
    model = TinyGPT(tie=False)
    head = torch.optim.SGD(model.head.parameters(), lr=0.1)
    rest = torch.optim.AdamW([p for n, p in model.named_parameters() if not n.startswith("head")], lr=1e-3)

    def loop() -> None:
        for _ in range(30):
            head.zero_grad()
            rest.zero_grad()
            loss_of(model).backward()
            head.step()
            rest.step()

    assert codes(watched(model, [head, rest], loop)) == []


def test_an_averaged_copy_that_is_evaluated_is_quiet() -> None:
    model, optimizer = make()
    average = copy.deepcopy(model)

    def loop() -> None:
        for _ in range(30):
            train(model, optimizer, 1)
            with torch.no_grad():
                for old, new in zip(average.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, 0.1)
                loss_of(average)

    assert codes(watched(model, optimizer, loop)) == []


def test_steps_that_a_scaler_skips_are_quiet() -> None:
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def loop() -> None:
        for step in range(30):
            optimizer.zero_grad()
            loss = loss_of(model)
            if step % 3:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    assert codes(watched(model, optimizer, loop)) == []


def test_an_optimizer_that_assigns_data_is_seen_moving() -> None:
    class Assigning(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # written the old way
            for group in self.param_groups:
                for p in group["params"]:
                    p.data = p.data - group["lr"] * p.grad

    model, optimizer = make(0.1, Assigning)
    recorder = Recorder()
    guardian = watched(model, optimizer, lambda: train(model, optimizer, 30), guards=[ParamDeltaProbe(), recorder])
    assert codes(guardian) == []
    assert all(seen.max_update for seen in recorder.seen)


def test_parameters_added_later_are_measured() -> None:
    model, optimizer = make()
    recorder, probe = Recorder(), ParamDeltaProbe()

    def loop() -> None:
        train(model, optimizer, 3)
        model.head = nn.Linear(32, 32, bias=False)
        optimizer.add_param_group({"params": model.head.parameters(), "lr": 1e-2})
        train(model, optimizer, 3)

    assert codes(watched(model, optimizer, loop, guards=[probe, recorder])) == []
    assert probe.update_ratios["head.weight"] > 0


def test_every_measures_only_some_steps() -> None:
    model, optimizer = make()
    recorder = Recorder()
    watched(model, optimizer, lambda: train(model, optimizer, 7), guards=[ParamDeltaProbe(every=3), recorder])
    assert [seen.update_ratio is not None for seen in recorder.seen] == [True, False, False, True, False, False, True]


# Leaving and resuming.


def test_counters_survive_a_resume() -> None:
    model = Gated(0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = watched(model, optimizer, lambda: regress(model, optimizer, 8), patience=10)
    second = Guardian(model, optimizer, guards=[ParamDeltaProbe(patience=10)], sinks=[])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with second:
        regress(model, optimizer, 5)
    assert codes(first) == []
    assert only(second).step == 9


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_is_held_after_leaving(error: type[BaseException] | None) -> None:
    model, optimizer = make()
    probe = ParamDeltaProbe()

    def loop() -> None:
        train(model, optimizer, 2)
        if error is not None:
            raise error

    try:
        watched(model, optimizer, loop, guards=[probe])
    except (RuntimeError, KeyboardInterrupt):
        assert error is not None
    assert probe._watch is None
    held = [value for value in vars(probe).values() if isinstance(value, (Tensor, nn.Module))]
    assert not held
    assert probe._sampler is None
    assert probe._ownership is None
    probe.detach()


@pytest.mark.parametrize("option", ["sample", "every", "patience", "ratio_window", "inspect_steps", "lost_share"])
def test_options_are_checked(option: str) -> None:
    options: dict[str, Any] = {option: 0}
    with pytest.raises(GuardUsageError, match=option):
        ParamDeltaProbe(**options)
