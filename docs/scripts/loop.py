"""A training loop as you may have one, with two lines of gpt_guard: the import and the `with`."""

from pydoc_data.topics import topics

import torch
from torch import nn

from gpt_guard import Guardian

data = torch.tensor(list("".join(topics.values()).encode()))  # real text that comes with Python
model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(16 * 32, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)

with Guardian(model, optimizer, scheduler=scheduler, run_dir="runs/first"):
    for _ in range(200):
        window = data[torch.randint(len(data) - 17, (32, 1)) + torch.arange(17)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
