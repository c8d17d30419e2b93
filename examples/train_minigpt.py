"""Train MiniGPT on real text, character by character; everything it writes lies below --out.

    python examples/train_minigpt.py --out runs/demo
    python examples/train_minigpt.py --out runs/demo --resume
    python examples/train_minigpt.py --out runs/broken --break nan

A line that ends with the comment "guard" belongs to gpt_guard. Delete those lines and a plain script is left.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

import breaks  # guard
from char_tokenizer import CharTokenizer
from checkpoints import (
    CheckpointProblem,
    load_for_resume,
    random_state,
    restore_random_state,
    save_atomically,
    unused_folder,
)
from corpus import CorpusError, load_corpus
from gpt_guard import Guardian  # guard
from halt import exit_on_halt  # guard
from mini_gpt import MiniGPT, MiniGPTConfig
from progress import TrainingProgress

BLOCK_SIZE = 32
CLIP_AT = 2.0  # healthy gradients of this model have a norm near 1; only a burst should be cut
KEPT = (
    "corpus",
    "steps",
    "eval_every",
    "batch_size",
    "lr",
    "warmup",
    "dropout",
    "seed",
)  # options a resumed run takes over


def count(text: str) -> int:
    """An option that counts something: 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def rate(text: str) -> float:
    """A learning rate: above 0, and a number."""
    number = float(text)
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


parser = argparse.ArgumentParser(description="Train a small GPT on real text, character by character.")
parser.add_argument("--corpus", default="pydoc", help="pydoc (needs no file), a text file, or a folder of splits")
parser.add_argument(
    "--out", type=Path, default=Path("runs/demo"), help="folder for all that is written; never one of another run"
)
parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in --out")
parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto")
parser.add_argument("--steps", type=count, default=2000, help="optimizer steps in all")
parser.add_argument("--eval-every", type=count, default=250, help="steps between validations")
parser.add_argument("--batch-size", type=count, default=8)
parser.add_argument("--lr", type=rate, default=3e-3, help="learning rate at the end of the warm-up")
parser.add_argument("--warmup", type=count, default=100, help="steps over which it rises; at most a tenth of all")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=1337)
breaks.add_option(parser)  # guard
args = parser.parse_args()


def fail(message: object) -> NoReturn:
    parser.exit(2, f"{parser.prog}: {message}\n")


if not args.resume:
    args.out = unused_folder(args.out)
checkpoint: dict[str, Any] = {}
out: Path = args.out
latest_path = out / "checkpoints" / "mini_gpt_latest.pt"
best_path = out / "checkpoints" / "mini_gpt_best.pt"
if args.resume:
    try:
        checkpoint = load_for_resume(latest_path)
    except CheckpointProblem as problem:
        fail(problem)
    parser.set_defaults(**checkpoint["settings"])  # what is not given again stays as it was
    args = parser.parse_args()
settings = {name: getattr(args, name) for name in KEPT}
broken = breaks.chosen(args)  # guard
args = broken("settings", args)  # guard

if args.device == "auto":
    args.device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
elif args.device == "cuda" and not torch.cuda.is_available():
    fail("--device cuda: this torch sees no CUDA device; use --device cpu, or install a CUDA build of torch")
elif args.device == "mps" and not torch.backends.mps.is_available():
    fail("--device mps: this torch sees no Metal device; use --device cpu")
device = torch.device(args.device)
if device.type == "cpu":
    # Threads that share this little work spend their time waiting for each other, most of all on a busy machine.
    torch.set_num_threads(1)

# Text to ids. The vocabulary is that of the whole corpus: it says which characters exist, not what follows what, and
# a character that only validation has must not be without an id.
try:
    corpus = load_corpus(args.corpus, BLOCK_SIZE)
except CorpusError as error:
    fail(error)
tokenizer = CharTokenizer.from_text(corpus.text)
tokenizer_path = out / "tokenizer" / "char_tokenizer.json"
trained_with = checkpoint.get("tokenizer_fingerprint")
if trained_with not in (None, tokenizer.fingerprint):
    mismatch = tokenizer.explain_mismatch(trained_with, tokenizer_path)
    fail(f"the run in {out} {mismatch}. Give the corpus of that run, or another --out for a new one.")
train_ids, val_ids, test_ids = (torch.tensor(tokenizer.encode(t)) for t in (corpus.train, corpus.val, corpus.test))
broken("data", (train_ids, len(tokenizer)))  # guard
try:
    tokenizer_path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(tokenizer_path)
    for split, ids in (("train", train_ids), ("val", val_ids), ("test", test_ids)):
        save_atomically(ids, out / "data" / "encoded" / f"{split}_ids.pt")
