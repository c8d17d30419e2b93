"""Lightning's Trainer, watched through the callback; with both packages, and with what its precision plugins do."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gpt_guard import GuardUsageError, NonFiniteError

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed here")

from gpt_guard.integrations.lightning import GuardianCallback  # noqa: E402

Module: Any = lightning.LightningModule
Callback: Any = lightning.Callback
VOCABULARY = 20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.middle = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.dropout(torch.tanh(self.middle(self.embedding(x)))))
        return out


class Automatic(Module):  # type: ignore[misc]
    optimizer: Callable[..., Any] = torch.optim.AdamW

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()

    def loss(self, batch: Any) -> Tensor:
        (text,) = batch
        return nn.functional.cross_entropy(self.net(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: Any, index: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return type(self).optimizer(self.parameters(), lr=0.01)


class Scheduled(Automatic):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "epoch"}]


class Manual(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Lbfgs(Automatic):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class TwoOptimizers(Automatic):
    """A generator and a critic, each with its own optimizer, stepped in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(8, 1)

    def training_step(self, batch: Any, index: int) -> None:
        ours, theirs = self.optimizers()
        ours.zero_grad()
        self.manual_backward(self.loss(batch))
        ours.step()
        theirs.zero_grad()
        hidden = self.net.embedding(batch[0]).detach()
        self.manual_backward((self.critic(hidden) - 1.0).square().mean())
        theirs.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01), torch.optim.SGD(self.critic.parameters(), lr=0.01)


def loader(rows: int = 32) -> DataLoader[Any]:
    texts = torch.randint(0, VOCABULARY, (rows, 9), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(texts), batch_size=8)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # Lightning has much to advise: workers, log intervals, its own deprecations.
        warnings.simplefilter("ignore")
        yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


Fit = Callable[..., Any]


@pytest.fixture
def fit(tmp_path: Path) -> Fit:
    def fitted(module: Any, *callbacks: Any, package: Any = lightning, checkpoint: Any = None, **settings: Any) -> Any:
        given: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp_path,
        }
        data = settings.pop("data", None) or loader()
        trainer = package.Trainer(callbacks=list(callbacks), **{**given, **settings})
        torch.manual_seed(1)
        trainer.fit(module, data, loader(8), ckpt_path=checkpoint)
        return trainer

    return fitted


def watched(**options: Any) -> GuardianCallback:
    return GuardianCallback(sinks=[], **options)


def assert_detached(module: nn.Module, callback: GuardianCallback) -> None:
    hooks = [
        hook
        for each in module.modules()
        for table in (each._forward_hooks, each._forward_pre_hooks, each._backward_hooks)
        for hook in table.values()
    ]
    assert not [hook for hook in hooks if type(hook).__module__.startswith("gpt_guard")]
    assert not hasattr(torch.autograd.backward, "__wrapped__")
    assert callback.guardian is not None
    with pytest.raises(GuardUsageError, match="not watching"):
        callback.guardian.inspect_now()


