"""One pass: forward, loss and backward over the datums of several runs' requests, in micro-batches.

A micro-batch is padded on the right and needs no attention mask: a causal model's real positions never see what
follows them (B2). Gradients of a micro-batch are taken all or none, and stay with their request until all of it
has succeeded, so a request that fails leaves no trace (G6).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from openrl.backends.base import TrainItem
from openrl.backends.torch.batches import cut, halves
from openrl.backends.torch.head import Head, Judge, Span
from openrl.backends.torch.joint import Casts
from openrl.backends.torch.lora import Adapter
from openrl.backends.torch.memory import free_memory, is_out_of_memory
from openrl.backends.torch.memory_plan import MemoryPlan, Sizes, plan
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.train_backbone import TrainBackbone
from openrl.backends.torch.trainable import Trainable
from openrl.checkpoints.peft import HEAD_NAME
from openrl.errors import BadRequest, OpenRLError, OutOfMemory
from openrl.losses import Loss
from openrl.types import Array, Datum, FloatArray, IntArray, RequestId, TrainOutput

Outcome = TrainOutput | OpenRLError
# The loss of one datum, from its logprobs (of the targets' shape) and its inputs. A `BadRequest` fails the request.
LossFn = Callable[[FloatArray, Mapping[str, Array]], Loss]


@dataclass(slots=True, eq=False)
class Work:
    """A request on its way through a pass: results of its datums by index, and its part of the gradient."""

    item: TrainItem
    trainable: Trainable
    loss: LossFn
    logprobs: dict[int, FloatArray] = field(default_factory=dict[int, FloatArray])
    losses: dict[int, Loss] = field(default_factory=dict[int, Loss])
    gradient: Tensor | None = None
    error: OpenRLError | None = None
    reported: bool = False

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.losses) == len(self.item.payload.data)

    def record(self, index: int, logprobs: FloatArray, loss: Loss | BadRequest) -> None:
        """Take a datum's result; one that could not be worked out or is not finite fails the request (L11)."""
        if isinstance(loss, BadRequest):
            self.error = self.error or BadRequest(f"data[{index}]: {loss.message}", loss.hint)
            return
        self.logprobs[index], self.losses[index] = logprobs, loss
        if not loss.finite:
            name = self.item.payload.loss_fn
            self.error = BadRequest(
                f"{name} of data[{index}] is not finite (value {loss.total}); no gradient of this request was kept.",
                "Check logprobs, advantages and weights: a probability ratio may have overflowed.",
            )

    def add(self, gradients: dict[str, Tensor]) -> None:
        """Add a micro-batch's gradient."""
        if not gradients:
            return
        if self.gradient is None:
            self.gradient = self.trainable.fresh()
        views = self.trainable.views(self.gradient)
        for name, part in gradients.items():
            views[name].add_(part)

    def finish(self) -> Outcome:
        """The outcome of a request that is done; a success moves its gradient into the run's accumulator."""
        self.reported = True
        if self.error is not None:
            return self.error
        if self.gradient is not None:
            self.trainable.give(self.gradient)
        order = range(len(self.losses))
        return TrainOutput(tuple(self.logprobs[i] for i in order), _metrics([self.losses[i] for i in order]))


@dataclass(frozen=True, slots=True)
class Row:
    """One datum of a request."""

    work: Work
    index: int

    @property
    def datum(self) -> Datum:
        return self.work.item.payload.data[self.index]

    @property
    def tokens(self) -> int:
        return len(self.datum.tokens)

    @property
    def adapter(self) -> Adapter:
        return self.work.trainable.adapter


@dataclass(slots=True)
class MicroBatch:
    """Datums that are computed together; `sparing`: memory ran out before, so keep nothing that can be recomputed."""

    rows: list[Row]
    sparing: bool = False

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)


