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

from openrl.backends.common.full_pass import attempts
from openrl.backends.common.spans import Judge, Span
from openrl.backends.common.work import Outcome, Row, Verdicts, Work
from openrl.backends.torch.full_memory import FullSizes
from openrl.backends.torch.full_model import FullModel
from openrl.backends.torch.head import Head, HeadGradient
from openrl.backends.torch.lora import Adapter
from openrl.backends.torch.memory import free_memory, is_out_of_memory
from openrl.backends.torch.memory_plan import MemoryPlan, plan
from openrl.backends.torch.trainable import State
from openrl.types import RequestId


class FullPass:
    """Runs requests on one model. `max_batch_tokens` bounds a micro-batch with its padding."""

    def __init__(self, model: FullModel, max_batch_tokens: int) -> None:
        self._model = model
        self._sizes = FullSizes.of(model.scorer.config.to_dict(), model.dtype.itemsize)
        self._head = Head(model.scorer)
        self._max_batch_tokens = max_batch_tokens
        self._plan: MemoryPlan | None = None  # of the pass in hand

    def run(self, work: Work[State]) -> Iterator[dict[RequestId, Outcome]]:
        """Yields after each micro-batch, with the outcome after the last one."""
        request = work.item.request
        try:
            with self._model.scoring():
                for unfinished in attempts(self, work, self._max_batch_tokens):
                    if unfinished:
                        yield {}
        finally:
            self._head.clear()
            if work.error is not None and work.gradient is not None:
                work.trainable.take_back(work.gradient)
        yield {request: work.finish()}

    def limit(self, longest: int, most: int) -> int:
        """See `openrl.backends.common.full_pass.Engine`."""
        self._plan = self._memory()
        return self._plan.limit(most)

    def do(self, work: Work[State], rows: list[Row[State]], *, sparing: bool) -> None:
        """One micro-batch, there and back."""
        tokens = len(rows) * rows[0].tokens
        recomputed = self._sizes.layers if sparing or self._plan is None else self._plan.recomputed(tokens)
        if work.item.backward and work.gradient is None:
            work.gradient = work.trainable.fresh()
        verdicts = Verdicts(rows)
        self._differentiate(rows, verdicts, work.gradient, recomputed)
        verdicts.record()

    def wipe(self, work: Work[State]) -> None:
        """Begin anew with an empty gradient."""
        if work.gradient is not None:
            work.gradient.zero_()
        self._head.clear()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def is_out_of_memory(self, error: RuntimeError | MemoryError) -> bool:
        """Whether an allocation that failed is behind an error."""
        return is_out_of_memory(error)

    def _memory(self) -> MemoryPlan:
        """What this pass may take of the memory that is free now."""
        weights = self._model.state.theta.nbytes
        gradients = 4 * self._model.state.theta.numel()  # the request's own, if it is not there yet
        free = free_memory(self._model.device) - gradients
        return plan(self._sizes, max(0, free), weights, adapters=0, gpu=self._model.device.type == "cuda")

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


def _padded_ids(rows: Sequence[Row[State]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids int64 [rows, longest], padded on the right, and which of them are real."""
    width = max(row.tokens for row in rows)
    ids, real = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.bool_)
    for index, row in enumerate(rows):
        ids[index, : row.tokens], real[index, : row.tokens] = row.datum.tokens, True
    return torch.from_numpy(ids).to(device), torch.from_numpy(real).to(device)
