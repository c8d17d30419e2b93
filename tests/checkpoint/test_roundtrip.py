from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpt_guard.checkpoint import load_checkpoint, save_checkpoint
from gpt_guard.checkpoint.fingerprint import Fingerprint, config_digest, tokenizer_digest, weights_digest
from gpt_guard.checkpoint.optimizer_state import move_to_parameters
from gpt_guard.errors import CheckpointError
from gpt_guard.records import Finding, Severity
from mini_gpt import MiniGPT, MiniGPTConfig

CHARS = sorted("\n abcdefghijk")
Build = Callable[..., MiniGPT]
Train = Callable[..., list[float]]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def fused(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2), amsgrad=True, fused=True)


def two_groups(model: nn.Module) -> torch.optim.AdamW:
    decay = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


@pytest.mark.parametrize("kind", [adamw, sgd, fused, two_groups])
def test_training_goes_on_bit_for_bit(path: Path, build: Build, train: Train, kind: Callable[..., Any]) -> None:
    model = build(dropout=0.2)
    optimizer = kind(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    train(model, optimizer, 4, scheduler)
    extra = {"rng_state": torch.get_rng_state(), "best_val_loss": float("inf")}
    save_checkpoint(path, model, optimizer, step=4, tokenizer=CHARS, scheduler=scheduler, extra=extra)
    wanted = train(model, optimizer, 4, scheduler)

    again = build(seed=1, dropout=0.2)
    fresh = kind(again)
    following = torch.optim.lr_scheduler.CosineAnnealingLR(fresh, 20)
    loaded = load_checkpoint(path, again, fresh, CHARS, scheduler=following)
    torch.set_rng_state(loaded.extra["rng_state"])
    assert train(again, fresh, 4, following) == wanted
    assert weights_digest(again) == weights_digest(model)
    assert loaded.step == 4
    assert loaded.extra["best_val_loss"] == float("inf")
    assert loaded.findings == ()
    assert set(loaded.verified) == {"tokenizer", "config", "weights", "optimizer"}


def test_plain_torch_load_reads_it_and_the_config_makes_the_model(path: Path, build: Build, train: Train) -> None:
    model = build()
    optimizer = adamw(model)
    train(model, optimizer)
    state = {"progress": {"step": 3, "losses": [1.0, float("nan")]}}
    save_checkpoint(path, model, optimizer, step=3, tokenizer={"chars": CHARS}, guard_state=state)
    content = torch.load(path)
    assert list(content["config"]) == [field.name for field in dataclasses.fields(MiniGPTConfig)]
    assert MiniGPTConfig(**content["config"]) == model.config
    assert content["tokenizer_fingerprint"] == tokenizer_digest(CHARS)
    assert content["tokenizer_chars"] == CHARS
    assert content["step"] == 3
    assert content["gpt_guard"]["progress"]["step"] == 3
    assert content["fingerprint"]["config"] == config_digest(model.config)
    assert content["fingerprint"]["weights"] == weights_digest(model)
    MiniGPT(MiniGPTConfig(**content["config"])).load_state_dict(content["model_state_dict"])
    adamw(model).load_state_dict(content["optimizer_state_dict"])
    assert str(load_checkpoint(path, model, tokenizer=CHARS).guard_state["progress"]["losses"]) == "[1.0, nan]"


def test_saving_and_loading_leave_the_random_numbers_alone(path: Path, build: Build) -> None:
    model = build()
    before = torch.get_rng_state()
    save_checkpoint(path, model, adamw(model))
    load_checkpoint(path, model)
    assert torch.equal(torch.get_rng_state(), before)


def test_digests_can_be_left_out(path: Path, build: Build) -> None:
    save_checkpoint(path, build(), digests=False)
    assert set(torch.load(path)["fingerprint"]) == {"config"}
    assert load_checkpoint(path, build()).verified == ("config",)


def test_several_optimizers_each_get_their_own(path: Path, build: Build, train: Train) -> None:
    model = build()
    parameters = list(model.parameters())
    both = [torch.optim.SGD(parameters[:4], momentum=0.9), torch.optim.AdamW(parameters[4:])]
    for optimizer in both:
        train(model, optimizer)
    save_checkpoint(path, model, both)
    again = build()
    mine = list(again.parameters())
    fresh = [torch.optim.SGD(mine[:4], momentum=0.9), torch.optim.AdamW(mine[4:])]
    load_checkpoint(path, again, fresh)
    for one, other in zip(both, fresh, strict=True):
        assert str(one.state_dict()) == str(other.state_dict())


def test_a_gradient_scaler_goes_on_from_its_scale(path: Path, build: Build) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    save_checkpoint(path, build(), scaler=scaler)
    fresh = torch.amp.GradScaler("cpu")
    load_checkpoint(path, build(), scaler=fresh)
    assert fresh.get_scale() == 8.0


def test_tied_weights_stay_one_tensor(path: Path, build: Build, train: Train) -> None:
    def tied(seed: int = 0) -> MiniGPT:
        model = build(seed)
        model.head.weight = model.token_embedding.weight
        return model

    model = tied()
    train(model, adamw(model))
    save_checkpoint(path, model)
    again = tied(1)
    assert load_checkpoint(path, again).findings == ()
    assert again.head.weight is again.token_embedding.weight
    assert weights_digest(again) == weights_digest(model)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (nn.DataParallel, None),
        (None, nn.DataParallel),
        (lambda model: torch.compile(model, backend="eager"), None),
        (None, lambda model: torch.compile(model, backend="eager")),
        (lambda model: torch.compile(nn.DataParallel(model), backend="eager"), nn.DataParallel),
    ],
)
def test_wrappers_on_either_side_make_no_difference(path: Path, build: Build, saved: Any, loaded: Any) -> None:
    model, again = build(), build(1)
    save_checkpoint(path, saved(model) if saved else model)
    assert "head.weight" in torch.load(path)["model_state_dict"]
    assert load_checkpoint(path, loaded(again) if loaded else again).findings == ()
    assert weights_digest(again) == weights_digest(model)