class PassRunner:
    """Runs passes on one model. `max_batch_tokens` bounds a micro-batch; free memory may bound it further."""

    def __init__(self, model: CausalLM, max_batch_tokens: int) -> None:
        self._model = model
        self._sizes = Sizes.of(model.config.to_dict(), model.dtype.itemsize)
        self._backbone = TrainBackbone(model)
        self._head = Head(model)
        self._max_batch_tokens = max_batch_tokens

    def run(self, works: Sequence[Work]) -> Iterator[dict[RequestId, Outcome]]:
        """Yields after each micro-batch what was finished since; raises only for faults that are not a request's."""
        for work in works:
            if not work.item.payload.data:
                work.error = BadRequest("data is empty; a request needs at least one datum.")
        memory, casts = self._memory(works), Casts(self._model.dtype)
        queue = deque(self._batches(works, memory.limit(self._max_batch_tokens)))
        try:
            while queue:
                batch = queue.popleft()
                batch.rows = [row for row in batch.rows if row.work.error is None]
                if batch.rows:
                    queue.extendleft(reversed(self._attempt(batch, memory, casts)))
                    yield _report(works)
        finally:
            self._backbone.clear()
            self._head.clear()
        if not all(work.reported for work in works):
            yield _report(works)

    def _memory(self, works: Sequence[Work]) -> MemoryPlan:
        """What this pass may take of the memory that is free now."""
        device, model = self._model.device, self._model
        adapters = sum(work.trainable.theta.numel() for work in works)
        weights = model.parameters * model.dtype.itemsize
        return plan(self._sizes, free_memory(device), weights, adapters, gpu=device.type == "cuda")

    def _batches(self, works: Sequence[Work], max_tokens: int) -> list[MicroBatch]:
        """Requests that only go forward are apart from the others, since they need no graph."""
        batches: list[list[Row]] = []
        for backward in (True, False):
            chosen = [work for work in works if work.item.backward is backward]
            rows = [Row(work, index) for work in chosen for index in range(len(work.item.payload.data))]
            batches += cut(rows, lambda row: row.tokens, lambda row: id(row.adapter), max_tokens)
        return [MicroBatch(rows) for rows in batches]

    def _attempt(self, batch: MicroBatch, memory: MemoryPlan, casts: Casts) -> list[MicroBatch]:
        """Do a micro-batch; returns what is still to do, if memory ran out: the same in two halves, sparingly.

        Where even one datum is too much, its request fails.
        """
        try:
            self._do(batch.rows, casts, self._sizes.layers if batch.sparing else memory.recomputed(batch.tokens))
            return []
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        self._backbone.clear()
        self._head.clear()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(batch.rows) > 1:
            return [MicroBatch(rows, sparing=True) for rows in halves(batch.rows)]
        if not batch.sparing:
            return [MicroBatch(batch.rows, sparing=True)]
        row = batch.rows[0]
        row.work.error = OutOfMemory(f"the device ran out of memory on data[{row.index}] ({row.tokens} tokens).")
        return []

    def _do(self, rows: list[Row], casts: Casts, recomputed: int) -> None:
        """Forward, losses and backward, with so many layers computed again on the way back.

        Results are recorded once all of it has worked, so that it can be repeated.
        """
        first = {id(row.work): position for position, row in reversed(list(enumerate(rows)))}
        rows = sorted(rows, key=lambda row: first[id(row.work)])  # rows of one adapter become neighbours
        backward = rows[0].work.item.backward
        results: dict[int, tuple[FloatArray, Loss | BadRequest]] = {}

        def judge(index: int, logprobs: FloatArray) -> FloatArray | None:
            results[index] = _evaluate(rows[index], logprobs)
            loss = results[index][1]
            if not backward or isinstance(loss, BadRequest) or not loss.finite:
                return None
            return loss.grad.reshape(logprobs.shape)

        gradients = self._differentiate(rows, judge, casts, recomputed, backward=backward)
        for index, row in enumerate(rows):
            row.work.record(row.index, *results[index])
        for work in {id(row.work): row.work for row in rows}.values():
            work.add(gradients.get(id(work.trainable.adapter), {}))

    def _differentiate(
        self, rows: list[Row], judge: Judge, casts: Casts, recomputed: int, *, backward: bool
    ) -> dict[int, dict[str, Tensor]]:
        """Gradients of the micro-batch by adapter `id` and parameter name, after asking `judge` for each datum's."""
        sequences = [_ids(row.datum.tokens, self._model.device) for row in rows]
        adapters = [row.adapter for row in rows]
        with torch.set_grad_enabled(backward):
            hidden = self._backbone.run(sequences, adapters, casts, recomputed=recomputed)
        spans = [Span(row.adapter, _columns(row.datum.inputs["target_tokens"])) for row in rows]
        with torch.no_grad():
            head = self._head.run(hidden.detach(), spans, judge, backward=backward)
        gradients = _backbone_gradients(hidden, head.hidden if head.touched else None, adapters)
        for adapter, (a, b) in head.factors.items():
            gradients.setdefault(adapter, {}).update({f"{HEAD_NAME}.lora_A": a, f"{HEAD_NAME}.lora_B": b})
        return gradients


def _backbone_gradients(
    hidden: Tensor, upstream: Tensor | None, adapters: Sequence[Adapter]
) -> dict[int, dict[str, Tensor]]:
    """Gradients of all adapters' factors below the head, by adapter `id` and name; empty where there are none."""
    if upstream is None or not hidden.requires_grad:
        return {}
    distinct = {id(adapter): adapter for adapter in adapters}
    leaves = [
        (key, name, tensor)
        for key, adapter in distinct.items()
        for name, tensor in adapter.parameters()
        if not name.startswith(HEAD_NAME)
    ]
    # All or none: `backward()` would leave part of a sum behind when memory runs out half way.
    tensors = [tensor for *_, tensor in leaves]
    found = torch.autograd.grad(hidden, tensors, upstream, allow_unused=True)
    parts = cast("Sequence[Tensor | None]", found)
    gradients: dict[int, dict[str, Tensor]] = {key: {} for key in distinct}
    for (key, name, _), part in zip(leaves, parts, strict=True):
        if part is not None:
            gradients[key][name] = part
    return gradients


def _ids(tokens: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64)).to(device)


def _columns(targets: Array) -> Array:
    """Targets as int64 [N, K]."""
    return targets.reshape(len(targets), -1).astype(np.int64, copy=False)


def _evaluate(row: Row, logprobs: FloatArray) -> tuple[FloatArray, Loss | BadRequest]:
    """A datum's logprobs in the shape of its targets (L8), and its loss or why there is none."""
    inputs = row.datum.inputs
    lp = logprobs.reshape(inputs["target_tokens"].shape)
    try:
        return lp, row.work.loss(lp, inputs)
    except BadRequest as error:
        return lp, error


def _metrics(losses: Sequence[Loss]) -> dict[str, float]:
    """`loss:sum` (L4) and the losses' own, summed or averaged over the datums; each key has one colon (L5)."""
    totals = {"loss:sum": _total([loss.total for loss in losses])}
    for key in losses[0].sums:
        total = _total([loss.sums[key] for loss in losses])
        totals[key] = total / len(losses) if key.endswith(":mean") else total
    return totals


def _total(values: Sequence[float]) -> float:
    """The sum, rounded once; where there is none (a custom metric may be infinite) what plain addition gives."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def _report(works: Sequence[Work]) -> dict[RequestId, Outcome]:
    return {work.item.request: work.finish() for work in works if work.done and not work.reported}
