"""Stage 11: sound models learn a batch by heart; each broken one is told by the shape of its curve."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_guard.checks.overfit.memorise import floor
from gpt_guard.checks.overfit.seed_model import changed, cut, learner, seed_settings
from gpt_guard.checks.overfit.stage import OverfitStage
from gpt_guard.checks.runner.base import Subject
from gpt_guard.checks.runner.run import preflight
from gpt_guard.records import CheckResult, Finding
from mini_gpt import MiniGPT, MiniGPTConfig

V, T = 29, 16
CONFIG = MiniGPTConfig(V, block_size=24, embedding_dim=128, num_heads=8, num_layers=4, dropout=0.1)
SMALL = replace(CONFIG, embedding_dim=32, num_heads=2, num_layers=2)
Pair = tuple[Tensor, Tensor | None]


def batch(vocab_size: int = V) -> tuple[Tensor, Tensor]:
    rows = torch.randint(vocab_size, (6, T + 1))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def checks(model: nn.Module | None, **fields: Any) -> tuple[CheckResult, ...]:
    fields.setdefault("batch", batch())
    return preflight(Subject(model=model, **fields), [OverfitStage()]).checks


def found_in(model: nn.Module, **fields: Any) -> Finding:
    (result,) = checks(model, **fields)
    assert result.status == "failed", result.measured
    (found,) = result.findings
    return found


def cross_entropy(logits: Tensor, targets: Tensor | None) -> Tensor | None:
    return None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_a_sound_model_learns_in_the_seed_configuration() -> None:
    seen: list[tuple[int, int, str]] = []
    model = MiniGPT(CONFIG)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (result,) = checks(model, progress=lambda *args: seen.append(args))
    assert result.status == "passed"
    assert "a fresh MiniGPT (block 16, width 64, layers 2)" in result.measured
    facts: dict[str, Any] = dict(result.facts)
    assert facts["overfit_loss"] < 0.1
    assert facts["overfit_accuracy"] > 0.95
    curve = facts["overfit_curve"]
    assert curve[0][1] == pytest.approx(math.log(V), rel=0.05)
    assert seen[-1][:2] == (300, 300)
    assert seen[-1][2].startswith("loss ")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_answer_is_the_same_every_time() -> None:
    data = batch()
    one, other = (checks(MiniGPT(CONFIG), batch=data, overfit_steps=20)[0] for _ in range(2))
    assert one.facts == other.facts


@dataclass
class Sizes:
    """A config that no seed configuration can be made of."""

    v: int = V
    c: int = 32


class Own(nn.Module):
    """Logits alone, in a shape of its own, with a recurrence for context."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.config = sizes
        self.embedding = nn.Embedding(sizes.v, sizes.c, sparse=True)
        self.mix = nn.GRU(sizes.c, sizes.c, batch_first=True)
        self.head = nn.Linear(sizes.c, sizes.v)

    def forward(self, idx: Tensor) -> Tensor:
        logits: Tensor = self.head(self.mix(self.embedding(idx))[0])
        return logits


