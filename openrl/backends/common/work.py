"""Requests on their way through a training pass: results by datum, and a gradient that is kept apart until all is well.

Gradients of a micro-batch are taken all or none, and stay with their request until all of it has succeeded, so a
request that fails leaves no trace (G6). What a gradient is, the engine says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from openrl.backends.base import TrainItem
from openrl.errors import BadRequest, OpenRLError
from openrl.losses import Loss
from openrl.types import AdamParams, Array, Datum, FloatArray, OptimOutput, RequestId, TrainOutput

Outcome = TrainOutput | OpenRLError
# The loss of one datum, from its logprobs (of the targets' shape) and its inputs. A `BadRequest` fails the request.
LossFn = Callable[[FloatArray, Mapping[str, Array]], Loss]


class Accumulator(Protocol):
    """A run's state as far as a pass changes it."""

    def joined(self, total: Any, gradients: Mapping[str, Any]) -> Any:
        """`total` + gradients by parameter name, where None is zero; `total` may be changed in place."""
        ...

    def give(self, gradient: Any) -> None:
        """G += what `joined` made, whose memory becomes the run's own."""
        ...


def stepped(norm: float, adam: AdamParams) -> OptimOutput:
    """What a step answers whose gradient had this norm. Raises `BadRequest` where it was not finite and thus no step
    was taken (O8)."""
    if not math.isfinite(norm):
        raise BadRequest(
            f"the accumulated gradient is not finite (norm {norm}); it was dropped and the step not taken.",
            "Look for extreme weights, advantages or probability ratios.",
        )
    return OptimOutput({"grad_norm:mean": norm, "lr:mean": adam.learning_rate, "update_skipped:sum": 0.0})


T = TypeVar("T", bound=Accumulator)


@dataclass(slots=True, eq=False)
class Work(Generic[T]):
    """A request on its way through a pass: results of its datums by index, and its part of the gradient.

    `context` is how many tokens the model takes at most; beyond, an engine may compute something else without a word.
    """

    item: TrainItem
    trainable: T
    loss: LossFn
    context: int
    logprobs: dict[int, FloatArray] = field(default_factory=dict[int, FloatArray])
    losses: dict[int, Loss] = field(default_factory=dict[int, Loss])
    gradient: Any = None
    error: OpenRLError | None = None
    reported: bool = False

    def __post_init__(self) -> None:
        if not self.item.payload.data:
            self.error = BadRequest("data is empty; a request needs at least one datum.")
        for index, datum in enumerate(self.item.payload.data):
            if not 1 <= len(datum.tokens) <= self.context:
                legal = f"1..{self.context} tokens"
                self.error = BadRequest(
                    f"data[{index}].model_input has {len(datum.tokens)} tokens; the model takes {legal}."
                )
                return

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

    def add(self, gradients: Mapping[str, Any]) -> None:
        """Add a micro-batch's gradient."""
        if gradients:
            self.gradient = self.trainable.joined(self.gradient, gradients)

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
class Row(Generic[T]):
    """One datum of a request."""

    work: Work[T]
    index: int

    @property
    def datum(self) -> Datum:
        return self.work.item.payload.data[self.index]

    @property
    def tokens(self) -> int:
        return len(self.datum.tokens)

    @property
    def targets(self) -> Array:
        """Targets as int64 [N, K]."""
        targets = self.datum.inputs["target_tokens"]
        return targets.reshape(len(targets), -1).astype(np.int64, copy=False)

    def evaluate(self, logprobs: FloatArray) -> tuple[FloatArray, Loss | BadRequest]:
        """The logprobs [N, K] in the shape of the datum's targets (L8), and its loss or why there is none."""
        inputs = self.datum.inputs
        lp = logprobs.reshape(inputs["target_tokens"].shape)
        try:
            return lp, self.work.loss(lp, inputs)
        except BadRequest as error:
            return lp, error


def rows_of(works: Sequence[Work[T]], *, backward: bool) -> list[Row[T]]:
    """The datums of all requests of one kind that can be computed."""
    chosen = [work for work in works if work.item.backward is backward and work.error is None]
    return [Row(work, index) for work in chosen for index in range(len(work.item.payload.data))]


def neighbours(rows: Sequence[Row[T]]) -> list[Row[T]]:
    """The same rows, those of one request side by side."""
    first = {id(row.work): position for position, row in reversed(list(enumerate(rows)))}
    return sorted(rows, key=lambda row: first[id(row.work)])


def report(works: Sequence[Work[T]]) -> dict[RequestId, Outcome]:
    """What is done and was not reported yet."""
    return {work.item.request: work.finish() for work in works if work.done and not work.reported}


class Verdicts(Generic[T]):
    """Judges the rows of one micro-batch as their logprobs come; recorded once all of it has worked, so that it can be
    repeated."""

    def __init__(self, rows: Sequence[Row[T]]) -> None:
        self._rows = rows
        self._results: dict[int, tuple[FloatArray, Loss | BadRequest]] = {}

    def __call__(self, index: int, logprobs: FloatArray) -> FloatArray | None:
        """dL/dlp of row `index`, float32 [N, K]; None where nothing is to be differentiated."""
        row = self._rows[index]
        self._results[index] = row.evaluate(logprobs)
        loss = self._results[index][1]
        if not row.work.item.backward or isinstance(loss, BadRequest) or not loss.finite:
            return None
        return loss.grad.reshape(logprobs.shape)

    @property
    def results(self) -> list[tuple[FloatArray, Loss | BadRequest]]:
        """Those of all rows, in their order."""
        return [self._results[index] for index in range(len(self._rows))]

    def record(self) -> None:
        """Give all results to their requests."""
        for index, row in enumerate(self._rows):
            row.work.record(row.index, *self._results[index])


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
