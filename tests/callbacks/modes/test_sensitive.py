"""Which modules count as sensitive to the mode."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional

from gpt_guard.callbacks.modes.sensitive import sensitive_modules

from .loops import net


class HandWritten(nn.Module):
    """Attention as many write it: a float, used as `dropout_p` in training mode."""

    def __init__(self, p: float, config: Any = None) -> None:
        super().__init__()
        self.dropout = p
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class NormOrder(nn.Module):
    """`p` is no probability of dropout here, and nothing asks for the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.p = 0.5

    def forward(self, x: Tensor) -> Tensor:
        order: Tensor = x.norm(self.p)
        return order


class FromConfig(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.config = type("Config", (), {})()
        self.config.attn_dropout = rate

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.config.attn_dropout if self.training else 0.0)


@pytest.mark.parametrize(
    ("module", "sensitive"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.AlphaDropout(0.1), True),
        (nn.BatchNorm1d(4), True),
        (nn.BatchNorm1d(4, track_running_stats=False), False),
        (nn.InstanceNorm1d(4), False),
        (nn.InstanceNorm1d(4, track_running_stats=True), True),
        (nn.LayerNorm(4), False),
        (nn.RReLU(), True),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.MultiheadAttention(4, 2), False),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.1), True),
        (nn.GRU(4, 4, num_layers=2), False),
        (HandWritten(0.1), True),
        (HandWritten(0.0), False),
        (NormOrder(), False),
        (FromConfig(0.1), True),
        (FromConfig(0.0), False),
    ],
)
def test_which_modules_count(module: nn.Module, sensitive: bool) -> None:
    assert bool(sensitive_modules(module)) is sensitive


def test_patterns_leave_modules_out() -> None:
    assert [each.path for each in sensitive_modules(net())] == ["1", "3"]
    assert [each.path for each in sensitive_modules(net(), ["1"])] == ["3"]