class Encoder(nn.Module):
    """Sees all of the row; the targets are its own ids, read backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(V, 32), nn.Embedding(T, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, V)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embedding(idx) + self.positions(torch.arange(idx.size(1)))
        logits: Tensor = self.head(self.layer(x))
        return logits


def test_other_sound_models_learn_as_they_are() -> None:
    model = Own(Sizes())
    (result,) = checks(model, overfit_steps=400)
    assert result.status == "passed", result.measured
    assert "a fresh Own of the same configuration" in result.measured
    assert model.embedding.sparse
    x, _ = batch()
    (result,) = checks(Encoder(), batch=(x, x.flip(1)), causal=False)
    assert result.status == "passed", result.measured
    assert "this Encoder as it is" in result.measured
    (result,) = checks(None, make_model=lambda: MiniGPT(SMALL))
    assert result.status == "passed", result.measured
    assert "from make_model" in result.measured


def test_bfloat16_and_a_large_vocabulary() -> None:
    (result,) = checks(MiniGPT(replace(CONFIG, vocab_size=2000)).bfloat16(), batch=batch(2000))
    assert result.status == "passed", result.measured


def test_a_model_with_a_frozen_base_only_has_to_fall() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MiniGPT(SMALL).requires_grad_(False)
            self.inner.head.requires_grad_(True)

        def forward(self, idx: Tensor, targets: Tensor | None = None) -> Pair:
            out: Pair = self.inner(idx, targets)
            return out

    model = Wrapped()
    (result,) = checks(model, overfit_steps=100)
    assert result.status == "passed", result.measured
    assert "frozen" in result.expected
    model.requires_grad_(False)
    assert found_in(model).code == "GG310"


def test_a_batch_that_cannot_be_learned_is_judged_by_what_it_allows() -> None:
    """Eight equal rows with random targets: guessing by frequency is the best there is."""
    x = torch.randint(5, (1, T)).expand(6, T).contiguous()
    y = torch.randint(5, (6, T))
    limits = floor(x, y, ignore_index=-100, causal=True, shifts_inside=False)
    assert limits is not None
    (result,) = checks(MiniGPT(replace(CONFIG, vocab_size=5)), batch=(x, y))
    assert result.status == "passed", result.measured
    loss: Any = result.facts["overfit_loss"]
    assert limits.loss - 0.01 <= loss < limits.loss + 0.1


# Broken models.


class DoubleSoftmax(MiniGPT):
    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Pair:
        logits = super().forward(token_ids)[0].softmax(-1)
        return logits, cross_entropy(logits, targets)


class NoContext(MiniGPT):
    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Pair:
        x = self.token_embedding(token_ids)
        for block in self.blocks:
            mlp: Any = block.mlp
            x = x + mlp(block.get_submodule("mlp_norm")(x))
        logits = self.head(self.norm(x))
        return logits, cross_entropy(logits, targets)


class NoInput(MiniGPT):
    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Pair:
        return super().forward(torch.zeros_like(token_ids), targets)


class Noise(MiniGPT):
    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Pair:
        logits = F.dropout(super().forward(token_ids)[0], 0.5)
        return logits, cross_entropy(logits, targets)


class OwnDropout(MiniGPT):
    """A rate that the config does not know, in training mode only."""

    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Pair:
        logits = F.dropout(super().forward(token_ids)[0] * 0.1, 0.95, self.training)
        return logits, cross_entropy(logits, targets)


class Detached(MiniGPT):
    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Pair:
        logits = super().forward(token_ids)[0]
        logits = logits.detach() + 0.0 * logits
        return logits, cross_entropy(logits, targets)


class Transposed(MiniGPT):
    """Flattened in another order than the logits."""

    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Pair:
        logits = super().forward(token_ids)[0]
        return logits, None if targets is None else cross_entropy(logits, targets.t().reshape(targets.shape))


class Sign(MiniGPT):
    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Pair:
        logits, loss = super().forward(token_ids, targets)
        return logits, None if loss is None else 5.0 - loss


class Turned(MiniGPT):
    """A hook that turns the gradient round."""

    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Pair:
        logits = super().forward(token_ids)[0]
        turned = logits.clone()
        if turned.requires_grad:
            turned.register_hook(torch.neg)
        return logits, cross_entropy(turned, targets)


class Overflows(MiniGPT):
    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Pair:
        logits, loss = super().forward(token_ids, targets)
        return logits, None if loss is None else (loss - 2.0).log()


class Slow(MiniGPT):
    """A temperature of a hundred."""

    def forward(self, token_ids: Tensor, targets: Tensor | None = None) -> Pair:
        logits = super().forward(token_ids)[0] / 100.0
        return logits, cross_entropy(logits, targets)


BROKEN: dict[type[MiniGPT], tuple[str, str]] = {
    DoubleSoftmax: ("GG671", "fed probabilities"),
    NoContext: ("GG671", "current token only"),
    NoInput: ("GG671", "how frequent the tokens are"),
    Noise: ("GG674", "draws random numbers"),
    OwnDropout: ("GG674", "Dropout stays on"),
    Detached: ("GG670", "Nothing is trained"),
    Transposed: ("GG676", "other targets"),
    Sign: ("GG676", "sign is wrong"),
    Turned: ("GG675", "custom autograd.Function"),
    Overflows: ("GG673", "overflow"),
    Slow: ("GG672", "signal is far too small"),
}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_broken_models_are_told_by_their_curve(kind: type[MiniGPT]) -> None:
    code, cause = BROKEN[kind]
    found = found_in(kind(SMALL))
    assert (found.code, cause in found.causes[0]) == (code, True), (found.seen, found.causes[0])
    assert "at step 0" in found.seen


def test_too_few_steps_are_said_to_be_that() -> None:
    found = found_in(MiniGPT(CONFIG), overfit_steps=5)
    assert found.code == "GG672"
    assert "too few steps" in found.causes[0]


# Dropout.


def test_dropout_makes_a_batch_harder() -> None:
    _, result = checks(MiniGPT(CONFIG), compare_dropout=True, overfit_steps=120)
    assert result.status == "passed"
    (alone,) = checks(MiniGPT(CONFIG), overfit_steps=120)
    with_it: Any = result.facts["overfit_loss_dropout"]
    without: Any = alone.facts["overfit_loss"]
    assert with_it > without


def test_dropout_that_reaches_no_layer() -> None:
    class Ignores(MiniGPT):
        def __init__(self, config: MiniGPTConfig) -> None:
            super().__init__(replace(config, dropout=0.0))

    _, result = checks(Ignores(CONFIG), compare_dropout=True, overfit_steps=20)
    assert result.status == "failed"
    assert result.findings[0].code == "GG677"


def test_without_any_dropout_nothing_is_compared() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(V, V)

        def forward(self, idx: Tensor) -> Tensor:
            logits: Tensor = self.table(idx)
            return logits

    _, result = checks(Bare(), compare_dropout=True, overfit_steps=5)
    assert result.status == "skipped"


# What is trained, and on what.


def test_seed_settings_only_ever_shrink() -> None:
    assert seed_settings(CONFIG) == {"embedding_dim": 64, "num_heads": 4, "num_layers": 2, "block_size": 24}
    small = MiniGPTConfig(V, block_size=8, embedding_dim=32, num_heads=2, num_layers=1)
    assert seed_settings(small) == {"num_layers": 1, "block_size": 8}
    llama = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "intermediate_size": 11008,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    }
    assert seed_settings(llama) == {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 172,
        "head_dim": 16,
        "max_position_embeddings": 32,
    }
    assert seed_settings(Sizes()) is None
    assert seed_settings(None) is None


def test_configs_of_every_make_are_copied() -> None:
    class Plain:
        width = 8

    plain = Plain()
    assert changed(plain, {"width": 4}).width == 4
    assert plain.width == 8
    assert changed({"width": 8, "depth": 2}, {"width": 4}) == {"width": 4, "depth": 2}
    assert changed(CONFIG, {"num_layers": 1}) == replace(CONFIG, num_layers=1)


def test_a_class_that_refuses_the_small_sizes_is_trained_as_it_is() -> None:
    class Fixed(MiniGPT):
        def __init__(self, config: MiniGPTConfig) -> None:
            if config.embedding_dim != 128:
                raise ValueError("made for 128")
            super().__init__(config)

    subject = Subject(model=Fixed(CONFIG), config=CONFIG, batch=batch(), make_model=lambda: Fixed(CONFIG))
    subject.sources["make_model"] = "Fixed(config)"
    who = learner(subject)
    assert who.words == "a fresh Fixed of the same configuration"


def test_the_batch_is_cut_where_targets_count() -> None:
    x = torch.arange(20).expand(10, 20)
    y = torch.full((10, 20), -100)
    y[:, 12:16] = 1
    cut_x, cut_y = cut(x, y, 6, -100)
    assert cut_x.shape == (8, 6)
    assert int((cut_y != -100).sum()) == 8 * 4
    assert torch.equal(cut(x, y, 32, -100)[0], x[:8])


def test_floors_by_hand() -> None:
    x, y = torch.tensor([[1, 2], [1, 3], [1, 2]]), torch.tensor([[2, 5], [3, 6], [2, -100]])
    limits = floor(x, y, ignore_index=-100, causal=True, shifts_inside=False)
    assert limits is not None
    # After the first token comes 2 twice and 3 once; after [1, 2] and [1, 3] all is clear.
    first = -(2 * math.log(2 / 3) + math.log(1 / 3))
    assert limits.loss == pytest.approx(first / 5)
    assert limits.accuracy == pytest.approx(4 / 5)
    assert limits.targets == 5
    assert limits.bigram == pytest.approx(first / 5)
    assert limits.position == pytest.approx((first + 2 * math.log(2)) / 5)
    encoder = floor(x, y, ignore_index=-100, causal=False, shifts_inside=False)
    assert encoder is not None
    assert encoder.loss == 0.0
    shifted = floor(x, x, ignore_index=-100, causal=True, shifts_inside=True)
    assert shifted is not None
    assert shifted.targets == 3
    assert shifted.loss == pytest.approx(first / 3)
    assert floor(x.float(), y, ignore_index=-100, causal=True, shifts_inside=False) is None


class Labels(MiniGPT):
    """As Hugging Face: `labels` are the ids themselves, shifted inside."""

    def forward(self, token_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(token_ids)[0]
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"logits": logits, "loss": loss}


def test_labels_that_are_shifted_inside() -> None:
    x, _ = batch()
    (result,) = checks(Labels(CONFIG), batch=(x, x))
    assert result.status == "passed", result.measured
    accuracy: Any = result.facts["overfit_accuracy"]
    assert accuracy > 0.95


def test_label_smoothing_keeps_the_loss_up_and_passes() -> None:
    def smooth(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1)

    (result,) = checks(MiniGPT(CONFIG), loss_fn=smooth)
    assert result.status == "passed", result.measured
    loss: Any = result.facts["overfit_loss"]
    assert loss > 0.1 * math.log(V)
