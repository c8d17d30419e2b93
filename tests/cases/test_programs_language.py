"""Language models of many kinds train under every default guard without a word."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .conftest import Guarded
from .programs import STEPS, characters, learned, windows

LENGTH, WIDTH = 16, 32


class Recurrent(nn.Module):
    """Time first, as nn.LSTM has it when it is told nothing; the output layer shares the table of tokens."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.encoder = nn.Embedding(vocabulary, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1)
        self.decoder = nn.Linear(WIDTH, vocabulary)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, ids: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.drop(self.encoder(ids)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).flatten(0, 1), dim=1), hidden

    def start(self, rows: int) -> tuple[Tensor, Tensor]:
        zeros = next(self.parameters()).new_zeros(2, rows, WIDTH)
        return zeros, zeros.clone()


def test_an_lstm_whose_state_goes_on_from_window_to_window(guarded: Guarded) -> None:
    ids, vocabulary = characters()
    rows = 8
    columns = ids[: len(ids) // rows * rows].view(rows, -1).T.contiguous()
    train, valid = columns[:1200], columns[1200:1400]
    model = Recurrent(vocabulary)
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    criterion = nn.NLLLoss()

    def evaluate() -> float:
        model.eval()
        total, hidden = 0.0, model.start(rows)
        with torch.no_grad():
            for place in range(0, len(valid) - 1, LENGTH):
                length = min(LENGTH, len(valid) - 1 - place)
                output, hidden = model(valid[place : place + length], hidden)
                total += length * criterion(output, valid[place + 1 : place + 1 + length].flatten()).item()
        return total / (len(valid) - 1)

    losses: list[float] = []
    hidden: Any
    with guarded(model, optimizer):
        while len(losses) < STEPS:
            model.train()
            hidden = model.start(rows)
            for place in range(0, len(train) - 1, LENGTH):
                length = min(LENGTH, len(train) - 1 - place)
                hidden = tuple(each.detach() for each in hidden)
                model.zero_grad()
                output, hidden = model(train[place : place + length], hidden)
                loss = criterion(output, train[place + 1 : place + 1 + length].flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()
                losses.append(loss.item())
            if evaluate() > 10:
                for group in optimizer.param_groups:
                    group["lr"] /= 4.0
    learned(losses, 0.85)


@dataclass
class Output:
    """As the models of well-known collections return it."""

    loss: Tensor | None
    logits: Tensor


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn: nn.Module = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.mlp: nn.Module = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        )
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        output: Tensor = x + self.mlp(self.ln_2(x))
        return output


class Transformer(nn.Module):
    """Causal, with tied tables; returns `Output`, and shifts the labels itself where it is given the ids as labels."""

    def __init__(self, vocabulary: int, dropout: float = 0.0, checkpointed: bool = False, layers: int = 1) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.apply(self._start)
        self.lm_head.weight = self.wte.weight
        self.checkpointed = checkpointed

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, targets: Tensor | None = None, labels: Tensor | None = None) -> Output:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed and self.training else block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        elif labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits)

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            logits = self(ids[:, -LENGTH:]).logits[:, -1] / 0.8
            limit = logits.topk(5).values[:, -1:]
            chances = logits.masked_fill(logits < limit, -math.inf).softmax(-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1)], 1)
        return ids


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def rate(step: int) -> float:
    """Up over 20 steps, then a cosine down to a tenth."""
    if step < 20:
        return (step + 1) / 20
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - 20) / (STEPS - 20))))


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_a_transformer_with_all_that_belongs_to_it(guarded: Guarded, half: bool) -> None:
    """Warm-up, cosine by hand, accumulation, clipping, validation and samples; in bfloat16 by autocast as well."""
    ids, vocabulary = characters()
    train, valid = ids[:10000], ids[10000:]
    model = Transformer(vocabulary, dropout=0.1, layers=2)
    optimizer = torch.optim.AdamW(groups(model), lr=6e-3, betas=(0.9, 0.95))
    accumulated, losses = 2, []

    @torch.no_grad()
    def estimate() -> dict[str, float]:
        model.eval()
        found = {}
        for name, text in (("train", train), ("val", valid)):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                measured = [model(*windows(text, 4, LENGTH)).loss for _ in range(2)]
            found[name] = float(torch.stack([each for each in measured if each is not None]).mean())
        model.train()
        return found

    with guarded(model, optimizer) as guardian:
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = 6e-3 * rate(step)
            if step % 50 == 0:
                guardian.log(**estimate())
                model.eval()
                model.generate(valid[None, :4], 4)
                model.train()
            total = 0.0
            for _ in range(accumulated):
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    loss = model(*windows(train, 8, LENGTH)).loss / accumulated
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(total)
    learned(losses)


