"""One pass: forward, loss and backward over the datums of several runs' requests, in micro-batches.

A micro-batch is padded on the right and needs no attention mask: a causal model's real positions never see what
follows them (B2). Gradients of a micro-batch are taken all or none, and stay with their request until all of it
has succeeded, so a request that fails leaves no trace (G6).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from openrl.backends.common.batches import cut
from openrl.backends.common.micro_batches import MicroBatch, attempts
from openrl.backends.common.spans import Judge, Span
from openrl.backends.common.work import Outcome, Row, Verdicts, Work, neighbours, report, rows_of
from openrl.backends.torch.head import Head
from openrl.backends.torch.joint import Casts
from openrl.backends.torch.lora import Adapter
from openrl.backends.torch.memory import free_memory, is_out_of_memory
from openrl.backends.torch.memory_plan import MemoryPlan, Sizes, plan
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.train_backbone import TrainBackbone
from openrl.backends.torch.trainable import Trainable
from openrl.checkpoints.peft import HEAD_NAME
from openrl.types import IntArray, RequestId

LoraWork = Work[Trainable]
LoraRow = Row[Trainable]
LoraBatch = MicroBatch[Trainable]


class PassRunner:
    """Runs passes on one model. `max_batch_tokens` bounds a micro-batch; free memory may bound it further."""

    def __init__(self, model: CausalLM, max_batch_tokens: int) -> None:
        self._model = model
        self._sizes = Sizes.of(model.config.to_dict(), model.dtype.itemsize)
        self._backbone = TrainBackbone(model)
        self._head = Head(model)
        self._max_batch_tokens = max_batch_tokens

    def run(self, works: Sequence[LoraWork]) -> Iterator[dict[RequestId, Outcome]]:
        """Yields after each micro-batch what was finished since; raises only for faults that are not a request's."""
        memory, casts = self.memory(works), Casts(self._model.dtype)
        batches = self._batches(works, memory.limit(self._max_batch_tokens))
        try:
            for _ in attempts(batches, lambda batch: self._attempt(batch, memory, casts)):
                yield report(works)
        finally:
            self.clear()
        if not all(work.reported for work in works):
            yield report(works)

    def clear(self) -> None:
        """Give temporary memory back."""
        self._backbone.clear()
        self._head.clear()

    def memory(self, works: Sequence[LoraWork], sharers: int = 1) -> MemoryPlan:
        """What this pass may take of the memory that is free now, which so many processes share."""
        device, model = self._model.device, self._model
        adapters = sum(work.trainable.theta.numel() for work in works)
        weights = model.parameters * model.dtype.itemsize
        return plan(self._sizes, free_memory(device) // sharers, weights, adapters, gpu=device.type == "cuda")

    def _batches(self, works: Sequence[LoraWork], max_tokens: int) -> list[LoraBatch]:
        """Requests that only go forward are apart from the others, since they need no graph."""
        batches: list[list[LoraRow]] = []
        for backward in (True, False):
            rows = rows_of(works, backward=backward)
            batches += cut(rows, lambda row: row.tokens, lambda row: id(row.work), max_tokens)
        return [MicroBatch(rows) for rows in batches]

    def _attempt(self, batch: LoraBatch, memory: MemoryPlan, casts: Casts) -> list[LoraBatch]:
        """Do a micro-batch; returns what is to be done in its place, if memory ran out."""
        try:
            self._do(batch.rows, casts, self._sizes.layers if batch.sparing else memory.recomputed(batch.tokens))
            return []
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        self.clear()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        return batch.smaller(spared=batch.sparing)

    def _do(self, rows: list[LoraRow], casts: Casts, recomputed: int) -> None:
        """Forward, losses and backward, with so many layers computed again on the way back.

        Results are recorded once all of it has worked, so that it can be repeated.
        """
        rows = neighbours(rows)  # rows of one adapter
        verdicts = Verdicts(rows)
        backward = rows[0].work.item.backward
        gradients = self.differentiate(rows, verdicts, casts, recomputed, backward=backward)
        verdicts.record()
        for work in {id(row.work): row.work for row in rows}.values():
            work.add(gradients.get(id(work.trainable.adapter), {}))

    def differentiate(
        self, rows: list[LoraRow], judge: Judge, casts: Casts, recomputed: int, *, backward: bool
    ) -> dict[int, dict[str, Tensor]]:
        """Gradients of the micro-batch by adapter `id` and parameter name, after asking `judge` for each datum's."""
        sequences = [_ids(row.datum.tokens, self._model.device) for row in rows]
        adapters = [row.work.trainable.adapter for row in rows]
        with torch.set_grad_enabled(backward):
            hidden = self._backbone.run(sequences, adapters, casts, recomputed=recomputed)
        spans = [Span(adapter, row.targets) for adapter, row in zip(adapters, rows, strict=True)]
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
