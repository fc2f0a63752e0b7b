"""Kinds of setting values: how text from a flag or a variable becomes a value, and which values are legal.

`parse` takes what a source holds (text, or a TOML value) and raises ValueError, with what is wrong, if it is not legal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class ValueKind(Protocol):
    """What a setting's value may be."""

    def parse(self, raw: object) -> object: ...

    @property
    def legal(self) -> str:
        """The legal values, as a part of a sentence."""
        ...


@dataclass(frozen=True, slots=True)
class Integer:
    low: int
    high: int

    def parse(self, raw: object) -> int:
        value = int(raw) if isinstance(raw, str) else raw
        if not isinstance(value, int) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise ValueError
        return value

    @property
    def legal(self) -> str:
        return f"a whole number from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Number:
    low: float
    high: float

    def parse(self, raw: object) -> float:
        value = float(raw) if isinstance(raw, str) else raw
        if not isinstance(value, int | float) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise ValueError
        return float(value)

    @property
    def legal(self) -> str:
        return f"a number of at least {self.low:g}" + ("" if math.isinf(self.high) else f" and at most {self.high:g}")


@dataclass(frozen=True, slots=True)
class Choice:
    values: tuple[str, ...]

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str) or raw not in self.values:
            raise ValueError
        return raw

    @property
    def legal(self) -> str:
        return f"one of {', '.join(self.values)}"


@dataclass(frozen=True, slots=True)
class Text:
    """A word or sentence that matches `pattern` as a whole; `words` says the same for a person."""

    pattern: str
    words: str

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str) or not re.fullmatch(self.pattern, raw):
            raise ValueError
        return raw

    @property
    def legal(self) -> str:
        return self.words


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder, which is made when it is missing. `~` is the home folder."""

    def parse(self, raw: object) -> Path:
        if not isinstance(raw, str | Path) or not str(raw):
            raise ValueError
        path = Path(raw).expanduser().absolute()
        if path.exists() and not path.is_dir():
            raise ValueError
        return path

    @property
    def legal(self) -> str:
        return "a folder (made if it is missing)"


@dataclass(frozen=True, slots=True)
class File:
    """A file, which may come later: whoever reads it says so if it is not there. `~` is the home folder."""

    words: str

    def parse(self, raw: object) -> Path:
        if not isinstance(raw, str | Path) or not str(raw) or Path(raw).expanduser().is_dir():
            raise ValueError
        return Path(raw).expanduser().absolute()

    @property
    def legal(self) -> str:
        return self.words


@dataclass(frozen=True, slots=True)
class Names:
    """A list of words; as text they are separated by commas."""

    words: str

    def parse(self, raw: object) -> tuple[str, ...]:
        values = _split(raw) if isinstance(raw, str) else raw
        if not isinstance(values, list | tuple) or not values or not all(isinstance(v, str) and v for v in values):
            raise ValueError
        return tuple(str(value) for value in values)

    @property
    def legal(self) -> str:
        return self.words


@dataclass(frozen=True, slots=True)
class Pairs:
    """NAME=VALUE pairs: a table in TOML, a list of texts from flags, one text with commas from a variable."""

    words: str

    def parse(self, raw: object) -> dict[str, str]:
        if isinstance(raw, Mapping):
            pairs = list(raw.items())
        else:
            texts = _split(raw) if isinstance(raw, str) else raw
            if not isinstance(texts, list | tuple):
                raise ValueError
            pairs = [tuple(str(text).split("=", 1)) for text in texts]
        if any(len(pair) != 2 or not all(isinstance(part, str) and part for part in pair) for pair in pairs):
            raise ValueError
        return {str(pair[0]).strip(): str(pair[1]).strip() for pair in pairs}

    @property
    def legal(self) -> str:
        return self.words


@dataclass(frozen=True, slots=True)
class Weights:
    """PATTERN=WEIGHT pairs in order, given as `Pairs` are; in a TOML table the weights may also be numbers."""

    def parse(self, raw: object) -> dict[str, float]:
        if isinstance(raw, Mapping):
            raw = {name: str(value) if isinstance(value, int | float) else value for name, value in raw.items()}
        weights = {pattern: float(weight) for pattern, weight in Pairs("").parse(raw).items()}
        if not all(0 < weight < math.inf for weight in weights.values()):
            raise ValueError
        return weights

    @property
    def legal(self) -> str:
        return "PATTERN=WEIGHT pairs, weights above 0"


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
