"""Known errors that one process shows: how the model is built, called and stepped."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.records import Finding

from .parts import known, not_found, sgd, watched

ROWS, WIDTH, CLASSES = 16, 6, 3


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, WIDTH)
    return x, x[:, :CLASSES].argmax(1)


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))


class FusedProduct(torch.autograd.Function):
    """A product written into a buffer of its own: a form that autocast does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = torch.empty(len(x), len(weight))
        return torch.mm(x, weight.t(), out=out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class Fused(nn.Linear):
    """A linear layer over the fused product, or over torch's own."""

    def __init__(self, fused: bool) -> None:
        super().__init__(16, 16, bias=False)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = FusedProduct.apply(x.float(), self.weight) if self.fused else super().forward(x)  # type: ignore[no-untyped-call]  # torch has no types for it
        return out


@known(
    "lightning-thunder-725",
    "A layer inside of autocast computes in full precision: its product has a form that autocast does not know",
    code="GG510",
    guard="AutocastUse",
    step=1,
    place="torch.mm(x",
)
def autocast_does_not_reach(broken: bool) -> list[Finding]:
    model = nn.Sequential(nn.Linear(WIDTH, 16), Fused(broken), nn.Tanh(), nn.Linear(16, CLASSES))
    optimizer = sgd(model)

    def loop() -> None:
        for _ in range(6):
            optimizer.zero_grad()
            x, y = batch()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    return watched(model, optimizer, loop)


class Staged(nn.Module):
    """Freezes its stem when it is told to train."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.stem.requires_grad_(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.stem(x).tanh()).tanh())
        return logits


@known(
    "mmpretrain-702",
    "A part that only the model's own train() freezes is trained, because nobody calls train()",
    code="GG511",
    guard="FreezeInTrain",
    step=0,
    place="stem",
)
def frozen_by_train_only(broken: bool) -> list[Finding]:
    model = Staged()
    optimizer = sgd(model)
    if not broken:
        model.train()

    def loop() -> None:
        for _ in range(6):
            step(model, optimizer)

    return watched(model, optimizer, loop)


@known(
    "stackoverflow-60335387",
    "zero_grad() is missing: every step applies the sum of all gradients so far",
    code="GG209",
    guard="LoopOrder",
    step=2,
    begins=1,
    place="backward()",
)
def gradients_are_never_cleared(broken: bool) -> list[Finding]:
    model = net()
    optimizer = sgd(model)

    def loop() -> None:
        for _ in range(6):
            if not broken:
                optimizer.zero_grad()
            x, y = batch()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return watched(model, optimizer, loop)


class CapturedStep(torch.optim.SGD):
    """Records, as a compiler does, which parameters a step moves, and replays that; `guarded` looks again each time."""

    def __init__(self, parameters: Any, lr: float, guarded: bool) -> None:
        super().__init__(parameters, lr=lr)
        self.guarded = guarded
        self.seen: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        params = self.param_groups[0]["params"]
        with_gradient = [each for each in params if each.grad is not None]
        if self.seen is None or self.guarded or len(with_gradient) < len(self.seen):
            self.seen = with_gradient
        for each in self.seen:
            if each.grad is not None:
                each.sub_(each.grad, alpha=self.param_groups[0]["lr"])


@known(
    "pytorch-115607",
    "A compiled step that was captured while gradients were None updates nothing from then on",
    code="GG301",
    guard="ParamDeltaProbe",
    step=4,
    begins=3,
    place="0.weight",
)
def captured_without_gradients(broken: bool) -> list[Finding]:
    model = net()
    optimizer = CapturedStep(model.parameters(), lr=0.05, guarded=not broken)

    def loop() -> None:
        for turn in range(8):
            optimizer.zero_grad()
            if turn != 2:
                x, y = batch()
                F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return watched(model, optimizer, loop)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


@known(
    "pytorch-forum-84911",
    "All layers are frozen but the normalisation: the loop runs, and next to nothing is trained",
    code="GG310",
    guard="ParamDeltaProbe",
    step=0,
    place="fc.weight",
)
def all_but_the_norms_frozen(broken: bool) -> list[Finding]:
    model = Convolutional()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bn" in name or (not broken and name.startswith("fc")))
    optimizer = sgd(model)

    def loop() -> None:
        for _ in range(6):
            optimizer.zero_grad()
            x = torch.randn(ROWS, 1, 7, 7)
            F.cross_entropy(model(x), x.mean((1, 2, 3)).sign().long() + 1).backward()
            optimizer.step()

    return watched(model, optimizer, loop)


not_found(
    "transformers-17877",
    "Every module of the model initialises all parameters below it again while the model is built",
    "It happens before a loop is there to be watched, and the weights it ends with come from the distribution that "
    "was meant: what is lost is time.",
)


@known(
    "pytorch-51800",
    "Spectral norm is estimated in training mode only: a model that is evaluated first runs without it",
    code="GG508",
    guard="EvalModeAssert",
    step=0,
    place="model(batch()[0])",
)
def evaluated_before_it_was_estimated(broken: bool) -> list[Finding]:
    normalise = nn.utils.spectral_norm if broken else nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(normalise(nn.Linear(WIDTH, 32)), nn.ReLU(), normalise(nn.Linear(32, 32)), nn.Linear(32, 3))
    optimizer = sgd(model)

    def loop() -> None:
        model.eval()
        with torch.no_grad():
            model(batch()[0])
        model.train()
        for _ in range(4):
            step(model, optimizer)

    return watched(model, optimizer, loop)
