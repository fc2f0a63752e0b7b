"""A pass of a run that trains all parameters, in MLX (`openrl.backends.common.full_pass` goes through it).

The request's own gradient reaches the run only when all of the request has worked (G6).
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from openrl.backends.common.full_pass import attempts
from openrl.backends.common.spans import Span
from openrl.backends.common.work import Outcome, Row, Verdicts, Work
from openrl.backends.mps.full_gradient import differentiate
from openrl.backends.mps.full_model import FullModel
from openrl.backends.mps.full_state import FullState
from openrl.backends.mps.gradient import Padded
from openrl.backends.mps.head import Head
from openrl.backends.mps.lora import Adapter
from openrl.backends.mps.memory import free_memory, is_out_of_memory
from openrl.types import RequestId


class FullPass:
    """Runs requests on one model. `max_batch_tokens` bounds a micro-batch with its padding."""

    def __init__(self, model: FullModel, max_batch_tokens: int) -> None:
        self._model = model
        self._head = Head(model.scorer)
        self._plan = model.scorer.memory_plan
        self._max_batch_tokens = max_batch_tokens
        self._free = 0  # bytes for the pass in hand

    def run(self, work: Work[FullState]) -> Iterator[dict[RequestId, Outcome]]:
        """Yields after each micro-batch, with the outcome after the last one."""
        for unfinished in attempts(self, work, self._max_batch_tokens):
            if unfinished:
                yield {}
        yield {work.item.request: work.finish()}

    def limit(self, longest: int, most: int) -> int:
        """See `openrl.backends.common.full_pass.Engine`."""
        self._free = max(0, free_memory() - 4 * self._model.state.size)  # the request's own gradient
        return self._plan.tokens(longest, self._free, most)

    def do(self, work: Work[FullState], rows: list[Row[FullState]], *, sparing: bool) -> None:
        """One micro-batch, there and back."""
        if work.item.backward and work.gradient is None:
            work.gradient = {}
        verdicts = Verdicts(rows)
        batch = Padded([row.datum.tokens for row in rows])
        spans: list[Span[Adapter]] = [Span(None, row.targets) for row in rows]
        keep = not sparing and self._plan.keeps(len(rows), batch.longest, self._free)
        differentiate(self._model, self._head, batch, spans, verdicts, work.gradient, keep=keep)
        verdicts.record()

    def wipe(self, work: Work[FullState]) -> None:
        """Begin anew with an empty gradient."""
        work.gradient = None
        mx.clear_cache()

    def is_out_of_memory(self, error: RuntimeError | MemoryError) -> bool:
        """Whether an allocation that failed is behind an error."""
        return is_out_of_memory(error)
