"""Save a model, and load it into one whose config differs in two places."""

from char_tokenizer import CharTokenizer
from gpt_guard import load_checkpoint, save_checkpoint
from mini_gpt import MiniGPT, MiniGPTConfig

tokenizer = CharTokenizer.from_text("a small vocabulary of letters")
saved = MiniGPTConfig(len(tokenizer), embedding_dim=64, num_layers=2)
model = MiniGPT(saved)
save_checkpoint("saved.pt", model, tokenizer=tokenizer, config=saved)

other = MiniGPT(MiniGPTConfig(len(tokenizer), embedding_dim=48, num_layers=3))
load_checkpoint("saved.pt", other, tokenizer=tokenizer)
