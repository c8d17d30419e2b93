"""Frameworks that own the loop, or wrap what is in it; small random models, made here."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from .parts import BATCH, STEPS, VOCABULARY, Breakable, Leak, Model, Setup, Trial, loss_of, texts

CALLBACK = "`GuardianCallback()` in `callbacks=[...]`"
PARTS_ONLY = {"silent bug found": "no: Lightning calls parts of its module, and the probes ask what is called whole"}


def llama(trial: Trial) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    model: Any = LlamaForCausalLM(LlamaConfig(**config, **heads))
    for layer in model.model.layers:
        layer.mlp.down_proj = Breakable(trial, layer.mlp.down_proj)
    if trial.leaks:
        model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, Leak())
    return model


def lora(trial: Trial) -> nn.Module:
    import peft

    inner = llama(trial)
    config: Any = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model: Any = peft.get_peft_model(inner, config)
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-3)
    with trial.watch(model, optimizer):
        for step in range(STEPS):
            trial.begin_step(model)
            ids = texts(step)
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            trial.norm_of(model)
            optimizer.step()
    return inner  # type: ignore[no-any-return]


def trainer(trial: Trial) -> nn.Module:
    import transformers

    from gpt_guard.integrations.transformers import GuardianCallback

    base: Any = transformers.TrainerCallback

    class Notes(base):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trial.begin_step(model, state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            trial.norms += [logs["grad_norm"]] if "grad_norm" in logs else []

    model = llama(trial)
    rows = [{"input_ids": row, "labels": row.clone()} for row in texts(0, STEPS * BATCH)]
    with tempfile.TemporaryDirectory() as folder:
        settings: Any = {"per_device_train_batch_size": BATCH, "max_steps": STEPS, "logging_steps": 1, "report_to": []}
        settings |= {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False}
        args = transformers.TrainingArguments(output_dir=folder, learning_rate=1e-3, max_grad_norm=0.5, **settings)
        made = transformers.Trainer(
            model, args, train_dataset=rows, callbacks=[Notes(), *trial.callback(GuardianCallback)]
        )
        made.remove_callback(transformers.PrinterCallback)
        made.train()
    return model  # type: ignore[no-any-return]


def accelerated(trial: Trial) -> nn.Module:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    inner = Model(trial)
    data = DataLoader(TensorDataset(texts(0, STEPS * BATCH)), batch_size=BATCH)
    prepared: Any = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters(), lr=1e-3), data)
    model, optimizer, data = prepared
    with trial.watch(model, optimizer):
        for (ids,) in data:
            trial.begin_step(inner)
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, ids))
            trial.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
    return inner


def lightning(trial: Trial, *, manual: bool) -> nn.Module:
    import lightning.pytorch as pl

    from gpt_guard.integrations.lightning import GuardianCallback

    base: Any = pl.LightningModule

    class Training(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Model(trial)
            self.automatic_optimization = not manual

        def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
            trial.begin_step(self)
            loss = loss_of(self.net, batch[0])
            if not manual:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            trial.norm_of(self)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    module = Training()
    settings: Any = {"accelerator": "cpu", "devices": 1, "max_steps": STEPS, "logger": False}
    settings |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    data = DataLoader(TensorDataset(texts(0, STEPS * BATCH)), batch_size=BATCH)
    pl.Trainer(callbacks=trial.callback(GuardianCallback), **settings).fit(module, data)
    return module


SETUPS = (
    Setup("PEFT LoRA", lora, place="base_model.model.model.layers.0.mlp.down_proj", missing="peft"),
    Setup("transformers Trainer", trainer, CALLBACK, "model.layers.0.mlp.down_proj", missing="transformers"),
    Setup("accelerate", accelerated, "`Guardian(model, optimizer)`, as prepared", missing="accelerate"),
    Setup(
        "Lightning, automatic",
        lambda trial: lightning(trial, manual=False),
        CALLBACK,
        "net.layers.0.down",
        PARTS_ONLY,
        missing="lightning",
    ),
    Setup(
        "Lightning, manual",
        lambda trial: lightning(trial, manual=True),
        CALLBACK,
        "net.layers.0.down",
        PARTS_ONLY,
        missing="lightning",
    ),
)
