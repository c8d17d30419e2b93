"""What makes a tokenizer, a config, weights, a file or a text the same one: digests, and how to compare them."""

from gpt_guard.checkpoint.fingerprint.config import config_changes, config_dict, config_digest
from gpt_guard.checkpoint.fingerprint.record import Difference, Fingerprint, file_digest, text_digest
from gpt_guard.checkpoint.fingerprint.tensors import plain_name, state_digest, unwrap, weights_digest
from gpt_guard.checkpoint.fingerprint.vocabulary import token_list, tokenizer_digest

__all__ = [
    "Difference",
    "Fingerprint",
    "config_changes",
    "config_dict",
    "config_digest",
    "file_digest",
    "plain_name",
    "state_digest",
    "text_digest",
    "token_list",
    "tokenizer_digest",
    "unwrap",
    "weights_digest",
]