def half_precision() -> dict[str, Any]:
    """On the CPU Lightning makes bfloat16 of "16-mixed", unless it is given the plugin itself."""
    plugins = importlib.import_module("lightning.pytorch.plugins.precision")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return {"plugins": [plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


@pytest.mark.parametrize("settings", [
    dict,
    lambda: {"accumulate_grad_batches": 2},
    lambda: {"gradient_clip_val": 0.1},
    lambda: {"precision": "bf16-mixed"},
    half_precision,
    lambda: {"val_check_interval": 2},
    lambda: {"num_sanity_val_steps": 0},
    lambda: {"inference_mode": False},
], ids=["plain", "accumulated", "clipped", "bf16", "fp16", "validated", "unchecked", "no-grad"])  # fmt: skip
def test_a_healthy_training_is_silent_and_bit_identical(fit: Fit, settings: Callable[[], dict[str, Any]]) -> None:
    bare, module, callback = Automatic(), Automatic(), watched()
    fit(bare, **settings())
    trainer = fit(module, callback, **settings())
    assert callback.guardian is not None
    assert callback.guardian.findings == ()
    assert callback.guardian.step == trainer.global_step > 0
    for ours, theirs in zip(module.parameters(), bare.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert_detached(module, callback)


@pytest.mark.parametrize("kind", [Manual, Scheduled, TwoOptimizers, Lbfgs])
def test_other_ways_to_train_are_silent_and_bit_identical(fit: Fit, kind: Any) -> None:
    bare, module, callback = kind(), kind(), watched()
    fit(bare)
    fit(module, callback)
    assert callback.guardian is not None
    assert callback.guardian.findings == ()
    assert callback.guardian.step == 8
    for ours, theirs in zip(module.parameters(), bare.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert_detached(module, callback)


class TrueNorm(Callback):  # type: ignore[misc]
    """The norm of the gradients as Lightning has them, before it clips."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: nn.Module, optimizer: Any) -> None:
        grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        self.norms.append(float(nn.utils.get_total_norm(grads)))


class Kept(Callback):  # type: ignore[misc]
    """What was logged for each batch."""

    def __init__(self) -> None:
        self.figures: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        logged = trainer.callback_metrics.items()
        self.figures.append({name: float(value) for name, value in logged if name.startswith("gpt_guard/")})


def test_the_figures_are_logged_and_are_the_true_ones(fit: Fit) -> None:
    true, kept = TrueNorm(), Kept()
    fit(Automatic(), watched(), true, kept, gradient_clip_val=0.1)
    assert len(kept.figures) == len(true.norms) == 8
    for figures, norm in zip(kept.figures, true.norms, strict=True):
        assert figures["gpt_guard/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert figures["gpt_guard/grad_norm_clipped"] == pytest.approx(0.1, rel=1e-3)
        assert figures["gpt_guard/lr"] == pytest.approx(0.01)
        assert figures["gpt_guard/update_ratio"] > 0


@pytest.mark.parametrize("settings", [half_precision, lambda: {"accumulate_grad_batches": 2}], ids=["fp16", "sums"])
def test_norms_are_the_true_ones_under_a_loss_scale_and_over_several_batches(
    fit: Fit, settings: Callable[[], dict[str, Any]]
) -> None:
    true, callback = TrueNorm(), watched()
    fit(Automatic(), callback, true, **settings())
    assert callback.guardian is not None
    assert callback.guardian.latest is not None
    assert callback.guardian.latest.grad_norm == pytest.approx(true.norms[-1], rel=1e-4)


def test_each_of_two_optimizers_has_its_figures(fit: Fit) -> None:
    trainer = fit(TwoOptimizers(), watched())
    assert trainer.callback_metrics["gpt_guard/grad_norm"] != trainer.callback_metrics["gpt_guard/grad_norm_1"]


def test_figures_can_be_left_out(fit: Fit) -> None:
    trainer = fit(Automatic(), watched(log=False))
    assert not any("gpt_guard" in name for name in trainer.callback_metrics)


class Spoils(Callback):  # type: ignore[misc]
    """Makes a weight NaN before one of the batches, or does something else then."""

    def __init__(self, act: Callable[[Any, Any], Any]) -> None:
        self.act = act
        self.before: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if trainer.global_step == 2:
            self.act(trainer, module)
            self.before = [parameter.detach().clone() for parameter in module.parameters()]


def make_nan(trainer: Any, module: Any) -> None:
    with torch.no_grad():
        module.net.middle.weight[0, 0] = float("nan")


@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_a_halt_comes_before_the_update_names_the_place_and_detaches(fit: Fit, kind: Any) -> None:
    module, callback, spoils = kind(), watched(), Spoils(make_nan)
    with pytest.raises(NonFiniteError) as halted:
        fit(module, callback, spoils)
    assert halted.value.finding.parameter == "net.middle.weight"
    assert halted.value.finding.step == 2
    for parameter, before in zip(module.parameters(), spoils.before, strict=True):
        assert torch.equal(parameter.nan_to_num(7.0), before.nan_to_num(7.0))
    assert_detached(module, callback)


class NeverCleared(Manual):
    def training_step(self, batch: Any, index: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


class Probabilities(Automatic):
    def loss(self, batch: Any) -> Tensor:
        (text,) = batch
        return nn.functional.cross_entropy(self.net(text[:, :-1]).softmax(-1).flatten(0, 1), text[:, 1:].flatten())


class NotAll(Automatic):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.head.parameters(), lr=0.01)


class TrainsInValidation(Automatic):
    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        (text,) = batch
        return nn.functional.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def validation_step(self, batch: Any, index: int) -> None:
        self.net.train()
        self.loss(batch)


def test_the_line_that_is_told_is_the_users_not_lightnings(fit: Fit) -> None:
    def fails(trainer: Any, module: Any) -> None:
        module.net.head.weight.register_hook(lambda grad: grad * float("nan"))

    with pytest.raises(NonFiniteError) as halted:
        fit(Manual(), watched(replay=False), Spoils(fails))
    where = halted.value.finding.where
    assert where is not None
    assert (where.file, where.text) == (__file__, "self.manual_backward(self.loss(batch))")


@pytest.mark.parametrize(
    ("kind", "code"),
    [(NeverCleared, "GG209"), (Probabilities, "GG652"), (NotAll, "GG302"), (TrainsInValidation, "GG501")],
)
def test_silent_bugs_are_found(fit: Fit, kind: Any, code: str) -> None:
    module, callback = kind(), watched()
    fit(module, callback)
    assert callback.guardian is not None
    assert [found.code for found in callback.guardian.findings] == [code]
    assert_detached(module, callback)


def test_the_users_own_exception_goes_first_and_everything_is_detached(fit: Fit) -> None:
    def fails(trainer: Any, module: Any) -> None:
        raise RuntimeError("mine")

    module, callback = Automatic(), watched()
    with pytest.raises(RuntimeError, match="mine"):
        fit(module, callback, Spoils(fails))
    assert_detached(module, callback)


def test_a_ctrl_c_detaches(fit: Fit) -> None:
    def interrupts(trainer: Any, module: Any) -> None:
        raise KeyboardInterrupt

    module, callback = Automatic(), watched()
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(module, callback, Spoils(interrupts))
    assert_detached(module, callback)


def test_a_training_that_is_told_to_stop_detaches(fit: Fit) -> None:
    def stops(trainer: Any, module: Any) -> None:
        trainer.should_stop = True

    module, callback = Automatic(), watched()
    trainer = fit(module, callback, Spoils(stops))
    assert callback.guardian is not None
    assert callback.guardian.step == trainer.global_step < 8
    assert_detached(module, callback)


def test_a_resumed_run_counts_and_judges_on(fit: Fit, tmp_path: Path) -> None:
    first = watched()
    trainer = fit(Automatic(), first)
    path = tmp_path / "whole.ckpt"
    trainer.save_checkpoint(path)
    assert first.guardian is not None
    batches = first.guardian.state_dict()
    callback = watched()
    module = Automatic()
    trainer = fit(module, callback, max_epochs=3, checkpoint=path)
    assert callback.guardian is not None
    assert callback.guardian.step == trainer.global_step == 12
    assert callback.guardian.report().findings == ()
    assert callback.guardian.state_dict().keys() == batches.keys()


def test_a_checkpoint_of_a_run_that_was_not_watched_is_gone_on_from(fit: Fit, tmp_path: Path) -> None:
    fit(TwoOptimizers()).save_checkpoint(tmp_path / "bare.ckpt")
    callback = watched()
    fit(TwoOptimizers(), callback, max_epochs=3, checkpoint=tmp_path / "bare.ckpt")
    assert callback.guardian is not None
    assert callback.guardian.step == 12


def test_it_is_a_callback_for_the_older_package_too(fit: Fit) -> None:
    package: Any = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed here")

    class Older(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        loss = Automatic.loss
        training_step = Automatic.training_step
        optimizer = torch.optim.AdamW

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    module, callback = Older(), watched()
    fit(module, callback, package=package)
    assert callback.guardian is not None
    assert callback.guardian.step == 8
    assert_detached(module, callback)


def test_an_option_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(GuardUsageError, match="run_dri is no option of Guardian"):
        GuardianCallback(run_dri="runs")
