"""When a sequence ends: stop tokens, stop strings in its text, or the model's end-of-sequence ids (S8, S9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import AutoTokenizer

from openrl.errors import BadRequest

# A byte-level tokenizer may split one character over tokens; until the rest comes, its decoder shows U+FFFD.
_UNFINISHED = "\ufffd"
# UTF-8 needs at most 4 bytes and a token holds at least one: a U+FFFD still there after more is in the text for good.
_PATIENCE = 4
# Tokens of the prompt that are decoded with the first new ones: many decoders drop the space before a lone word.
_CONTEXT = 5

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


class Decoder(Protocol):
    """Turns token ids into text; a tokenizer."""

    def __call__(self, ids: list[int]) -> str: ...


class StopWatch(Protocol):
    """Sees the tokens of one sequence in order."""

    def push(self, token: int) -> bool:
        """Whether the sequence ends with `token`."""
        ...


@dataclass(frozen=True, slots=True)
class TokenStop:
    """Ends at any of `ids`; holds no state, so that one serves all sequences of a request."""

    ids: frozenset[int]

    def push(self, token: int) -> bool:
        return token in self.ids


class TextStop:
    """Ends with the token that completes one of `strings` in the detokenised text.

    Only a few tokens are decoded each time: those since the text was last known to end on a whole character, after
    a few that came before and settle the spacing.
    """

    def __init__(self, strings: Sequence[str], decode: Decoder, prompt: Sequence[int]) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        self._ids = list(prompt[-_CONTEXT:])
        self._settled = len(self._ids)  # ids before this have their text in `_tail` or are too old to matter
        self._before = decode(self._ids).rstrip(_UNFINISHED) if self._ids else ""
        self._tail = ""
        self._reach = max(len(s) for s in strings) - 1

    def push(self, token: int) -> bool:
        self._ids.append(token)
        text = self._decode(self._ids)
        whole = text.rstrip(_UNFINISHED)
        settled = len(whole) == len(text) or len(self._ids) - self._settled > _PATIENCE
        seen = self._tail + (text if settled else whole)[len(self._before) :]
        if settled:
            self._settle(seen)
        return any(s in seen for s in self._strings)

    def _settle(self, seen: str) -> None:
        """Keep what a stop string may still begin in, and the newest tokens as context for the next ones."""
        self._tail = seen[len(seen) - min(self._reach, len(seen)) :]
        self._ids = self._ids[self._settled :]
        self._settled = len(self._ids)
        self._before = self._decode(self._ids)


class Stops:
    """Makes the stop rules of requests; reads the tokenizer of `folder` when the first stop string comes."""

    def __init__(self, folder: Path, eos_ids: frozenset[int]) -> None:
        self._folder = folder
        self._eos = TokenStop(eos_ids)
        self._decoder: Decoder | None = None

    def check(self, stop: tuple[str, ...] | tuple[int, ...] | None) -> None:
        """Raises BadRequest for stops that cannot work, so that `watch` cannot fail later."""
        strings = [s for s in stop or () if isinstance(s, str)]
        if "" in strings:
            raise BadRequest("stop: an empty string would end every sequence.", "Leave it out, or use stop=[].")
        if strings:
            self._load()

    def watch(self, stop: tuple[str, ...] | tuple[int, ...] | None, prompt: Sequence[int]) -> StopWatch:
        """A watch for one sequence after `prompt`: None means the model's end-of-sequence ids, empty means never."""
        if stop is None:
            return self._eos
        strings = [s for s in stop if isinstance(s, str)]
        if strings:
            return TextStop(strings, self._load(), prompt)
        return TokenStop(frozenset(int(i) for i in stop))

    def _load(self) -> Decoder:
        if self._decoder is None:
            if not any((self._folder / name).exists() for name in _TOKENIZER_FILES):
                raise BadRequest("stop: strings need a tokenizer, and this model has none.", "Give token ids instead.")
            tokenizer = AutoTokenizer.from_pretrained(self._folder)

            def decode(ids: list[int]) -> str:
                return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

            self._decoder = decode
        return self._decoder
