"""The micro-batches of a pass one after another, and what becomes of one for which memory does not suffice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from openrl.backends.common.work import Accumulator, Row
from openrl.errors import OutOfMemory

T = TypeVar("T", bound=Accumulator)


@dataclass(slots=True)
class MicroBatch(Generic[T]):
    """Datums that are computed together; `sparing`: memory ran out before, so keep nothing that can be recomputed."""

    rows: list[Row[T]]
    sparing: bool = False

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)

    @property
    def longest(self) -> int:
        return max(row.tokens for row in self.rows)

    def smaller(self, *, spared: bool, where: str = "the device") -> list[MicroBatch[T]]:
        """What to do in its place after memory ran out `where`: the same in two halves, sparingly.

        Where even one datum is too much, and was `spared` all that can be recomputed, its request fails.
        """
        if len(self.rows) > 1:
            middle = (len(self.rows) + 1) // 2
            return [MicroBatch(rows, sparing=True) for rows in (self.rows[:middle], self.rows[middle:])]
        if not spared:
            return [MicroBatch(self.rows, sparing=True)]
        row = self.rows[0]
        row.work.error = OutOfMemory(f"{where} ran out of memory on data[{row.index}] ({row.tokens} tokens).")
        return []


def attempts(
    batches: Iterable[MicroBatch[T]], attempt: Callable[[MicroBatch[T]], Sequence[MicroBatch[T]]]
) -> Iterator[None]:
    """Attempt one after another, without the datums of requests that have failed; yields after each. What an attempt
    leaves to do comes next."""
    queue = deque(batches)
    while queue:
        batch = queue.popleft()
        batch.rows = [row for row in batch.rows if row.work.error is None]
        if batch.rows:
            queue.extendleft(reversed(attempt(batch)))
            yield