def test_labels_that_the_model_shifts_itself(guarded: Guarded) -> None:
    """Activation checkpointing, GradScaler on the CPU, and labels that are the ids."""
    ids, vocabulary = characters()
    model = Transformer(vocabulary, checkpointed=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    with guarded(model, optimizer, scheduler=scheduler, scaler=scaler):
        for _ in range(STEPS):
            batch, _ = windows(ids, 8, LENGTH)
            with torch.autocast("cpu", torch.bfloat16):
                output = model(input_ids=batch, labels=batch)
            scaler.scale(output.loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(output.loss.item())
    learned(losses)


class Adapted(nn.Module):
    """A frozen layer with a detour of low rank whose second half starts at zero."""

    def __init__(self, base: Any, rank: int = 4, alpha: float = 16.0) -> None:
        super().__init__()
        self.base, self.scaling = base, alpha / rank
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.lora_dropout = nn.Dropout(0.05)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.scaling * self.lora_B(self.lora_A(self.lora_dropout(x)))
        return output


@pytest.mark.parametrize("prompted", [False, True], ids=["all tokens", "answers alone"])
def test_low_rank_adapters_on_a_trained_model(guarded: Guarded, prompted: bool) -> None:
    """Trained on characters, tuned on a text that says everything in small steps upwards."""
    ids, vocabulary = characters()
    model = Transformer(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(*windows(ids, 8, LENGTH)).loss.backward()
        optimizer.step()
    model.requires_grad_(False)
    for block in model.h:
        assert isinstance(block, Block)
        mlp: Any = block.mlp
        block.c_attn, mlp[0] = Adapted(block.c_attn), Adapted(mlp[0])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            batch = (torch.randint(20, (8, 1)) + torch.arange(LENGTH + 1)) % 20
            targets = batch[:, 1:].clone()
            if prompted:
                targets[:, :5] = -1
            loss = model(batch[:, :-1], targets).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            losses.append(loss.item())
    learned(losses, 0.9)


class Experts(nn.Module):
    """Each token goes to the two experts that its router prefers; some get none. Keeps the loss that spreads them."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(count)
        )
        self.spread = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chances = self.router(flat).softmax(-1)
        weights, chosen = chances.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if len(rows):
                output.index_add_(0, rows, weights[rows, places, None] * expert(flat[rows]))
        used = F.one_hot(chosen[:, 0], len(self.experts)).float().mean(0)
        self.spread = len(self.experts) * (used * chances.mean(0)).sum()
        return output.view_as(x)


@pytest.mark.parametrize("width", [8, 1], ids=["batch", "one row"])
def test_a_mixture_of_experts_with_its_auxiliary_loss(guarded: Guarded, width: int) -> None:
    ids, vocabulary = characters()
    model = Transformer(vocabulary)
    experts = [Experts() for _ in model.h]
    for block, its_own in zip(model.h, experts, strict=True):
        block.mlp = its_own
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with guarded(model, optimizer):
        for _ in range(STEPS):
            loss = model(*windows(ids, width, LENGTH)).loss
            total = loss + 0.01 * torch.stack([each.spread for each in experts]).sum()
            optimizer.zero_grad()
            total.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    learned(losses, 0.85)


COMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: torch.compile(model, backend="eager"),
    "aot_eager": lambda model: torch.compile(model, backend="aot_eager"),
}


@pytest.mark.parametrize("backend", COMPILED)
def test_a_compiled_model(guarded: Guarded, backend: str) -> None:
    ids, vocabulary = characters()
    model = Transformer(vocabulary)
    compiled = COMPILED[backend](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    with guarded(compiled, optimizer):
        for _ in range(STEPS):
            loss = compiled(*windows(ids, 8, LENGTH)).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    learned(losses, 0.85)
