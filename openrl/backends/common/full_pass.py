"""The micro-batches of a request that trains all parameters.

Gradients go straight into the request's own buffer, so that no second set of them is ever held. When memory runs out
in the middle, the request begins anew with an empty one and less at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from openrl.backends.common.work import Accumulator, Row, Work
from openrl.errors import OutOfMemory

T = TypeVar("T", bound=Accumulator)


class Engine(Protocol[T]):
    """What computes a micro-batch."""

    def limit(self, longest: int, most: int) -> int:
        """Tokens with padding, `most` or fewer, that one may have where memory allows no more."""
        ...

    def do(self, work: Work[T], rows: list[Row[T]], *, sparing: bool) -> None:
        """Forward and back, with results and gradient left with `work`; `sparing`: with the least memory."""
        ...

    def wipe(self, work: Work[T]) -> None:
        """Make what the request has of a gradient zero, and give unused memory back."""
        ...

    def is_out_of_memory(self, error: RuntimeError | MemoryError) -> bool:
        """Whether an allocation that failed is behind an error."""
        ...


def attempts(engine: Engine[T], work: Work[T], max_batch_tokens: int) -> Iterator[bool]:
    """Go through a request's micro-batches, anew with less at a time when memory runs out; whether more follow.

    The last try holds one datum at a time and keeps of each layer only its input.
    """
    rows = [Row(work, index) for index in range(len(work.item.payload.data))]
    longest = max((row.tokens for row in rows), default=1)
    limit, sparing = engine.limit(longest, max_batch_tokens), False
    while work.error is None:
        batches = _padded(rows, limit)
        try:
            for number, batch in enumerate(batches, start=1):
                if work.error is not None:
                    return
                engine.do(work, batch, sparing=sparing)
                yield number < len(batches)
            return
        except (RuntimeError, MemoryError) as error:
            if not engine.is_out_of_memory(error):
                raise
        # Outside the handler, where the traceback no longer holds the tensors that did not fit.
        work.logprobs.clear()
        work.losses.clear()
        engine.wipe(work)
        if sparing and all(len(batch) == 1 for batch in batches):
            first = batches[0][0]
            work.error = OutOfMemory(f"the device ran out of memory on data[{first.index}] ({first.tokens} tokens).")
            return
        limit, sparing = (limit // 2 if sparing else limit), True


def _padded(rows: Sequence[Row[T]], max_tokens: int) -> list[list[Row[T]]]:
    """Micro-batches of at most `max_tokens` tokens with their padding, or of one row; the longest first, so that the
    largest need of memory shows at the start."""
    batches: list[list[Row[T]]] = []
    for row in sorted(rows, key=lambda row: row.tokens, reverse=True):
        if not batches or (len(batches[-1]) + 1) * batches[-1][0].tokens > max_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches
