"""One pass: forward, loss and backward over the datums of several runs' requests, in micro-batches of like lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from openrl.backends.common.batches import cut_padded
from openrl.backends.common.micro_batches import MicroBatch, attempts
from openrl.backends.common.work import Outcome, Row, Verdicts, Work, neighbours, report, rows_of
from openrl.backends.mps.gradient import Batch, Example, differentiate
from openrl.backends.mps.head import Head
from openrl.backends.mps.memory import free_memory, is_out_of_memory
from openrl.backends.mps.model import MlxModel
from openrl.backends.mps.trainable import Trainable
from openrl.types import RequestId

MlxWork = Work[Trainable]
MlxRow = Row[Trainable]
MlxBatch = MicroBatch[Trainable]


class PassRunner:
    """Runs passes on one model. `max_batch_tokens` bounds a micro-batch with its padding; free memory may bound it
    further."""

    def __init__(self, model: MlxModel, max_batch_tokens: int) -> None:
        self._model = model
        self._head = Head(model)
        self._plan = model.memory_plan
        self._max_batch_tokens = max_batch_tokens

    def run(self, works: Sequence[MlxWork]) -> Iterator[dict[RequestId, Outcome]]:
        """Yields after each micro-batch what was finished since; raises only for faults that are not a request's."""
        free = free_memory()
        for _ in attempts(self._batches(works, free), lambda batch: self._attempt(batch, free)):
            yield report(works)
        if not all(work.reported for work in works):
            yield report(works)

    def _batches(self, works: Sequence[MlxWork], free: int) -> list[MlxBatch]:
        """Requests that only go forward are apart from the others, since they need no graph."""
        batches: list[MlxBatch] = []
        for backward in (True, False):
            rows = rows_of(works, backward=backward)
            longest = max((row.tokens for row in rows), default=1)
            most = self._plan.tokens(longest, free, self._max_batch_tokens)
            cut = cut_padded(rows, lambda row: row.tokens, lambda row: id(row.work), most)
            batches += [MicroBatch(part) for part in cut]
        return batches

    def _attempt(self, batch: MlxBatch, free: int) -> list[MlxBatch]:
        """Do a micro-batch; returns what is to be done in its place, if memory ran out."""
        keep = not batch.sparing and self._plan.keeps(len(batch.rows), batch.longest, free)
        try:
            self._do(neighbours(batch.rows), keep=keep)
            return []
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        mx.clear_cache()
        return batch.smaller(spared=not keep)

    def _do(self, rows: list[MlxRow], *, keep: bool) -> None:
        """Forward, losses and backward. Results are recorded once all of it has worked, so that it can be repeated."""
        verdicts = Verdicts(rows)
        batch = Batch([Example(row.datum.tokens, row.targets, row.work.trainable.adapter) for row in rows])
        backward = rows[0].work.item.backward
        gradients = differentiate(self._model, self._head, batch, verdicts, backward=backward, keep=keep)
        verdicts.record()
        for work in {id(row.work): row.work for row in rows}.values():
            work.add(gradients.get(id(work.trainable.adapter), {}))