def test_a_model_with_batch_norm_and_extra_state(path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.seen = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"seen": self.seen}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    model, again = Counting(), Counting()
    model.norm(torch.randn(5, 3))
    model.seen = 7
    save_checkpoint(path, model)
    load_checkpoint(path, again)
    assert again.seen == 7
    assert weights_digest(again) == weights_digest(model)


def test_data_and_texts_are_compared_where_they_are_given(path: Path, build: Build, tmp_path: Path) -> None:
    (tmp_path / "train_ids.pt").write_bytes(b"ids")
    made = Fingerprint.of(data=[tmp_path / "train_ids.pt"], texts={"chat_template": "{user}\n"})
    save_checkpoint(path, build(), fingerprint=made)
    loaded = load_checkpoint(path, build(), fingerprint=made)
    assert set(loaded.verified) == {"data:train_ids.pt", "text:chat_template", "config", "weights"}


def layouts(model: MiniGPT, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, state = model.state_dict(), optimizer.state_dict()
    config = dataclasses.asdict(model.config)
    return {
        "bare": weights,
        "model": {"model": weights, "optimizer": state, "iter_num": 3, "model_args": config, "config": {"lr": 1}},
        "state_dict": {"state_dict": weights, "optimizer_states": [state], "global_step": 3, "hyper_parameters": {}},
        "by hand": {"model_state_dict": weights, "optimizer_state_dict": state, "step": torch.tensor(3), "loss": 0.5},
    }


@pytest.mark.parametrize("name", ["bare", "model", "state_dict", "by hand"])
def test_common_layouts_load_with_a_warning_that_they_carry_no_fingerprint(
    path: Path, build: Build, train: Train, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    optimizer = adamw(model)
    train(model, optimizer)
    torch.save(layouts(model, optimizer)[name], path)
    again = build(1)
    fresh = adamw(again)
    with caplog.at_level(logging.WARNING, "gpt_guard"):
        loaded = load_checkpoint(path, again, None if name == "bare" else fresh, CHARS)
    assert [(finding.code, finding.severity) for finding in loaded.findings] == [("GG704", Severity.WARNING)]
    assert "carries no fingerprint" in caplog.text
    assert weights_digest(again) == weights_digest(model)
    if name != "bare":
        assert loaded.step == 3
        assert str(fresh.state_dict()) == str(optimizer.state_dict())


def test_a_checkpoint_with_only_the_tokenizers_fingerprint_is_compared(path: Path, build: Build) -> None:
    model = build()
    torch.save({"model_state_dict": model.state_dict(), "tokenizer_fingerprint": tokenizer_digest(CHARS)}, path)
    loaded = load_checkpoint(path, build(1), tokenizer=CHARS)
    assert loaded.findings == ()
    assert loaded.verified == ("tokenizer",)


def test_parts_it_was_asked_about_and_does_not_carry_are_named(
    path: Path, build: Build, reported: list[Finding]
) -> None:
    save_checkpoint(path, build())
    texts = Fingerprint.of(texts={"chat_template": "x"})
    load_checkpoint(path, build(), tokenizer=CHARS, fingerprint=texts, on_finding=reported.append)
    (finding,) = reported
    assert finding.code == "GG704"
    assert "text:chat_template, tokenizer" in finding.seen


def test_optimizer_state_keeps_its_place(path: Path, build: Build, train: Train) -> None:
    """Moments go to where their parameter is; AdamW's step counts stay on the CPU, or follow if it is capturable."""
    model = build()
    optimizer = adamw(model)
    train(model, optimizer)
    save_checkpoint(path, model, optimizer)
    meta = build().to("meta")
    fresh = adamw(meta)
    fresh.load_state_dict(optimizer.state_dict())
    for state in fresh.state.values():
        state["exp_avg"] = torch.zeros(state["exp_avg"].shape)  # as an optimizer of one's own might leave it
    move_to_parameters(fresh)
    for state in fresh.state.values():
        assert state["exp_avg"].device.type == "meta"
        assert state["exp_avg_sq"].device.type == "meta"
        assert state["step"].device.type == "cpu"


class Stubborn(torch.optim.lr_scheduler.StepLR):
    """A scheduler that cannot take any state but its first."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["last_epoch"] > 0:
            raise KeyError("last_epoch")
        super().load_state_dict(state_dict)


def test_what_cannot_be_copied_leaves_everything_as_it_was(path: Path) -> None:
    model = nn.Linear(4, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save({"model_state_dict": {"weight": torch.full((4, 4), 7.0), "bias": torch.zeros(4, device="meta")}}, path)
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(path, model)
    assert refused.value.finding.code == "GG705"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_scheduler_that_refuses_leaves_weights_and_optimizer_as_they_were(path: Path) -> None:
    def parts() -> tuple[nn.Linear, torch.optim.SGD, Stubborn]:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, Stubborn(optimizer, 10)

    model, optimizer, scheduler = parts()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    save_checkpoint(path, model, optimizer, scheduler=scheduler)
    model, optimizer, scheduler = parts()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(path, model, optimizer, scheduler=scheduler)
    assert refused.value.finding.code == "GG708"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state_dict()["state"]


def test_weights_under_numbers_are_refused(path: Path) -> None:
    torch.save({"model_state_dict": {5: torch.zeros(1)}}, path)
    with pytest.raises(CheckpointError, match="which is no name"):
        load_checkpoint(path, nn.Linear(4, 4))
