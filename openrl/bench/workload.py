"""What the benchmark works on: the same random tokens for all sides. Their content does not change the speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Example:
    """A sequence to train on: the first `masked` predictions do not count."""

    tokens: Tokens
    masked: int = 0

    @property
    def length(self) -> int:
        """Input tokens: the last one is only a target."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Size:
    """How much work the parts do: counts of sequences, and lengths in tokens."""

    mixed: tuple[int, int, int] = (64, 32, 512)  # trained sequences, and their least and greatest length
    short: int = 32  # short trained sequences
    shared: tuple[int, int] = (16, 512)  # samples of a shared prompt, and its length
    seconds: float = 30.0  # that each number of jobs is measured for
    behind: tuple[int, int] = (16, 256)  # trained sequences and their length, beside which small requests are timed
    flood: int = 512  # samples that come at once


FULL = Size()
SMALL = Size(mixed=(8, 32, 96), short=4, shared=(8, 64), seconds=10.0, behind=(2, 24), flood=64)


class Workload:
    """Random tokens for a vocabulary, the same for the same seed."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._rng = np.random.default_rng(seed)

    def sequence(self, length: int) -> Tokens:
        return self._rng.integers(3, self._vocabulary, length, dtype=np.int32)

    def prompts(self, count: int, length: int) -> list[Tokens]:
        """Of one length, which is in the favour of `model.generate`: it would have to pad them otherwise."""
        return [self.sequence(length) for _ in range(count)]

    def short(self, count: int = 32) -> list[Example]:
        """Sequences as a small task has them, every position trained."""
        return [Example(self.sequence(int(n))) for n in self._rng.integers(41, 62, count)]

    def mixed(self, count: int = 64, low: int = 32, high: int = 512) -> list[Example]:
        """Lengths from `low` to `high` as chats have them, the first half of each a prompt without a loss."""
        lengths = np.linspace(low, high, count).astype(int)
        self._rng.shuffle(lengths)
        return [Example(self.sequence(int(n) + 1), masked=int(n) // 2) for n in lengths]

    def even(self, count: int, length: int) -> list[Example]:
        """`count` sequences of `length` input tokens."""
        return [Example(self.sequence(length + 1)) for _ in range(count)]


def trained_tokens(batch: Sequence[Example]) -> int:
    """Input tokens of a batch."""
    return sum(example.length for example in batch)
