"""Movement: parameters that are frozen and move, or are trained and do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard import Guardian
from gpt_guard.records import Finding

from .kinds import CLASSES, WIDTH, both, loss_of, net, sgd, step, trained, watched

V = 11
FROZEN, MOVES, LOST, RESIZED = (
    "all or most of the model frozen",
    "frozen parameter that still moves",
    "half-precision update lost to rounding",
    "resized embedding",
)


@both(FROZEN, "GG310", "All 4 parameters")
def a_loop_over_all_parameters(broken: bool) -> list[Finding]:
    model = net()
    for each in model.parameters() if broken else model[0].parameters():
        each.requires_grad_(False)
    optimizer = sgd(model.parameters())

    def loop(_: Guardian) -> None:
        for _turn in range(4):
            optimizer.zero_grad()
            loss = loss_of(model)
            try:
                loss.backward()
            except RuntimeError:
                return  # torch says that there is nothing to differentiate
            optimizer.step()

    return watched(model, optimizer, loop)


@both(FROZEN, "GG310", "2.weight")
def the_optimizer_has_the_frozen_part_only(broken: bool) -> list[Finding]:
    model = net()
    model[0].requires_grad_(False)
    return trained(model, sgd(model[0].parameters() if broken else model[2].parameters()))


@both(FROZEN, "GG310", "2.weight")
def everything_but_the_biases(broken: bool) -> list[Finding]:
    model = net()
    for name, each in model.named_parameters():
        each.requires_grad_("bias" in name or (not broken and name.startswith("2")))
    return trained(model, sgd([each for each in model.parameters() if each.requires_grad]))


@both(MOVES, "GG306", "0.weight", begins=3)
def frozen_with_its_old_gradient(broken: bool) -> list[Finding]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def loop(_: Guardian) -> None:
        for turn in range(8):
            optimizer.zero_grad(set_to_none=turn < 3 or not broken)
            loss_of(model).backward()
            if turn == 3:
                model[0].requires_grad_(False)
                if not broken:
                    model[0].zero_grad()
            optimizer.step()

    return watched(model, optimizer, loop)


class Teacher(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.student, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        values = self.student.weight.data
        self.teacher.weight.data = values if shared else values.clone()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.teacher(self.student(x)).tanh())
        return logits


@both(MOVES, "GG306", "teacher.weight")
def a_frozen_copy_on_the_storage_of_the_original(broken: bool) -> list[Finding]:
    model = Teacher(shared=broken)
    return trained(model, sgd([each for each in model.parameters() if each.requires_grad]))


def half_loss(model: nn.Module) -> Tensor:
    x = torch.randn(16, WIDTH)
    dtype = next(model.parameters()).dtype
    return F.cross_entropy(model(x.to(dtype)).float(), x[:, :CLASSES].argmax(1))


@both(LOST, "GG301", "0.weight")
def a_rate_that_no_weight_feels(broken: bool) -> list[Finding]:
    model = net().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6 if broken else 1e-2, weight_decay=0.0)
    return trained(model, optimizer, half_loss)


@both(LOST, "GG305", "0.weight", within=25)
def a_rate_that_few_weights_feel(broken: bool) -> list[Finding]:
    model = net().bfloat16()
    return trained(model, sgd(model.parameters(), 3e-3 if broken else 0.5), half_loss, steps=30)


class Text(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(V, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, V, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embed(ids)).tanh())
        return logits


def text_loss(model: nn.Module) -> Tensor:
    ids = (torch.randint(V, (8, 1)) + torch.arange(6)) % V
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def grown(old: nn.Embedding, rows: int) -> nn.Embedding:
    new = nn.Embedding(rows, old.embedding_dim)
    with torch.no_grad():
        new.weight[: old.num_embeddings] = old.weight
    return new


@both(RESIZED, "GG302", "embed.weight")
def rows_added_after_the_optimizer(broken: bool) -> list[Finding]:
    model = Text()
    early = sgd(model.parameters())
    model.embed = grown(model.embed, V + 2)
    return trained(model, early if broken else sgd(model.parameters()), text_loss)


@both(RESIZED, "GG302", "embed.weight", begins=3, within=3)
def rows_added_in_mid_run(broken: bool) -> list[Finding]:
    model = Text()
    optimizer = sgd(model.parameters())

    def loop(_: Guardian) -> None:
        for turn in range(12):
            if turn == 3:
                model.embed = grown(model.embed, V + 2)
                if not broken:
                    optimizer.param_groups[0]["params"] = list(model.parameters())
            step(model, optimizer, text_loss)

    return watched(model, optimizer, loop)


TIES, SOME, STUCK = (
    "tied weights that are not tied, or stepped twice",
    "gradients None on some ranks or steps",
    "a gradient, and no movement",
)


@both(TIES, "GG314", "head.weight")
def weights_copied_instead_of_tied(broken: bool) -> list[Finding]:
    model = Text(tied=not broken)
    if broken:
        model.head.weight.data.copy_(model.embed.weight.data)
    return trained(model, None, text_loss)


@both(TIES, "GG320", "embed.weight")
def a_tied_weight_in_two_optimizers(broken: bool) -> list[Finding]:
    model = Text(tied=True)
    body = list(model.body.parameters())
    first = torch.optim.AdamW([model.embed.weight, *body], lr=1e-3)
    second = torch.optim.AdamW([model.head.weight], lr=1e-3)

    def loop(_: Guardian) -> None:
        for _turn in range(6):
            model.zero_grad()
            text_loss(model).backward()
            first.step()
            if broken:
                second.step()

    return watched(model, [first, second] if broken else [first], loop)


class Forgetful(torch.optim.SGD):
    """Puts one weight back after each step, or (`healthy`) none."""

    def __init__(self, model: nn.Sequential, healthy: bool) -> None:
        super().__init__(model.parameters(), lr=0.05)
        self.weight = None if healthy else model.get_parameter("0.weight")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        kept = None if self.weight is None else self.weight.detach().clone()
        super().step()
        if self.weight is not None and kept is not None:
            self.weight.data.copy_(kept)


@both(STUCK, "GG304", "0.weight", within=20)
def an_optimizer_that_puts_a_weight_back(broken: bool) -> list[Finding]:
    model = net()
    return trained(model, Forgetful(model, healthy=not broken), steps=24)


class Idle(torch.optim.SGD):
    """A step that is left out under a condition."""

    moves = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        if self.moves:
            super().step()


@both(STUCK, "GG301", "0.weight")
def a_step_that_does_nothing(broken: bool) -> list[Finding]:
    model = net()
    optimizer = Idle(model.parameters(), lr=0.05)
    optimizer.moves = not broken
    return trained(model, optimizer)


class Experts(nn.Module):
    """Sends each row to one of three experts, or to the first two alone."""

    def __init__(self, used: int) -> None:
        super().__init__()
        self.experts, self.used = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(3)), used

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x)) % self.used
        out = x.new_zeros(len(x), CLASSES)
        for number in range(self.used):
            out[places == number] = self.experts[number](x[places == number])
        return out


@both(SOME, "GG202", "experts.2", within=50)
def an_expert_that_never_gets_a_row(broken: bool) -> list[Finding]:
    return trained(Experts(2 if broken else 3), steps=55)
