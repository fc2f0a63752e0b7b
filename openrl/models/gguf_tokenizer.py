"""The tokenizer that a GGUF file describes, as the files that transformers 4 and 5 load.

`tokenizer.json` is written as plain JSON: transformers' own reader of GGUF files wants torch, and moves from one
release to the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openrl.models.gguf_config import GEMMA, architecture, special_tokens
from openrl.models.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "▁"  # what SentencePiece writes for a space
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"
# How text is split before merges, by the file's word for it; None is GPT-2's way, which byte-level BPE brings along.
_SPLITS: Mapping[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def write(file: GgufFile, out: Path, context: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and, if there is one, the chat template. `context`: tokens.

    Raises ModelError for a tokenizer that we cannot describe.
    """
    tokens: Sequence[str] | None = file.metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise file.unusable("it has no tokenizer")
    match file.metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            parts = _byte_level(file, tokens)
        case "llama":
            parts = _gemma(file, tokens) if architecture(file) in GEMMA else _sentencepiece(file, tokens)
        case other:
            raise file.unusable(f"its tokenizer is of the kind {other!r}; legal are 'gpt2' and 'llama'")
    named = _named(file, tokens)
    fixed = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(file, tokens, named)}
    whole = fixed | parts | {"post_processor": _post_processor(file, named)}
    (out / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False, separators=(",", ":")))
    config = {**named, "model_max_length": context, "tokenizer_class": "PreTrainedTokenizerFast"}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    template = file.metadata.get("tokenizer.chat_template")
    if template:
        (out / "chat_template.jinja").write_text(template)


def _named(file: GgufFile, tokens: Sequence[str]) -> dict[str, str]:
    """The tokens with a task, by transformers' names."""
    named = {name.removesuffix("_id"): tokens[index] for name, index in special_tokens(file).items()}
    if architecture(file) in GEMMA and "<mask>" in tokens:
        named["mask_token"] = "<mask>"
    return named


def _added(file: GgufFile, tokens: Sequence[str], named: Mapping[str, str]) -> list[dict[str, Any]]:
    """Tokens that are matched whole in any text: those with a task, control tokens and the author's own."""
    kinds = file.metadata.get("tokenizer.ggml.token_type", ())
    special = {index for index, kind in enumerate(kinds) if kind == _CONTROL}
    special |= {tokens.index(token) for token in named.values()}
    own = {index for index, kind in enumerate(kinds) if kind == _USER_DEFINED}
    if architecture(file) in GEMMA:  # runs of spaces are found by merges
        own = {index for index in own if tokens[index].strip(" ")}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": tokens[index], **flags, "special": index in special} for index in sorted(special | own)
    ]


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> dict[str, Any]:
    kind = str(file.metadata.get("tokenizer.ggml.pre"))
    if kind not in _SPLITS:
        raise file.unusable(f"its tokenizer splits text in the way {kind!r}; legal are {', '.join(sorted(_SPLITS))}")
    split = _SPLITS[kind]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split is None}
    first = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    steps = byte_level if split is None else {"type": "Sequence", "pretokenizers": [first, byte_level]}
    model = _bpe(tokens, _merges(file, tokens, None)) | {"ignore_merges": split == _LLAMA3}
    return {
        "normalizer": None,
        "pre_tokenizer": steps,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model | {"continuing_subword_prefix": "", "end_of_word_suffix": ""},
    }


def _sentencepiece(file: GgufFile, tokens: Sequence[str]) -> dict[str, Any]:
    """Llama 2's: a space before the first word, and the pieces' scores say which merge goes first."""
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    scores = dict(zip(tokens, file.metadata.get("tokenizer.ggml.scores", ()), strict=False))
    split = {"type": "Metaspace", "replacement": _SPACE, "split": False}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": None,
        "pre_tokenizer": split | {"prepend_scheme": "first" if prefix else "never"},
        "decoder": {"type": "Sequence", "decoders": [*_SPACES_BACK, *strip]},
        "model": _bpe(tokens, _merges(file, tokens, scores)) | _with_bytes(file, tokens),
    }


def _gemma(file: GgufFile, tokens: Sequence[str]) -> dict[str, Any]:
    """Gemma's: no space before the first word; merges go by the order of the tokens, not by their scores."""
    respelled = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    order = {token: -index for index, token in enumerate(respelled)}
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "decoder": {"type": "Sequence", "decoders": _SPACES_BACK},
        "model": _bpe(respelled, _merges(file, respelled, order)) | _with_bytes(file, tokens),
    }


_SPACES_BACK = [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]


def _with_bytes(file: GgufFile, tokens: Sequence[str]) -> dict[str, Any]:
    """What is in no piece is spelled in bytes, and were a byte missing, as the unknown token."""
    unknown = special_tokens(file).get("unk_token_id")
    return {"unk_token": None if unknown is None else tokens[unknown], "fuse_unk": True, "byte_fallback": True}


def _bpe(tokens: Sequence[str], merges: Iterable[Sequence[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": list(merges),
    }


def _merges(file: GgufFile, tokens: Sequence[str], priorities: Mapping[str, float] | None) -> Iterable[Sequence[str]]:
    """The file's merges; without any, all pairs of tokens that make a token, those of the highest priority first."""
    stated: Sequence[str] | None = file.metadata.get("tokenizer.ggml.merges")
    if stated is not None:
        return [merge.split(" ") for merge in stated]
    if not priorities:
        raise file.unusable("its tokenizer has neither merges nor scores")
    ids = {token: index for index, token in enumerate(tokens)}
    pairs = [(priority, *pair) for token, priority in priorities.items() for pair in _halves(token, ids)]
    pairs.sort(key=lambda pair: (pair[0], len(pair[1]), len(pair[2])), reverse=True)
    return [pair[1:] for pair in pairs]


def _halves(token: str, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The ways to put a token together from two, by their ids."""
    cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
    return sorted(
        (pair for pair in cuts if pair[0] in ids and pair[1] in ids), key=lambda pair: (ids[pair[0]], ids[pair[1]])
    )


def _post_processor(file: GgufFile, named: Mapping[str, str]) -> dict[str, Any]:
    """Puts the tokens that begin and end a text where the file says so, or where llama.cpp would by itself."""
    by_itself = (
        file.metadata["tokenizer.ggml.model"] == "llama" or _SPLITS[file.metadata["tokenizer.ggml.pre"]] == _LLAMA3
    )
    begins = file.metadata.get("tokenizer.ggml.add_bos_token", by_itself) and "bos_token" in named
    ends = file.metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in named
    first = [named["bos_token"]] if begins else []
    last = [named["eos_token"]] if ends else []

    def around(which: str, type_id: int) -> list[dict[str, Any]]:
        def mark(token: str) -> dict[str, Any]:
            return {"SpecialToken": {"id": token, "type_id": type_id}}

        return [*map(mark, first), {"Sequence": {"id": which, "type_id": type_id}}, *map(mark, last)]

    ids = special_tokens(file)
    tokens = [(named[name], ids[f"{name}_id"]) for name, used in (("bos_token", first), ("eos_token", last)) if used]
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]} for token, index in tokens},
    }
