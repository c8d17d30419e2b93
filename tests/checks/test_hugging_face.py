"""Models of the transformers library, built from a config: the stages that look at a model find nothing in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpt_guard.checks.runner.run import check

transformers = pytest.importorskip("transformers")
V, T = 32, 16
STAGES = ["shapes", "initial-loss", "causality", "validation"]


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=T, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def sizes() -> dict[str, int]:
    return {
        "vocab_size": V,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": T,
    }


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes()))


def mistral() -> Any:
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**sizes(), num_key_value_heads=2, sliding_window=4)
    )


@pytest.mark.parametrize("build", [gpt2, llama, mistral])
def test_decoders_pass(build: Any) -> None:
    x = torch.randint(V, (4, T))
    report = check(build(), batch=(x, x), only=STAGES)
    assert report.passed, report
    assert not report.findings


def test_an_encoder_passes() -> None:
    x = torch.randint(1, V, (4, T))
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes()))
    report = check(model, batch=(x, x), causal=False, pad_id=0, only=STAGES)
    assert report.passed, report
    assert not report.findings


def test_labels_that_were_shifted_before() -> None:
    ids = torch.randint(V, (4, T + 1))
    report = check(gpt2(), batch=(ids[:, :-1], ids[:, 1:]), only=["initial-loss"])
    assert [found.code for found in report.findings] == ["GG653"]
    assert "Shifted twice" in report.findings[0].causes[0]
