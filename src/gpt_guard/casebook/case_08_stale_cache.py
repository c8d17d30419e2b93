"""The chat model ignores the new system prompt.

The chat template was changed, and training goes on with token ids that were cached under the old one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt_guard.casebook.book import Expected, SmallGPT, windows
from gpt_guard.checkpoint.cache import cached
from gpt_guard.errors import FingerprintMismatch
from gpt_guard.guardian import Guardian
from gpt_guard.records import Finding

EXPECTED = Expected("GG709", "template", "template")
CHATS = [("hello", "good day"), ("what is red", "a colour"), ("who sings", "the bird sings")] * 20
OLD, NEW = "<q>{0}<a>{1}<e>", "<s>be brief<q>{0}<a>{1}<e>"
CHARS = sorted(set("".join(NEW.format(*chat) for chat in CHATS)))


def tokenize(template: str) -> Tensor:
    """Ids of all chats, one after the other."""
    return torch.tensor([CHARS.index(char) for chat in CHATS for char in template.format(*chat)])


def train(*, broken: bool) -> tuple[Finding, ...]:
    """Train for a few steps, with the bug or without it, and return what was found."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "train_ids.pt"
        cached(cache, lambda: tokenize(OLD), tokenizer=CHARS, template=OLD)
        if not broken:
            cache.unlink()  # what the bug leaves out: the template has changed since
        try:
            ids = cached(cache, lambda: tokenize(NEW), tokenizer=CHARS, template=NEW)
        except FingerprintMismatch as mismatch:
            return (mismatch.finding,)

        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        model = SmallGPT(vocabulary=len(CHARS))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with Guardian(model, optimizer, sinks=[]) as guardian:
            for _ in range(10):
                x, y = windows(ids, 16, 16, generator)
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return guardian.findings
