"""Programs that look at pictures train under every default guard without a word."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .conftest import Guarded
from .programs import STEPS, endless, learned, picture_loaders


class Net(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.AdaptiveMaxPool2d(1),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(2 * width, 3))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits


def augmented(x: Tensor) -> Tensor:
    """Turned over and moved by a pixel, at random."""
    if torch.rand(()) < 0.5:
        x = x.flip(-1)
    return x.roll(int(torch.randint(-1, 2, ())), -2) + 0.05 * torch.randn_like(x)


@torch.no_grad()
def accuracy(model: nn.Module, loader: Any) -> float:
    model.eval()
    hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    return hits / len(loader.dataset)


def test_an_image_classifier_with_validation_and_checkpoints(guarded: Guarded, tmp_path: Path) -> None:
    train, valid = picture_loaders()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    epochs = 14
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=epochs * len(train))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    best, losses = 0.0, []
    with guarded(model, optimizer, scheduler=scheduler):
        for epoch in range(epochs):
            model.train()
            for x, y in train:
                loss = criterion(model(augmented(x)), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses.append(loss.item())
            score = accuracy(model, valid)
            if score >= best:
                best = score
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, tmp_path / "best.pt")
        model.load_state_dict(torch.load(tmp_path / "best.pt")["model"])
        assert accuracy(model, valid) == best > 0.8
    learned(losses)


def test_mixed_pictures_and_soft_labels(guarded: Guarded) -> None:
    train, _ = picture_loaders()
    model = Net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with guarded(model, optimizer):
        for x, y in endless(train):
            share = float(torch.distributions.Beta(0.2, 0.2).sample())
            order = torch.randperm(len(x))
            target = F.one_hot(y, 3).float()
            target = share * target + (1 - share) * target[order]
            loss = F.cross_entropy(model(share * x + (1 - share) * x[order]), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    learned(losses)


def test_a_student_of_a_teacher_that_is_its_average(guarded: Guarded) -> None:
    """Labels for the first batch rows only; the rest is to agree with the mean teacher."""
    train, valid = picture_loaders()
    model = Net()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    with guarded(model, optimizer):
        for step, (x, y) in enumerate(endless(train)):
            logits = model(augmented(x))
            with torch.no_grad():
                wanted = teacher(augmented(x)).softmax(1)
            supervised = F.cross_entropy(logits[:8], y[:8])
            agreement = F.mse_loss(logits.softmax(1), wanted)
            optimizer.zero_grad()
            (supervised + min(1.0, step / 50) * agreement).backward()
            optimizer.step()
            with torch.no_grad():
                decay = min(0.99, step / (step + 10))
                for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                    mine.mul_(decay).add_(theirs, alpha=1 - decay)
            losses.append(supervised.item())
        assert accuracy(teacher, valid) > 0.6
    learned(losses)


def test_a_small_net_that_learns_from_a_large_one(guarded: Guarded) -> None:
    train, valid = picture_loaders()
    large, model = Net(16), Net(4, dropout=0.0)
    teaching = torch.optim.Adam(large.parameters(), lr=3e-3)
    for x, y in endless(train, 60):
        teaching.zero_grad()
        F.cross_entropy(large(x), y).backward()
        teaching.step()
    large.eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    heat, losses = 3.0, []
    with guarded(model, optimizer):
        for x, y in endless(train):
            with torch.no_grad():
                wanted = F.log_softmax(large(x) / heat, dim=1)
            logits = model(x)
            soft = F.kl_div(F.log_softmax(logits / heat, dim=1), wanted, log_target=True, reduction="batchmean")
            loss = 0.7 * heat**2 * soft + 0.3 * F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert accuracy(model, valid) > 0.6
    learned(losses)


def test_averaged_weights_with_statistics_of_their_own(guarded: Guarded) -> None:
    train, valid = picture_loaders()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    usual = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    slow = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    losses = []
    with guarded(model, optimizer):
        for epoch in range(14):
            model.train()
            for x, y in train:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(augmented(x)), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            if epoch < 8:
                usual.step()
            else:
                average.update_parameters(model)
                slow.step()
        torch.optim.swa_utils.update_bn(train, average)
        assert accuracy(average, valid) > 0.8
    learned(losses)


def test_fine_tuning_of_a_head_on_frozen_features(guarded: Guarded) -> None:
    """The features stay in evaluation mode, as their statistics are to stay what they are."""

    class Tuned(Net):
        def train(self, mode: bool = True) -> Tuned:
            super().train(mode)
            self.features.eval()
            return self

    train, valid = picture_loaders()
    model = Tuned().train()
    model.features.requires_grad_(False)
    optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=2e-2)
    losses = []
    with guarded(model, optimizer):
        for step, (x, y) in enumerate(endless(train)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step % 50 == 49:
                accuracy(model, valid)
                model.train()
    learned(losses, 0.9)


def test_uncertainty_by_dropout_that_stays_on(guarded: Guarded) -> None:
    """Monte Carlo dropout in evaluation, allowed by name."""
    from gpt_guard.callbacks.defaults import default_guards
    from gpt_guard.callbacks.modes.guard import EvalModeAssert

    train, valid = picture_loaders()
    model = Net(dropout=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    guards = [guard for guard in default_guards() if not isinstance(guard, EvalModeAssert)]
    losses = []
    with guarded(model, optimizer, guards=[*guards, EvalModeAssert(allow=["classifier.*"])]):
        for step, (x, y) in enumerate(endless(train)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step % 50 == 49:
                model.eval()
                model.classifier[1].train()
                with torch.no_grad():
                    for seen, _ in valid:
                        torch.stack([model(seen).softmax(1) for _ in range(4)]).std(0)
                model.train()
    assert len(losses) == STEPS
    learned(losses)
