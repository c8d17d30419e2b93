"""`replay(bundle, model)`: the same fault from the bundle alone, its absence once it is mended, and clear refusals."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from gpt_guard import Guardian
from gpt_guard.blackbox.bundle import read_bundle
from gpt_guard.blackbox.replay import replay
from gpt_guard.blackbox.stored import FileName
from gpt_guard.errors import GuardError, GuardUsageError

from .conftest import Fail, Failed, built
from .failing_models import CAUSES, LogOfZero, MaskedLog, OwnLoss, log_loss, mended_log, mended_loss, other_size


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_found_again_by_name_and_place(fail: Fail, cause: str) -> None:
    failed = fail(cause)
    done = replay(failed.path, built(cause))
    assert failed.finding.operation is not None
    assert done.reproduced
    assert done.same
    assert done.finding.operation == failed.finding.operation
    assert done.finding.module == failed.finding.module
    assert not done.notes


@pytest.mark.parametrize("cause", sorted(set(CAUSES) - {"half"}))
def test_a_mended_model_no_longer_shows_it(fail: Fail, cause: str) -> None:
    kind, _ = CAUSES[cause]
    mended = kind(keep_self=True) if cause == "mask" else kind(eps=1e-3)
    done = replay(fail(cause).path, mended, mended=True)
    assert done.reproduced is False
    assert done.gone
    assert done.same is None
    assert "does not show any more" in str(done)


def test_what_the_mended_model_masks_away_is_no_fault(fail: Fail) -> None:
    assert replay(fail("log").path, MaskedLog()).reproduced is False


class Elsewhere(LogOfZero):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / torch.zeros(2)


def test_a_fault_that_has_moved_is_still_one(fail: Fail) -> None:
    done = replay(fail("log").path, Elsewhere(eps=1.0))
    assert done.reproduced
    assert done.same is False
    assert "at another place" in done.verdict
    assert "division" in done.verdict


@contextmanager
def guarded(model: nn.Module, run_dir: Path) -> Iterator[None]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Guardian(model, optimizer, run_dir=run_dir, sinks=[]):
        yield


def test_autocast_is_as_it_was(tmp_path: Path) -> None:
    model, x = built("log"), torch.full((2, 4), 1e5)
    assert model(x).isfinite().all()
    with pytest.raises(GuardError) as caught, guarded(model, tmp_path), torch.autocast("cpu", dtype=torch.float16):
        model(x)
    done = replay(str(caught.value.finding.bundle), LogOfZero())
    assert done.same
    assert done.finding.operation is not None
    assert done.finding.operation.output is not None
    assert done.finding.operation.output.dtype == "float16"


def test_of_several_micro_batches_the_one_that_failed_is_kept(tmp_path: Path) -> None:
    model = built("log")

    def accumulate() -> None:
        for value in (1.0, 2.0, -3.0, 4.0):
            (model(torch.full((2, 4), value)).mean() / 4).backward()

    with pytest.raises(GuardError) as caught, guarded(model, tmp_path):
        accumulate()
    bundle = read_bundle(str(caught.value.finding.bundle))
    assert bundle.recipe.micro_batch == 2
    assert torch.equal(bundle.recipe_tensors()[FileName.BATCH]["args"][0], torch.full((2, 4), -3.0))
    assert replay(bundle, LogOfZero()).same


@pytest.mark.parametrize("inference", [True, False])
def test_an_evaluation_in_inference_mode_is_one_again(tmp_path: Path, inference: bool) -> None:
    model = built("log").eval()
    with (
        pytest.raises(GuardError) as caught,
        guarded(model, tmp_path),
        torch.inference_mode(inference),
        torch.no_grad(),
    ):
        model(-torch.ones(2, 4))
    bundle = read_bundle(str(caught.value.finding.bundle))
    assert bundle.recipe.ambient is not None
    assert bundle.recipe.ambient.inference is inference
    assert replay(bundle, LogOfZero()).same


def test_the_weights_are_those_of_the_failure_and_gradients_and_generators_are_left_alone(
    fail: Fail, fresh: LogOfZero
) -> None:
    failed = fail("log")
    fresh.head.weight.grad = gradient = torch.ones_like(fresh.head.weight)
    before = torch.get_rng_state()
    replay(failed.path, fresh)
    weights = failed.bundle.weights()["model_state_dict"]
    assert all(torch.equal(value, weights[name]) for name, value in fresh.state_dict().items())
    assert fresh.head.weight.grad is gradient
    assert torch.equal(torch.get_rng_state(), before)


def test_modes_and_frozen_parameters_come_from_the_bundle(fail: Fail) -> None:
    def frozen(model: nn.Module) -> nn.Module:
        next(model.parameters()).requires_grad_(False)
        return model

    failed = fail("dropout", wrap=frozen)
    model = built("dropout").eval()
    assert replay(failed.path, model).same
    assert not model.training  # put back
    assert [each.requires_grad for each in model.parameters()] == [False, True]


def test_the_optimizer_goes_on_from_its_state(fail: Fail, fresh: LogOfZero) -> None:
    optimizer = torch.optim.AdamW(fresh.parameters())
    replay(fail("log").path, fresh, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 1e-4
    assert optimizer.state[fresh.head.weight]["step"] == 2


def test_an_optimizer_of_another_kind_is_refused(fail: Fail, fresh: LogOfZero) -> None:
    failed = fail("log")
    with pytest.raises(GuardUsageError, match=r"does not take the state in .*optimizer\.pt"):
        replay(failed.path, fresh, optimizer=torch.optim.SGD([fresh.head.weight], lr=0.1))
    with pytest.raises(GuardUsageError, match="1 optimizers, 2 are given"):
        replay(failed.path, fresh, optimizer=[torch.optim.SGD(part.parameters(), lr=0.1) for part in fresh.children()])


def test_a_model_of_another_size_is_refused_by_name(fail: Fail) -> None:
    failed = fail("log")
    model = other_size()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(GuardUsageError, match=r"does not fit the bundle.*head\.weight"):
        replay(failed.path, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(GuardUsageError, match="model is a str"):
        replay(failed.path, "model")  # type: ignore[arg-type]  # that is the mistake


def test_a_model_in_another_dtype_is_cast_and_it_is_said(fail: Fail) -> None:
    failed = fail("half")
    done = replay(failed.path, built("half").float())
    assert done.same
    assert done.notes == ("the model was cast to float16, as recorded",)


def test_a_model_that_was_compiled_fits_one_that_is_not(fail: Fail) -> None:
    failed = fail("log", wrap=lambda model: torch.compile(model, backend="eager"))
    done = replay(failed.path, LogOfZero())
    assert done.reproduced
    assert done.same
    assert not done.likeness.parts
    assert replay(failed.path, mended_log()).reproduced is False


def test_inputs_can_be_given_instead(fail: Fail, fresh: LogOfZero) -> None:
    failed = fail("log")
    assert replay(failed.path, fresh, args=[torch.ones(1, 4)]).gone
    done = replay(failed.path, fresh, kwargs={"x": -torch.ones(1, 4)})
    assert done.reproduced
    assert "with the same inputs" not in done.verdict
    assert "The inputs are those that were given now." in done.verdict


def test_a_time_limit_gives_no_answer(fail: Fail, fresh: LogOfZero) -> None:
    done = replay(fail("log").path, fresh, limit_s=0.0)
    assert done.reproduced is None
    assert "No answer" in str(done)
    assert "limit" in str(done)


class Buffered(nn.Module):
    """A buffer that was never filled."""

    shift: torch.Tensor

    def __init__(self, value: float, *, persistent: bool) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.register_buffer("shift", torch.full((4,), value), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.body(x + self.shift)
        return output


@pytest.mark.parametrize("persistent", [True, False])
def test_recorded_buffers_are_used_unless_the_models_own_are_asked_for(tmp_path: Path, persistent: bool) -> None:
    model = Buffered(float("nan"), persistent=persistent)
    with pytest.raises(GuardError) as caught, guarded(model, tmp_path):
        model(torch.ones(2, 4)).sum().backward()
    bundle = caught.value.finding.bundle
    assert bundle is not None
    assert replay(bundle, Buffered(0.0, persistent=persistent)).reproduced
    assert replay(bundle, Buffered(0.0, persistent=persistent), buffers=False).gone


def with_loss(tmp_path: Path, *, watched: bool) -> Failed:
    model = OwnLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guardian = Guardian(model, optimizer, run_dir=tmp_path, sinks=[])
    loss_of = guardian.watch_loss(log_loss) if watched else log_loss
    x, target = torch.eye(4) * 1e4, torch.full((4, 4), 0.25)
    with pytest.raises(GuardError) as caught, guardian:
        loss_of(model(x), target).backward()
    finding = caught.value.finding
    assert finding.code == "GG102"
    assert finding.bundle is not None
    return Failed(finding, tmp_path, tmp_path / finding.bundle)


def test_a_loss_outside_of_the_model_is_run_with_its_own_function(tmp_path: Path) -> None:
    failed = with_loss(tmp_path, watched=True)
    assert failed.bundle.recipe.loss is not None
    assert failed.bundle.recipe.loss.function.endswith(":log_loss")
    done = replay(failed.path, OwnLoss(), loss_fn=log_loss)
    assert done.same
    assert done.finding.operation is not None
    assert done.finding.operation.name == "log"
    assert replay(failed.path, OwnLoss(), loss_fn=mended_loss).reproduced is False
    without = replay(failed.path, OwnLoss())
    assert without.reproduced is None
    assert any("log_loss was not run" in note for note in without.notes)


def test_a_loss_that_was_not_watched_is_said_to_be_out_of_reach(tmp_path: Path) -> None:
    failed = with_loss(tmp_path, watched=False)
    done = replay(failed.path, OwnLoss())
    assert done.reproduced is None
    assert "watch_loss" in done.verdict
    with pytest.raises(GuardUsageError, match="watch_loss"):
        replay(failed.path, OwnLoss(), loss_fn=log_loss)
