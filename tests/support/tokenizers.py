"""Small tokenizers made on the fly with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXT = "the cat sat on the mat, and the dog ate the hat. Grüße aus Köln: 日本語のテキスト 🙂🙃 \n\nStop here"


def save_byte_tokenizer(folder: Path, vocab: int = 97) -> Callable[[list[int]], str]:
    """A byte-level tokenizer of at most `vocab` ids (ids past its own decode to nothing); returns its decode."""
    letters = [chr(c) for c in range(32, 127)]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters[:vocab])}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return _save(tokenizer, folder)


def save_bpe_tokenizer(folder: Path) -> Callable[[list[int]], str]:
    """Byte-level BPE as of GPT-2 and Qwen: one character may be split over tokens, words carry their space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    return _save(tokenizer, folder)


def save_metaspace_tokenizer(folder: Path) -> Callable[[list[int]], str]:
    """SentencePiece style as of Llama 2 and Gemma: ▁ for spaces, <0xNN> for bytes, the first space is dropped."""
    pieces = ["<unk>", "▁the", "▁cat", "s", "▁sat", "▁", "!", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save(tokenizer, folder)


def _save(tokenizer: Tokenizer, folder: Path) -> Callable[[list[int]], str]:
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
