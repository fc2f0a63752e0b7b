"""Tokenizers of GGUF files: the kinds that the families have, each by what it must do with a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from openrl.errors import ModelError
from openrl.models import gguf_tokenizer
from openrl.models.gguf_file import GgufFile

LETTERS = sorted(bytes_to_unicode().values())  # how byte-level vocabularies spell the 256 bytes
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def tokenizer(folder: Path, family: str, tokens: Sequence[str], **fields: Any) -> Any:
    """The tokenizer of a GGUF file that has nothing else, as transformers loads it. `fields`: `tokenizer.ggml.*`."""
    writer = GGUFWriter(str(folder / "x.gguf"), family)
    writer.add_token_list(tokens)
    types = fields.pop("types", {})
    writer.add_token_types([types.get(token, TokenType.NORMAL) for token in tokens])
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    out = folder / "out"
    out.mkdir()
    gguf_tokenizer.write(GgufFile(folder / "x.gguf"), out, 512)
    return AutoTokenizer.from_pretrained(out)


def byte_level(folder: Path, split: str, **fields: Any) -> Any:
    tokens = [*LETTERS, "12", "123", "1234", "'S", "<|begin|>", "<|end|>", "<think>", "Ġa", "\n\n"]
    merges = ["1 2", "12 3", "123 4", "' S", "Ġ a"]
    types = {"<|begin|>": TokenType.CONTROL, "<|end|>": TokenType.CONTROL, "<think>": TokenType.USER_DEFINED}
    ids = {"bos_token_id": tokens.index("<|begin|>"), "eos_token_id": tokens.index("<|end|>")}
    fixed = {"tokenizer_model": "gpt2", "tokenizer_pre": split, "token_merges": merges, "types": types}
    return tokenizer(folder, "llama", tokens, **fixed, **ids, **fields)


def sentencepiece(folder: Path, family: str, **fields: Any) -> Any:
    pieces = ["<pad>", "<s>", "</s>", "<unk>", *BYTES, "▁", "a", "b", "ab", "▁a", "▁ab", "  ", "▁▁▁"]
    scores = [-float(index) for index in range(len(pieces))]
    scores[pieces.index("▁a")] = 1.0  # goes before "ab", which comes before it in the vocabulary
    types = {"<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL, "<unk>": TokenType.UNKNOWN}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 3, "pad_token_id": 0}
    fixed = {"tokenizer_model": "llama", "token_scores": scores, "types": types}
    return tokenizer(folder, family, pieces, **fixed, **ids, **fields)


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("gpt-2", ["1234", "'", "S", "Ġa"]),
        ("llama-bpe", ["<|begin|>", "123", "4", "'S", "Ġa"]),
        ("qwen2", ["1", "2", "3", "4", "'S", "Ġa"]),
    ],
)
def test_byte_level_text_is_split_as_the_file_says(split: str, pieces: list[str], tmp_path: Path) -> None:
    found = byte_level(tmp_path, split)
    ids = found("1234'S a").input_ids
    assert found.convert_ids_to_tokens(ids) == pieces
    assert found.decode(ids, skip_special_tokens=True) == "1234'S a"


def test_control_tokens_are_special_and_the_authors_own_are_not(tmp_path: Path) -> None:
    found = byte_level(tmp_path, "qwen2", add_bos_token=True, add_eos_token=True, chat_template="{{ messages }}")
    ids = found("<think>1<|end|>").input_ids
    assert found.convert_ids_to_tokens(ids) == ["<|begin|>", "<think>", "1", "<|end|>", "<|end|>"]
    assert found.decode(ids, skip_special_tokens=True) == "<think>1"
    assert (found.bos_token, found.eos_token, found.unk_token) == ("<|begin|>", "<|end|>", None)
    assert found.model_max_length == 512
    assert found.chat_template == "{{ messages }}"


def test_sentencepiece_begins_with_a_space_and_merges_by_score(tmp_path: Path) -> None:
    found = sentencepiece(tmp_path, "llama")
    ids = found("ab ab é").input_ids
    assert found.convert_ids_to_tokens(ids) == ["<s>", "▁ab", "▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert found.decode(ids, skip_special_tokens=True) == "ab ab é"


def test_sentencepiece_without_the_first_space(tmp_path: Path) -> None:
    found = sentencepiece(tmp_path, "llama", add_space_prefix=False, add_bos_token=False)
    assert found.convert_ids_to_tokens(found("ab ab").input_ids) == ["ab", "▁ab"]


def test_gemma_merges_by_the_order_of_tokens_and_knows_runs_of_spaces(tmp_path: Path) -> None:
    found = sentencepiece(tmp_path, "gemma3")
    ids = found("ab ab  b").input_ids
    assert found.convert_ids_to_tokens(ids) == ["<s>", "ab", "▁ab", "▁▁", "b"]
    assert found.decode(ids, skip_special_tokens=True) == "ab ab  b"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer_model": "t5"}, "'t5'; legal are 'gpt2' and 'llama'"),
        ({"tokenizer_model": "gpt2", "tokenizer_pre": "martian"}, "'martian'; legal are .*default, .*qwen2"),
        ({"tokenizer_model": "gpt2", "tokenizer_pre": "qwen2"}, "neither merges nor scores"),
    ],
)
def test_other_tokenizers_are_refused_in_words(fields: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer(tmp_path, "llama", LETTERS, **fields)
