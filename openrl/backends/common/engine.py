"""What the sampler asks of an engine: a cache of slots, a store of blocks, and forward passes that end in drawn tokens.

`openrl.backends.common.sampler` decides what is computed when; an engine computes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from openrl.backends.common.prefill import Prefix
from openrl.backends.common.prefix_cache import Claim
from openrl.backends.common.sequences import Sequence, TopRow


@dataclass(frozen=True, slots=True)
class Token:
    """One drawn token of a sequence."""

    id: int
    logprob: float
    top: TopRow | None

    @property
    def sane(self) -> bool:
        """False when the logits were not finite, because weights or sums broke."""
        return math.isfinite(self.logprob)


class Rows(Protocol):
    """The KV cache: slots that hold one sequence each from column 0."""

    def fits(self, slots: int, length: int) -> bool:
        """Whether `slots` sequences of `length` tokens can be held at all."""
        ...

    def holds(self, slots: int, length: int) -> bool:
        """Whether there is room for that now."""
        ...

    def wipe(self, slot: int) -> None:
        """Zero a slot that may hold non-finite values."""
        ...


class Store(Protocol):
    """Blocks of keys and values of earlier requests, by number."""

    def reserve(self, count: int, most: int) -> None:
        """Make room for blocks 1..`count`, of which there will never be more than `most`."""
        ...

    def clear(self) -> None:
        """Give all memory back."""
        ...


class Engine(Protocol):
    """Runs a model for the sampler and owns its KV cache."""

    @property
    def kv(self) -> Rows: ...

    @property
    def blocks(self) -> Store: ...

    @property
    def intact(self) -> bool:
        """False after running out of memory in the middle of writing to the cache: what it holds is lost."""
        ...

    def scope(self) -> AbstractContextManager[object]:
        """Entered around each turn."""
        ...

    def place(self, sequences: Items[Sequence], tail: Sequence | None, length: int) -> list[Sequence]:
        """Give every sequence a slot, those of one adapter side by side, and `tail` a slot behind them.

        Sequences that have one keep what it holds. There will be `length` columns. Returns the order of the slots.
        """
        ...

    def clear(self) -> None:
        """Forget everything that the cache holds; it is intact again."""
        ...

    def compute(self, prefixes: Items[Prefix], claims: Items[Claim]) -> None:
        """Whole prefixes in one pass: their ends, scores and, for members that have a slot, keys and values.

        `claims` says, for each prefix, which stored blocks to fill with its keys and values.
        """
        ...

    def compute_part(self, prefix: Prefix, count: int) -> None:
        """The next `count` tokens of a prefix whose first member has a slot."""
        ...

    def fork(self, source: Sequence, members: Items[Sequence], length: int) -> None:
        """Copy the first `length` columns of one sequence to others that begin with the same tokens."""
        ...

    def keep(self, claims: Items[tuple[Sequence, Claim]]) -> None:
        """Fill stored blocks with the beginnings of sequences that have a slot."""
        ...

    def decode(self, live: list[Sequence]) -> list[Token]:
        """Compute the newest token of all live sequences, in their slots' order, and draw the next of each."""
        ...

    def draw(self, sequences: Items[Sequence], ends: Items[Any]) -> list[Token]:
        """Draw each sequence's next token from the hidden state of its last one."""
        ...

    def is_out_of_memory(self, error: RuntimeError) -> bool:
        """Whether the engine raised this because memory ran out."""
        ...

    def release(self) -> None:
        """Give memory that is held without use back to the device, after it ran out."""
        ...


def set_end(prefix: Prefix, hidden: Any) -> None:
    """Note the hidden state of a prefix's last token, for the draws that go on from it."""
    prefix.end = hidden
    if not prefix.members[0].begun:
        for job in prefix.jobs:
            job.end = hidden
