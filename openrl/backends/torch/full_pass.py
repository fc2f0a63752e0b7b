"""A pass of a run that trains all parameters: forward, losses and backward, a micro-batch at a time.

Gradients go straight into the request's own buffer, parameter by parameter, so that no second set of them is ever
held. The buffer reaches the run only when all of the request has worked (G6); when memory runs out in the middle, the
request begins anew with an empty one and smaller micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from openrl.backends.common.spans import Judge, Span
from openrl.backends.common.work import Outcome, Row, Verdicts, Work
from openrl.backends.torch.full_memory import FullSizes
from openrl.backends.torch.full_model import FullModel
from openrl.backends.torch.head import Head, HeadGradient
from openrl.backends.torch.lora import Adapter
from openrl.backends.torch.memory import free_memory, is_out_of_memory
from openrl.backends.torch.memory_plan import MemoryPlan, plan
from openrl.backends.torch.trainable import State
from openrl.errors import OutOfMemory
from openrl.types import RequestId


class FullPass:
    """Runs requests on one model. `max_batch_tokens` bounds a micro-batch with its padding."""

    def __init__(self, model: FullModel, max_batch_tokens: int) -> None:
        self._model = model
        self._sizes = FullSizes.of(model.scorer.config.to_dict(), model.dtype.itemsize)
        self._head = Head(model.scorer)
        self._max_batch_tokens = max_batch_tokens

    def run(self, work: Work[State]) -> Iterator[dict[RequestId, Outcome]]:
        """Yields after each micro-batch, with the outcome after the last one."""
        request = work.item.request
        try:
            with self._model.scoring():
                for unfinished in self._tries(work):
                    if unfinished:
                        yield {}
        finally:
            self._head.clear()
            if work.error is not None and work.gradient is not None:
                work.trainable.take_back(work.gradient)
        yield {request: work.finish()}

    def _tries(self, work: Work[State]) -> Iterator[bool]:
        """Go through the request's micro-batches, anew with less at a time when memory runs out; whether more follow.

        The last try holds one datum at a time and keeps of each layer only its input.
        """
        memory = self._memory()
        limit, sparing = memory.limit(self._max_batch_tokens), False
        while True:
            batches = _padded([Row(work, i) for i in range(len(work.item.payload.data))], limit)
            try:
                for number, rows in enumerate(batches, start=1):
                    if work.error is not None:
                        return
                    tokens = len(rows) * rows[0].tokens
                    self._do(work, rows, self._sizes.layers if sparing else memory.recomputed(tokens))
                    yield number < len(batches)
                return
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            self._begin_anew(work)
            longest = batches[0][0]
            if sparing and all(len(rows) == 1 for rows in batches):
                work.error = OutOfMemory(
                    f"the device ran out of memory on data[{longest.index}] ({longest.tokens} tokens)."
                )
                return
            limit, sparing = (limit // 2 if sparing else limit), True

    def _begin_anew(self, work: Work[State]) -> None:
        work.logprobs.clear()
        work.losses.clear()
        if work.gradient is not None:
            work.gradient.zero_()
        self._head.clear()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _memory(self) -> MemoryPlan:
        """What this pass may take of the memory that is free now."""
        weights = self._model.state.theta.nbytes
        gradients = 4 * self._model.state.theta.numel()  # the request's own, if it is not there yet
        free = free_memory(self._model.device) - gradients
        return plan(self._sizes, max(0, free), weights, adapters=0, gpu=self._model.device.type == "cuda")

    def _do(self, work: Work[State], rows: list[Row[State]], recomputed: int) -> None:
        if work.item.backward and work.gradient is None:
            work.gradient = work.trainable.fresh()
        verdicts = Verdicts(rows)
        self._differentiate(rows, verdicts, work.gradient, recomputed)
        verdicts.record()

    def _differentiate(self, rows: list[Row[State]], judge: Judge, into: Tensor | None, recomputed: int) -> None:
        """Ask `judge` for each datum's gradient, and add what follows from it to `into`."""
        ids, real = _padded_ids(rows, self._model.device)
        with torch.set_grad_enabled(into is not None):
            hidden = self._model.hidden(ids, recomputed)[real]
        spans: list[Span[Adapter]] = [Span(None, row.targets) for row in rows]
        if into is None:
            self._score(hidden, spans, judge, None)
            return
        views = self._model.state.views(into)
        head = self._score(hidden, spans, judge, views[self._model.head_name])
        if head.touched:
            with self._model.adding_to(views):
                torch.autograd.backward(hidden, head.hidden)

    def _score(self, hidden: Tensor, spans: Sequence[Span[Adapter]], judge: Judge, into: Tensor | None) -> HeadGradient:
        with torch.no_grad():
            return self._head.run(hidden.detach(), spans, judge, backward=into is not None, into=into)


def _padded(rows: Sequence[Row[State]], max_tokens: int) -> list[list[Row[State]]]:
    """Micro-batches of at most `max_tokens` tokens with their padding, or of one row; the longest first, so that the
    largest need of memory shows at the start."""
    batches: list[list[Row[State]]] = []
    for row in sorted(rows, key=lambda row: row.tokens, reverse=True):
        if not batches or (len(batches[-1]) + 1) * batches[-1][0].tokens > max_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def _padded_ids(rows: Sequence[Row[State]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids int64 [rows, longest], padded on the right, and which of them are real."""
    width = max(row.tokens for row in rows)
    ids, real = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.bool_)
    for index, row in enumerate(rows):
        ids[index, : row.tokens], real[index, : row.tokens] = row.datum.tokens, True
    return torch.from_numpy(ids).to(device), torch.from_numpy(real).to(device)
