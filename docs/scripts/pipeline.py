"""From raw text to samples in small steps, and each step broken once.

python pipeline.py             asks preflight about the whole pipeline
python pipeline.py shift       breaks one stage on purpose, and asks about that stage
"""

import copy
import math
import sys
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

from char_tokenizer import CharTokenizer
from gpt_guard import check
from mini_gpt import MiniGPT, MiniGPTConfig

BLOCK = 32


class Pipeline:
    """Everything between a text and a trained model; each stage below changes one part of it."""

    def __init__(self):
        # --8<-- [start:parts]
        torch.manual_seed(0)
        self.text = "".join(topics.values())[:60_000]
        self.tokenizer = CharTokenizer.from_text(self.text)
        ids = torch.tensor(self.tokenizer.encode(self.text))
        self.data = {"train": ids[:50_000], "val": ids[50_000:]}
        self.config = MiniGPTConfig(len(self.tokenizer), BLOCK, embedding_dim=32, num_layers=2, dropout=0.1)
        self.model = MiniGPT(self.config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        # --8<-- [end:parts]

    def make_model(self):
        return copy.deepcopy(self.model)

    def get_batch(self):
        train = self.data["train"]
        rows = train[torch.randint(len(train) - BLOCK - 1, (8, 1)) + torch.arange(BLOCK + 1)]
        return rows[:, :-1], rows[:, 1:]

    def check(self, *only):
        return check(
            self.model,
            batches=self.get_batch,
            data=self.data,
            tokenizer=self.tokenizer,
            optimizer=self.optimizer,
            config=self.config,
            make_model=self.make_model,
            text=self.text,
            only=only,
        )


BROKEN = {}


def breaks(stage):
    """Enter a change of the pipeline under its function's name, with the stage that is to notice."""

    def enter(change):
        BROKEN[change.__name__] = stage, change
        return change

    return enter


# --8<-- [start:tokenizer]
@breaks("tokenizer")
def tokenizer(parts):
    class Lower(CharTokenizer):
        def encode(self, text):
            return super().encode(text.lower())

    parts.tokenizer = Lower(parts.tokenizer.chars)
    # --8<-- [end:tokenizer]


# --8<-- [start:ids]
@breaks("token-ids")
def ids(parts):
    parts.data["train"] = parts.data["train"] + 1  # a tokenizer that counts from 1
    # --8<-- [end:ids]


# --8<-- [start:shift]
@breaks("batches")
def shift(parts):
    right = parts.get_batch

    def unshifted():
        x, _ = right()
        return x, x.clone()

    parts.get_batch = unshifted
    # --8<-- [end:shift]


# --8<-- [start:initial]
@breaks("initial-loss")
def initial(parts):
    nn.init.normal_(parts.model.head.weight, std=1.0)
    # --8<-- [end:initial]


# --8<-- [start:causal]
@breaks("causality")
def causal(parts):
    def forward(self, x):
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))).softmax(-1)
        return self.projection((weights @ value).transpose(1, 2).reshape(batch, length, width))

    for block in parts.model.blocks:
        block.attention.forward = forward.__get__(block.attention)
    # --8<-- [end:causal]


# --8<-- [start:gradients]
@breaks("gradients")
def gradients(parts):
    def forward(self, x):
        return self.down(self.activation(self.up(x.detach())))

    mlp = parts.model.blocks[1].mlp
    mlp.forward = forward.__get__(mlp)
    # --8<-- [end:gradients]


# --8<-- [start:optimizer]
@breaks("optimizer")
def optimizer(parts):
    kept = [p for name, p in parts.model.named_parameters() if "norm" not in name]
    parts.optimizer = torch.optim.AdamW(kept, lr=3e-3)
    # --8<-- [end:optimizer]


# --8<-- [start:overfit]
@breaks("overfit")
def overfit(parts):
    for name, parameter in parts.model.named_parameters():
        parameter.requires_grad_(name == "head.weight")
    # --8<-- [end:overfit]


# --8<-- [start:validation]
@breaks("validation")
def validation(parts):
    def forward(self, x):
        return F.dropout(self.down(self.activation(self.up(x))), 0.1)

    for block in parts.model.blocks:
        block.mlp.forward = forward.__get__(block.mlp)
    # --8<-- [end:validation]


# --8<-- [start:checkpoint]
@breaks("checkpoint")
def checkpoint(parts):
    class Scaled(MiniGPT):
        def __init__(self, config):
            super().__init__(config)
            self.scale = torch.rand(config.embedding_dim) + 0.5  # no parameter, no buffer: state_dict() has it not
            self.norm.register_forward_hook(lambda module, args, output: output * self.scale)

    parts.model = Scaled(parts.config)
    parts.make_model = lambda: Scaled(parts.config)
    # --8<-- [end:checkpoint]


# --8<-- [start:generation]
@breaks("generation")
def generation(parts):
    class Short(MiniGPT):
        @torch.no_grad()
        def generate(self, token_ids, max_new_tokens):
            self.eval()
            for _ in range(max_new_tokens):
                logits, _ = self(token_ids[:, -16:])  # looks at half of what the model was built for
                token_ids = torch.cat([token_ids, logits[:, -1:].argmax(-1)], dim=1)
            return token_ids

    parts.model = Short(parts.config)
    # --8<-- [end:generation]


if __name__ == "__main__":
    parts = Pipeline()
    if sys.argv[1:]:
        stage, change = BROKEN[sys.argv[1]]
        change(parts)
        report = parts.check(stage)
    else:
        report = parts.check()
    print(report)
    sys.exit(bool(report.failed))
