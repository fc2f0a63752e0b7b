"""One pass: forward, loss and backward over the datums of several runs' requests, in micro-batches.

A micro-batch is padded on the right and needs no attention mask: a causal model's real positions never see what
follows them (B2). Gradients of a micro-batch are taken all or none, and stay with their request until all of it
has succeeded, so a request that fails leaves no trace (G6).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from openrl.backends.base import TrainItem
from openrl.backends.torch.batches import cut, halves
from openrl.backends.torch.head import Head, Judge, Span
from openrl.backends.torch.lora import Adapter
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.trainable import Trainable
from openrl.checkpoints.peft import HEAD_NAME
from openrl.errors import BadRequest, OpenRLError, OutOfMemory
from openrl.losses import Loss
from openrl.types import Array, Datum, FloatArray, IntArray, RequestId, TrainOutput

Outcome = TrainOutput | OpenRLError
# The loss of one datum, from its logprobs (of the targets' shape) and its inputs. A `BadRequest` fails the request.
LossFn = Callable[[FloatArray, Mapping[str, Array]], Loss]

_SHORT_TOKENS = 192  # where the two kinds of kernel took equally long, forward and backward together


@dataclass(slots=True, eq=False)
class Work:
    """A request on its way through a pass: results of its datums by index, and its part of the gradient."""

    item: TrainItem
    trainable: Trainable
    loss: LossFn
    logprobs: dict[int, FloatArray] = field(default_factory=dict[int, FloatArray])
    losses: dict[int, Loss] = field(default_factory=dict[int, Loss])
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
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
        """Add a micro-batch's gradient, whose tensors become this request's own."""
        for name, part in gradients.items():
            if name in self.gradients:
                self.gradients[name].add_(part)
            else:
                self.gradients[name] = part

    def finish(self) -> Outcome:
        """The outcome of a request that is done; a success moves its gradient into the run's accumulator."""
        self.reported = True
        if self.error is not None:
            return self.error
        self.trainable.accumulate(self.gradients)
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
    def adapter(self) -> Adapter:
        return self.work.trainable.adapter


class PassRunner:
    """Runs passes on one model. `max_batch_tokens` bounds a micro-batch, its padding included."""

    def __init__(self, model: CausalLM, max_batch_tokens: int) -> None:
        self._model = model
        self._head = Head(model)
        self._max_batch_tokens = max_batch_tokens

    def run(self, works: Sequence[Work]) -> Iterator[dict[RequestId, Outcome]]:
        """Yields after each micro-batch what was finished since; raises only for faults that are not a request's."""
        for work in works:
            if not work.item.payload.data:
                work.error = BadRequest("data is empty; a request needs at least one datum.")
        queue = deque(self._plan(works))
        while queue:
            rows = [row for row in queue.popleft() if row.work.error is None]
            if rows:
                queue.extendleft(reversed(self._attempt(rows)))
                yield _report(works)
        if not all(work.reported for work in works):
            yield _report(works)

    def _plan(self, works: Sequence[Work]) -> list[list[Row]]:
        """Micro-batches; requests that only go forward apart from the others, since they need no graph."""
        batches: list[list[Row]] = []
        for backward in (True, False):
            chosen = [work for work in works if work.item.backward is backward]
            rows = [Row(work, index) for work in chosen for index in range(len(work.item.payload.data))]
            batches += cut(rows, lambda row: len(row.datum.tokens), self._max_batch_tokens)
        return batches

    def _attempt(self, rows: list[Row]) -> list[list[Row]]:
        """Do a micro-batch; returns what is still to do, if memory ran out: the same in two halves.

        Where even one datum is too much, its request fails.
        """
        try:
            self._micro_batch(rows)
            return []
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(rows) > 1:
            return halves(rows)
        tokens = len(rows[0].datum.tokens)
        rows[0].work.error = OutOfMemory(f"the device ran out of memory on data[{rows[0].index}] ({tokens} tokens).")
        return []

    def _micro_batch(self, rows: list[Row]) -> None:
        """Forward, losses and backward; results are recorded once all of it has worked, so that it can be repeated."""
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

        gradients = self._differentiate(rows, judge, backward=backward)
        for index, row in enumerate(rows):
            row.work.record(row.index, *results[index])
        for work in {id(row.work): row.work for row in rows}.values():
            work.add(gradients.get(id(work.trainable.adapter), {}))

    def _differentiate(self, rows: list[Row], judge: Judge, *, backward: bool) -> dict[int, dict[str, Tensor]]:
        """Gradients of the micro-batch by adapter `id` and parameter name, after asking `judge` for each datum's."""
        ids, real = _pad([row.datum.tokens for row in rows], self._model.device)
        adapters = [row.adapter for row in rows]
        with torch.set_grad_enabled(backward), self._model.routing.use(adapters), _attention(ids):
            hidden = self._model.hidden(input_ids=ids, use_cache=False)
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        spans = [Span(row.adapter, _columns(row.datum.inputs["target_tokens"])) for row in rows]
        with torch.no_grad():
            head = self._head.run(flat[real], spans, judge, backward=backward)
            upstream = torch.zeros_like(flat).index_copy_(0, real, head.hidden) if head.touched else None
        gradients = _backbone_gradients(hidden, upstream, adapters)
        for adapter, (a, b) in head.factors.items():
            gradients.setdefault(adapter, {}).update({f"{HEAD_NAME}.lora_A": a, f"{HEAD_NAME}.lora_B": b})
        return gradients


@contextmanager
def _attention(ids: Tensor) -> Generator[None]:
    """The attention kernel for a micro-batch: on a CPU the fused one's way back is slow for short sequences."""
    if ids.device.type == "cpu" and ids.shape[1] <= _SHORT_TOKENS:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    else:
        yield


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
    found = torch.autograd.grad(hidden, tensors, upstream.view_as(hidden), allow_unused=True)
    parts = cast("Sequence[Tensor | None]", found)
    gradients: dict[int, dict[str, Tensor]] = {key: {} for key in distinct}
    for (key, name, _), part in zip(leaves, parts, strict=True):
        if part is not None:
            gradients[key][name] = part
    return gradients


def _pad(sequences: Sequence[IntArray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids int64 [rows, longest], filled up on the right, and the flat indices of the real ones in row order."""
    lengths = np.array([len(tokens) for tokens in sequences])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(mask.shape, dtype=np.int64)
    ids[mask] = np.concatenate(sequences)
    return torch.from_numpy(ids).to(device), torch.from_numpy(np.flatnonzero(mask)).to(device)


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


def _is_out_of_memory(error: Exception) -> bool:
    """CUDA has a type of its own; the CPU's allocator raises a plain RuntimeError with a known sentence."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
