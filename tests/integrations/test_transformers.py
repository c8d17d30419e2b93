"""The Hugging Face Trainer, watched through its callback; the models are small, random, and made here."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt_guard import GuardUsageError, NonFiniteError
from gpt_guard.records import Finding

transformers = pytest.importorskip("transformers", reason="transformers is not installed here")

from gpt_guard.integrations.transformers import GuardianCallback  # noqa: E402

Callback: Any = transformers.TrainerCallback
Trainer: Any = transformers.Trainer
VOCABULARY = 32


def language_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**config, **changes}))


def texts(count: int = 32) -> list[dict[str, Tensor]]:
    rows = torch.randint(0, VOCABULARY, (count, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    yield
    transformers.logging.set_verbosity(verbosity)


Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(model: nn.Module, *callbacks: Any, data: Any = None, kind: Any = None, **arguments: Any) -> Any:
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "report_to": [],
            "logging_steps": 1,
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "learning_rate": 1e-3,
            "dataloader_pin_memory": False,
        }
        args = transformers.TrainingArguments(**{**settings, **arguments})
        rows = texts() if data is None else data
        trainer = (kind or transformers.Trainer)(
            model, args, train_dataset=rows, eval_dataset=texts(8), callbacks=list(callbacks)
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    return made


def watched(**options: Any) -> GuardianCallback:
    return GuardianCallback(sinks=[], **options)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def tables(module: nn.Module) -> tuple[Any, ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def assert_detached(trainer: Any, callback: GuardianCallback) -> None:
    model = trainer.model
    hooks = [hook for module in model.modules() for table in tables(module) for hook in table.values()]
    assert not [hook for hook in hooks if type(hook).__module__.startswith("gpt_guard")]
    for name in ("training_step", "get_batch_samples", "evaluate", "save_model", "log"):
        assert name not in vars(trainer), name
    # torch's schedulers replace it as well, and theirs stays.
    assert "gpt_guard" not in trainer.optimizer.step.__code__.co_filename
    assert "call_event" not in vars(trainer.callback_handler)
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert not hasattr(torch.autograd.backward, "__wrapped__")
    assert callback.guardian is not None
    callback.guardian.start()  # free to be entered again
    callback.guardian.stop()


class BadAt:
    """Makes one gradient of a module NaN, in one step."""

    def __init__(self, module: nn.Module, callback: GuardianCallback, step: int) -> None:
        self.callback, self.step = callback, step
        module.register_full_backward_hook(self)

    def __call__(self, module: nn.Module, given: Any, returned: Any) -> Any:
        assert self.callback.guardian is not None
        if self.callback.guardian.step == self.step:
            return tuple(None if each is None else each * float("nan") for each in given)
        return None


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"bf16": True},
        {"activation_checkpointing": True},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
        {"save_strategy": "steps", "save_steps": 3},
        {"optim": "adafactor"},
        {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch"},
    ],
    ids=lambda arguments: ",".join(arguments) or "plain",
)
def test_a_healthy_training_is_silent_and_bit_identical(make: Make, arguments: dict[str, Any]) -> None:
    bare = make(language_model(), **arguments)
    bare.train()
    callback = watched()
    trainer = make(language_model(), callback, **arguments)
    trainer.train()
    assert callback.guardian is not None
    assert callback.guardian.findings == ()
    assert callback.guardian.step == trainer.state.global_step > 0
    for ours, theirs in zip(weights(trainer.model), weights(bare.model), strict=True):
        assert torch.equal(ours, theirs)
    assert_detached(trainer, callback)


def test_the_figures_stand_in_the_logs_and_agree_with_the_trainers_own(make: Make) -> None:
    seen: list[dict[str, float]] = []

    class Board(Callback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    trainer = make(language_model(), Board(), watched(), gradient_accumulation_steps=2, max_grad_norm=0.1)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 6
    for entry in steps:
        assert entry["gpt_guard/grad_norm"] == pytest.approx(entry["grad_norm"], rel=1e-5)
        assert entry["gpt_guard/grad_norm_clipped"] == pytest.approx(0.1, rel=1e-3)
        assert entry["gpt_guard/lr"] == pytest.approx(entry["learning_rate"])
        assert entry["gpt_guard/update_ratio"] > 0
    # An earlier callback, as those of TensorBoard and W&B are, is given them too.
    assert [entry["gpt_guard/grad_norm"] for entry in seen if "loss" in entry] == [
        entry["gpt_guard/grad_norm"] for entry in steps
    ]


def test_figures_can_be_left_out(make: Make) -> None:
    trainer = make(language_model(), watched(log=False))
    trainer.train()
    assert not any("gpt_guard" in name for entry in trainer.state.log_history for name in entry)


def test_a_halt_ends_the_run_before_the_update_and_detaches(make: Make) -> None:
    callback = watched()
    model = language_model()
    trainer = make(model, callback)
    BadAt(model.model.layers[1].mlp, callback, step=3)
    before: list[list[Tensor]] = []

    class Before(Callback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            before.append(weights(model))

    trainer.add_callback(Before())
    with pytest.raises(NonFiniteError) as halted:
        trainer.train()
    assert halted.value.finding.module == "model.layers.1.post_attention_layernorm"
    assert halted.value.finding.step == trainer.state.global_step == 3
    assert all(torch.equal(ours, last) for ours, last in zip(weights(model), before[-1], strict=True))
    assert_detached(trainer, callback)


def test_a_halt_in_front_of_the_optimizers_step_detaches(make: Make) -> None:
    callback = watched()
    model = language_model()

    class Spoils(Callback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                model.lm_head.weight.grad.fill_(float("nan"))

    trainer = make(model, callback, Spoils())
    with pytest.raises(NonFiniteError) as halted:
        trainer.train()
    assert halted.value.finding.parameter == "lm_head.weight"
    assert_detached(trainer, callback)


class Stops(Callback):  # type: ignore[misc]
    """Raises in one of the moments that the trainer has."""

    def __init__(self, moment: str, error: BaseException) -> None:
        self.error = error
        setattr(self, moment, self.stop)

    def stop(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise self.error


class Data:
    """A dataset that raises at one of its rows."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.rows, self.read = error, texts(), 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read += 1
        if self.read == 11:
            raise self.error
        return self.rows[index]


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
@pytest.mark.parametrize("where", ["loss", "data", "on_step_begin", "on_pre_optimizer_step", "on_evaluate"])
def test_an_exception_on_the_way_detaches_and_is_the_users_own(make: Make, where: str, error: BaseException) -> None:
    class Raises(Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if where == "loss" and self.state.global_step == 2:
                raise error
            return super().compute_loss(*args, **kwargs)

    callback = watched()
    others = [Stops(where, error)] if where.startswith("on_") else []
    data = Data(error) if where == "data" else None
    evaluation = {"eval_strategy": "steps", "eval_steps": 2}
    trainer = make(language_model(), callback, *others, data=data, kind=Raises, **evaluation)
    with pytest.raises(type(error)) as raised:
        trainer.train()
    assert raised.value is error
    assert_detached(trainer, callback)


def test_an_early_stop_detaches(make: Make) -> None:
    class Enough(Callback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    callback = watched()
    trainer = make(language_model(), Enough(), callback)
    trainer.train()
    assert callback.guardian is not None
    assert callback.guardian.step == 2
    assert_detached(trainer, callback)


@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("saves", ["steps", "epoch", "best"])
def test_a_resumed_run_counts_and_judges_on(make: Make, tmp_path: Path, saves: str, restores: bool) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "loss"} if saves == "best" else {}
    settings = {"save_strategy": saves, "save_steps": 4, "max_steps": 8, **evaluation}
    settings["per_device_train_batch_size"] = 8
    first = watched()
    make(language_model(), first, **settings).train()
    assert first.guardian is not None
    tokens = first.guardian.state_dict()["progress"]["tokens"]
    callback = watched()
    trainer = make(
        language_model(), callback, **{**settings, "max_steps": 12}, restore_callback_states_from_checkpoint=restores
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-8"))
    assert callback.guardian is not None
    assert callback.guardian.step == trainer.state.global_step == 12
    assert callback.guardian.report().steps == 12
    # What the guards had seen went along: tokens are counted through.
    assert callback.guardian.state_dict()["progress"]["tokens"] == 1.5 * tokens
    assert callback.guardian.findings == ()


def test_a_checkpoint_of_a_run_that_was_not_watched_is_gone_on_from(make: Make, tmp_path: Path) -> None:
    make(language_model(), save_strategy="steps", save_steps=3).train()
    callback = watched()
    trainer = make(language_model(), callback)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert callback.guardian is not None
    assert callback.guardian.step == 6


def test_a_second_training_is_watched_too(make: Make) -> None:
    callback = watched()
    trainer = make(language_model(), callback)
    trainer.train()
    first = callback.guardian
    trainer.train()
    assert callback.guardian is not first
    assert callback.guardian is not None
    assert callback.guardian.step == 6
    assert_detached(trainer, callback)


class Mixes(nn.Module):
    """A layer that adds the mean over the whole text to each position, later ones included."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(dim=1, keepdim=True)


def test_a_future_that_leaks_is_found(make: Make) -> None:
    model = language_model()
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, Mixes())
    callback = watched()
    make(model, callback).train()
    assert callback.guardian is not None
    assert [found.code for found in callback.guardian.findings] == ["GG660"]


def adapters(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed here")
    with warnings.catch_warnings():
        # peft asks transformers for something under its old name.
        warnings.simplefilter("ignore", FutureWarning)
        return _adapted(peft, model)


def _adapted(peft: Any, model: nn.Module) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def test_lora_adapters_train_in_silence_and_bit_identical(make: Make) -> None:
    def adapted() -> Any:
        model = language_model()
        torch.manual_seed(1)
        return adapters(model)

    bare = make(adapted())
    bare.train()
    callback = watched()
    trainer = make(adapted(), callback)
    trainer.train()
    assert callback.guardian is not None
    assert callback.guardian.findings == ()
    for ours, theirs in zip(weights(trainer.model), weights(bare.model), strict=True):
        assert torch.equal(ours, theirs)
    assert_detached(trainer, callback)


def test_a_broken_adapter_is_named(make: Make) -> None:
    model = adapters(language_model())
    callback = watched()
    trainer = make(model, callback)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.default"

    class Breaks(Callback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                model.get_submodule(name).weight.data[0, 0] = float("nan")

    trainer.add_callback(Breaks())
    with pytest.raises(NonFiniteError) as halted:
        trainer.train()
    found: Finding = halted.value.finding
    assert found.parameter == f"{name}.weight"
    assert_detached(trainer, callback)


def test_an_option_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(GuardUsageError, match="run_dri is no option of Guardian"):
        GuardianCallback(run_dri="runs")
    with pytest.raises(GuardUsageError, match="optimizer comes from the trainer"):
        GuardianCallback(optimizer=None)


def test_a_caller_that_is_no_trainer_is_refused() -> None:
    state = transformers.TrainerState()
    with pytest.raises(GuardUsageError, match=r"no transformers\.Trainer"):
        watched().on_train_begin(None, state, None, model=nn.Linear(2, 2), optimizer=None, lr_scheduler=None)
