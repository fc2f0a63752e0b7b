"""The order of one run's requests: a cursor over `seq`, and what has arrived ahead of it (4.8)."""

from __future__ import annotations

from typing import Generic, TypeVar

E = TypeVar("E")


class RunQueue(Generic[E]):
    """Requests by number. The head is ready when its number equals the cursor; later ones wait for the hole to fill.

    A number can also be used up without work (a refused request, O5); the cursor steps over it.
    """

    def __init__(self, next_seq: int) -> None:
        self.next_seq = next_seq
        self._waiting: dict[int, E | None] = {}

    def push(self, seq: int, entry: E) -> None:
        """Add a request that is to be run."""
        self._waiting[seq] = entry

    def use_up(self, seq: int) -> None:
        """Take a number out of the order without running anything for it."""
        if seq >= self.next_seq:
            self._waiting[seq] = None
            self._step_over()

    def head(self) -> E | None:
        """The request whose turn it is, if it has arrived."""
        return self._waiting.get(self.next_seq)

    def advance(self) -> None:
        """The head has ended."""
        del self._waiting[self.next_seq]
        self.next_seq += 1
        self._step_over()

    def after_head(self) -> int:
        """Where the cursor will stand once the head has ended."""
        seq = self.next_seq + 1
        while seq in self._waiting and self._waiting[seq] is None:
            seq += 1
        return seq

    @property
    def goes_on(self) -> bool:
        """Whether the request after the head has arrived."""
        return self._waiting.get(self.after_head()) is not None

    def waiting(self) -> list[E]:
        """All requests that have not ended, in order."""
        return [entry for _, entry in sorted(self._waiting.items()) if entry is not None]

    def clear(self) -> None:
        """Drop everything that waits, as when the run cannot go on; the cursor moves past it."""
        self.next_seq = max(self._waiting, default=self.next_seq - 1) + 1
        self._waiting.clear()

    @property
    def has_gap(self) -> bool:
        """Whether something waits while the number before it is missing."""
        return bool(self._waiting) and self.next_seq not in self._waiting

    def __len__(self) -> int:
        return sum(entry is not None for entry in self._waiting.values())

    def _step_over(self) -> None:
        while self.next_seq in self._waiting and self._waiting[self.next_seq] is None:
            del self._waiting[self.next_seq]
            self.next_seq += 1
