"""Bugs of the tokenizer and of the token ids."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from char_tokenizer import CharTokenizer

from .project import BLOCK, TEXT, TOKENIZER, VAL_TEXT, Project, encode
from .table import mutant


class Lowercasing(CharTokenizer):
    def encode(self, text: str) -> list[int]:
        return super().encode(text.lower())


class Dropping(CharTokenizer):
    def encode(self, text: str) -> list[int]:
        return super().encode("".join(char for char in text if char in self.chars))


class OffByOne(CharTokenizer):
    def decode(self, ids: Iterable[int]) -> str:
        return super().decode((index + 1) % len(self) for index in ids)


class Stripping(CharTokenizer):
    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(super().decode(ids).split())


@mutant("tokenizer", "GG620")
def one_token_stands_twice(project: Project) -> None:
    project.tokenizer = [*TOKENIZER.chars[:-1], TOKENIZER.chars[0]]


@mutant("tokenizer", "GG621")
def encoding_makes_all_lower_case(project: Project) -> None:
    project.tokenizer = Lowercasing(TOKENIZER.chars)


@mutant("tokenizer", "GG622")
def unknown_characters_vanish(project: Project) -> None:
    project.tokenizer = Dropping(TOKENIZER.chars)


@mutant("tokenizer", "GG621")
def decoding_is_off_by_one(project: Project) -> None:
    project.tokenizer = OffByOne(TOKENIZER.chars)


@mutant("tokenizer", "GG621")
def decoding_drops_blanks(project: Project) -> None:
    project.tokenizer = Stripping(["\n", *TOKENIZER.chars[:-1]])


@mutant("tokenizer", "GG624")
def the_tokenizer_grew_after_the_model_was_built(project: Project) -> None:
    project.tokenizer = CharTokenizer([*TOKENIZER.chars, "é", "ß"])


@mutant("tokenizer", "GG701", trained=True)
def the_tokenizer_of_another_run(project: Project) -> None:
    project.tokenizer = CharTokenizer(TOKENIZER.chars[::-1])


@mutant("tokenizer", "GG701", trained=True)
def two_characters_changed_places(project: Project) -> None:
    first, second, *rest = TOKENIZER.chars
    project.tokenizer = CharTokenizer([second, first, *rest])


@mutant("token-ids", "GG631")
def one_id_is_vocab_size(project: Project) -> None:
    project.data["train"][1000] = len(TOKENIZER)


@mutant("token-ids", "GG631")
def ids_begin_at_one(project: Project) -> None:
    project.data["train"] = project.data["train"] + 1


@mutant("token-ids", "GG631")
def the_ignore_index_is_among_the_inputs(project: Project) -> None:
    project.data["train"][500:520] = -100


@mutant("token-ids", "GG632")
def ids_are_floats(project: Project) -> None:
    project.data["train"] = project.data["train"].float()


@mutant("token-ids", "GG632")
def ids_have_two_dimensions(project: Project) -> None:
    ids = project.data["train"]
    project.data["train"] = ids[: len(ids) // BLOCK * BLOCK].view(-1, 1, BLOCK)


@mutant("token-ids", "GG635")
def the_tail_was_never_filled(project: Project) -> None:
    project.data["train"] = torch.cat([project.data["train"], torch.zeros(5000, dtype=torch.int64)])


@mutant("token-ids", "GG636")
def the_text_was_encoded_ten_times(project: Project) -> None:
    project.data["train"] = encode(TEXT[:6000]).repeat(10)


@mutant("token-ids", "GG637")
def the_ids_are_a_mask(project: Project) -> None:
    project.data["train"] = (project.data["train"] > 5).long()


@mutant("token-ids", "GG638")
def validation_is_a_slice_of_training(project: Project) -> None:
    project.data["val"] = project.data["train"][2000:8000].clone()


@mutant("token-ids", "GG633")
def validation_has_fewer_ids_than_a_row(project: Project) -> None:
    project.data["val"] = encode(VAL_TEXT[:BLOCK])
