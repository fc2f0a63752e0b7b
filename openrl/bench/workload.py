"""What the benchmark works on: the same random tokens for both sides. Their content does not change the speed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Workload:
    """`batches` are training batches by name, each a tuple of sequences; `prompts` are for sampling, all of one length.

    Prompts of one length are in the favour of `model.generate`, which would have to pad them otherwise.
    """

    batches: dict[str, tuple[Tokens, ...]]
    prompts: tuple[Tokens, ...]
    new_tokens: int


def make(vocabulary: int, seed: int = 0) -> Workload:
    """Short sequences as a small task has them, and mixed lengths as chats have them."""
    rng = np.random.default_rng(seed)

    def sequence(length: int) -> Tokens:
        return rng.integers(3, vocabulary, length, dtype=np.int32)

    short = tuple(sequence(int(length)) for length in rng.integers(40, 61, 32))
    mixed = tuple(sequence(int(length)) for length in rng.integers(32, 257, 12))
    prompts = tuple(sequence(32) for _ in range(32))
    return Workload({"32 x 40-60 tokens": short, "12 x 32-256 tokens": mixed}, prompts, new_tokens=32)


def trained_tokens(batch: tuple[Tokens, ...]) -> int:
    """Input tokens of a batch: a sequence's last token is only a target."""
    return sum(len(tokens) - 1 for tokens in batch)
