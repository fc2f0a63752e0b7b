"""The sizes of a cache of slots, and who is in which: arithmetic that engines share.

A slot holds one sequence from column 0, and live sequences fill slots 0, 1, ... without holes, so that decoding reads
plain slices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Items

from openrl.backends.common.sequences import Sequence, arrange

LENGTH_BLOCK = 64  # columns are added in multiples of this


class Rectangle(ABC):
    """A cache of slots * columns that is made larger and smaller with use, and whose slots can be copied.

    Holds at most `max_tokens` = slots * length, whatever part of the rectangle is in use: that is what memory pays for.
    """

    def __init__(self, max_slots: int, max_tokens: int) -> None:
        self._max_slots = max_slots
        self._max_tokens = max_tokens
        self.slots = 0
        self.length = 0

    def fits(self, slots: int, length: int) -> bool:
        """Whether `slots` sequences of `length` tokens can be held at all."""
        return slots * length <= self._max_tokens

    def holds(self, slots: int, length: int) -> bool:
        """Whether there is room for that now, without `reserve`."""
        return slots <= self.slots and length <= self.length

    def reserve(self, slots: int, length: int, used_slots: int, used_length: int) -> None:
        """Make room for `slots` * `length`, keeping what the first `used_slots` hold in `used_length` columns.

        The caller has checked `fits`. Grows to a power of two and a block, or as far as `max_tokens` lets it.
        """
        if not self.holds(slots, length):
            self._resize(*self._rounded(slots, length), used_slots, used_length)

    def shrink(self, slots: int, length: int) -> None:
        """Give memory back when only a small part is still used: the first `slots`, up to `length`."""
        if mostly_unused(slots, length, self.slots, self.length):
            self._resize(*self._rounded(slots, length), slots, length)

    def _rounded(self, slots: int, length: int) -> tuple[int, int]:
        limits = {"max_slots": self._max_slots, "max_tokens": self._max_tokens}
        return grown(slots, length, held_length=self.length, **limits)

    @abstractmethod
    def copy(self, moves: Items[tuple[int, int]], length: int) -> None:
        """Copy the first `length` columns of slots to others, (from, to), as if all at once: a slot may be both."""

    @abstractmethod
    def _resize(self, slots: int, length: int, used_slots: int, used_length: int) -> None:
        """Make the rectangle `slots` * `length`, keeping `used_length` columns of the first `used_slots`."""


def grown(slots: int, length: int, *, max_slots: int, max_tokens: int, held_length: int) -> tuple[int, int]:
    """The rectangle to make for `slots` * `length`: up to a power of two and a block, or as far as `max_tokens` lets
    it. `held_length` are the columns that there are."""
    wide = min(1 << (slots - 1).bit_length(), max_slots)
    long = -(-length // LENGTH_BLOCK) * LENGTH_BLOCK
    long = max(long, held_length) if wide * max(long, held_length) <= max_tokens else long
    if wide * long <= max_tokens:
        return wide, long
    # All that is left, rather than just enough, or every further token would move the whole cache.
    return slots, min(long, max_tokens // slots)


def mostly_unused(slots: int, length: int, held_slots: int, held_length: int) -> bool:
    """Whether `slots` * `length` is so small a part of what is held that giving memory back is worth the copying."""
    return 8 * slots * length <= held_slots * held_length > 8 * LENGTH_BLOCK


def place(kv: Rectangle, sequences: Items[Sequence], tail: Sequence | None, length: int) -> list[Sequence]:
    """See `Engine.place`."""
    everyone = [*sequences, tail] if tail else sequences
    held = [s for s in sequences if s.slot >= 0]
    kept = [*held, tail] if tail and tail.slot >= 0 else held
    used = min(kv.length, max((s.length for s in kept), default=0))
    if not kv.holds(len(everyone), length):
        _move(kv, held, tail if tail in kept else None, used, closed=True)
        kv.reserve(len(everyone), length, len(kept), used)
    order = _move(kv, sequences, tail, used, closed=False)
    kv.shrink(tail.slot + 1 if tail else len(order), length)
    return order


def _move(
    kv: Rectangle, sequences: Items[Sequence], tail: Sequence | None, used: int, *, closed: bool
) -> list[Sequence]:
    """`closed`: `tail` stands next to the others. Else it stays anywhere behind them, and if it has to move, then to
    the very end, so that it need not move again with each that joins."""
    order, moves = arrange(sequences)
    if tail is not None and (closed or tail.slot < len(order)):
        place = len(order) if closed else kv.slots - 1
        if tail.slot not in (-1, place):
            moves.append((tail.slot, place))
        tail.slot = place
    kv.copy(moves, used)
    return order


def spans(slots: Items[int]) -> list[slice]:
    """Runs of neighbours among ascending slots: a slice is copied in one go, an index element by element."""
    found: list[slice] = []
    for slot in slots:
        if found and found[-1].stop == slot:
            found[-1] = slice(found[-1].start, slot + 1)
        else:
            found.append(slice(slot, slot + 1))
    return found