except OSError as error:
    fail(f"--out {out}: cannot be written to ({error.strerror}); choose another folder")
print(f"corpus {args.corpus}, {len(tokenizer)} different characters\n{corpus.note}")

# Model and optimizer. Weight decay is for matrices; on biases, gains and embeddings it only hurts.
torch.manual_seed(args.seed)
order = torch.Generator().manual_seed(args.seed)
try:
    config = MiniGPTConfig(len(tokenizer), BLOCK_SIZE, dropout=args.dropout)
except ValueError as error:
    fail(error)
model = MiniGPT(config).to(device)
model = broken("model", model)  # guard
matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name]
others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embedding" in name]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.99))
model = broken("optimized model", model)  # guard
warmup: int = max(1, min(args.warmup, args.steps // 10))


def warmup_then_cosine(step: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, args.steps - warmup))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine)
step, best_val_loss = 0, math.inf
if checkpoint:
    try:
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        scheduler.load_state_dict(checkpoint["scheduler_state_dict"])
    except (RuntimeError, ValueError, KeyError) as error:
        fail(f"{latest_path} does not fit this model and optimizer: {error}\nStart anew in another --out.")
    restore_random_state(checkpoint["random_state"], order, device)
    step, best_val_loss = checkpoint["step"], checkpoint["best_val_loss"]


def get_batch(ids: Tensor) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(ids) - BLOCK_SIZE, (args.batch_size, 1), generator=order)
    rows = ids[starts + torch.arange(BLOCK_SIZE + 1)].to(device)
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def evaluate(model: MiniGPT, ids: Tensor, rows: int = 256) -> float:
    """Mean loss over evenly spaced rows: the same ones every time, and no random number drawn."""
    was_training = model.training
    model.eval()
    starts = torch.linspace(0, len(ids) - BLOCK_SIZE - 1, rows, dtype=torch.float64).long()[:, None]
    window = ids[starts + torch.arange(BLOCK_SIZE + 1)].to(device)
    _, loss = model(window[:, :-1], window[:, 1:])
    model.train(was_training)
    mean: float = loss.item()
    return mean


def save(path: Path) -> None:
    content: dict[str, Any] = {
        "config": dataclasses.asdict(config),
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler_state_dict": scheduler.state_dict(),
        "step": step,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "random_state": random_state(order, device),
        "best_val_loss": best_val_loss,
        "settings": settings,
    }
    content["guardian"] = guardian.state_dict()  # guard
    save_atomically(content, path)


evaluate = broken("evaluate", evaluate)  # guard
get_batch = broken("get_batch", get_batch)  # guard
parameters = sum(p.numel() for p in model.parameters())
print(f"{parameters:,} parameters on {device}; guessing at random costs log V = {math.log(len(tokenizer)):.3f}")
guardian = Guardian(model, optimizer, scheduler=scheduler, tokenizer=tokenizer, run_dir=out, start_step=step)  # guard
if "guardian" in checkpoint:  # guard
    guardian.load_state_dict(checkpoint["guardian"])  # guard
with contextlib.ExitStack() as stack:
    stack.enter_context(exit_on_halt())  # guard
    broken("loop", (stack, model))  # guard
    stack.enter_context(guardian)  # guard
    bar = stack.enter_context(TrainingProgress(step, args.steps, tokens=args.batch_size * BLOCK_SIZE))
    while step < args.steps:
        x, y = get_batch(train_ids)
        optimizer.zero_grad(set_to_none=True)
        logits, loss = model(x, y)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_AT)
        optimizer.step()
        lr = optimizer.param_groups[0]["lr"]
        scheduler.step()
        step += 1
        if step % 10 == 0 or step == args.steps:
            # Reading a number waits for the device, so not on every step.
            bar.show(step, loss=loss.item(), lr=lr, grad_norm=grad_norm.item())
        if step % args.eval_every == 0 or step == args.steps:
            val_loss = evaluate(model, val_ids)
            guardian.log(val_loss=val_loss)  # guard
            print(f"step {step:>5}  train loss {evaluate(model, train_ids):.3f}  val loss {val_loss:.3f}")
            if val_loss < best_val_loss:
                best_val_loss = val_loss
                save(best_path)
            save(latest_path)

print("\nfinal losses in nats per character:")
for split, ids in (("train", train_ids), ("val", val_ids), ("test", test_ids)):
    print(f"  {split:5} {evaluate(model, ids):.3f}")
print(f"  best val {best_val_loss:.3f}, log V {math.log(len(tokenizer)):.3f}\n\na sample:")
prompt = train_ids[None, :4].to(device)
print(tokenizer.decode(model.generate(prompt, 400, temperature=0.8, top_k=40)[0].tolist()))
