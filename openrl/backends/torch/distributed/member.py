"""One rank's part in training: its layers' shards, a copy of every adapter, and the datums that it is given."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from openrl.backends.common.work import Row, Verdicts, Work
from openrl.backends.torch.custom_loss import loss_of
from openrl.backends.torch.distributed.commands import (
    Answer,
    Begin,
    Command,
    Compute,
    Create,
    Drop,
    End,
    Fetch,
    Finish,
    Load,
    Part,
    Settle,
    State,
    Step,
    UseThreads,
)
from openrl.backends.torch.distributed.group import Group
from openrl.backends.torch.distributed.windows import Windows
from openrl.backends.torch.joint import Casts
from openrl.backends.torch.memory import is_out_of_memory
from openrl.backends.torch.memory_plan import MemoryPlan
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.train import Trainer
from openrl.backends.torch.trainable import Trainable
from openrl.errors import BadRequest, OpenRLError, OutOfMemory
from openrl.losses import Loss
from openrl.types import OptimOutput, RunId


@dataclass(slots=True)
class Pass:
    """A pass in hand. A work's `gradient` is this rank's part of it; `fresh` holds what was computed last, by item."""

    works: list[Work[Trainable]]
    casts: Casts
    memory: MemoryPlan
    fresh: dict[int, dict[str, Tensor]] = field(default_factory=dict[int, dict[str, Tensor]])


class Member:
    """Carries out commands; every rank has one."""

    def __init__(
        self, group: Group, windows: Windows, model: CausalLM, trainer: Trainer, max_batch_tokens: int
    ) -> None:
        self.group = group
        self.windows = windows
        self.trainer = trainer
        self._model = model
        self._max_batch_tokens = max_batch_tokens
        self._passes: dict[int, Pass] = {}

    def works(self, number: int) -> list[Work[Trainable]]:
        """The requests of a pass in hand."""
        return self._passes[number].works

    def do(self, command: Command) -> Answer:
        """Carry a command out; None where it is not to be answered."""
        match command:
            case Compute():
                return self._compute(command)
            case Settle(number, keep):
                self._settle(self._passes[number], keep=keep)
            case Begin():
                return self._begin(command)
            case Finish():
                self._finish(command)
            case End(number):
                if self._passes.pop(number, None) is not None:
                    self.trainer.passes.clear()
            case Fetch(layer, following):
                self.windows.load(layer, following)
            case Create() | Load() | Step():
                return self._change(command)
            case Drop(run):
                self.trainer.drop(run)
            case UseThreads(threads):
                torch.set_num_threads(threads)
        return None

    # ---- runs ----

    def _change(self, command: Create | Load | Step) -> State:
        result: OptimOutput | OpenRLError | None = None
        try:
            result = self._changed(command)
        except OpenRLError as error:
            result = error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            result = OutOfMemory(f"{self.group.device} ran out of memory for an adapter or its optimizer's state.")
        return State(self._digest(command.run), result)

    def _changed(self, command: Create | Load | Step) -> OptimOutput | None:
        match command:
            case Create(run, spec):
                self.trainer.create(run, spec)
            case Load(run, source, optimizer):
                self.trainer.load(run, source, optimizer=optimizer)
            case Step(run, adam):
                return self.trainer.optim_step(run, adam)
        return None

    def _digest(self, run: RunId) -> bytes:
        if not self.trainer.holds(run):
            return b""
        held = self.trainer.trainable(run)
        return struct.pack("<dq", float(held.theta.detach().sum(dtype=torch.float64)), held.t)

    # ---- passes ----

    def _begin(self, command: Begin) -> int:
        context = self._model.config.max_position_embeddings
        works = [Work(i, self.trainer.trainable(i.run), loss_of(i), context) for i in command.items]
        sharers = self.group.size if self.group.device.type == "cpu" else 1
        memory = self.trainer.passes.memory(works, sharers)
        self._passes[command.number] = Pass(works, Casts(self._model.dtype), memory)
        return memory.limit(self._max_batch_tokens)

    def _compute(self, command: Compute) -> Part:
        """Whatever comes of it, this rank gathers each layer as often as the others do."""
        self.windows.begin(backward=command.backward)
        try:
            part = self._attempt(self._passes[command.number], command)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            part = Part(full=True)
        finally:
            self.windows.finish()
        if part.full:
            self.trainer.passes.clear()
            if self.group.device.type == "cuda":
                torch.cuda.empty_cache()
        return part

    def _attempt(self, held: Pass, command: Compute) -> Part:
        if command.backward:
            for item in command.items:  # memory that adding up will need is taken now, where failing does no harm
                work = held.works[item]
                work.gradient = work.trainable.fresh() if work.gradient is None else work.gradient
        if not command.rows:
            return Part()
        rows = [Row(held.works[item], index) for item, index in command.rows]
        tokens = sum(row.tokens for row in rows)
        recomputed = held.memory.sizes.layers if command.sparing else held.memory.recomputed(tokens)
        verdicts = Verdicts(rows)
        backward = command.backward
        gradients = self.trainer.passes.differentiate(rows, verdicts, held.casts, recomputed, backward=backward)
        ours = {item: gradients.get(id(held.works[item].trainable.adapter), {}) for item, _ in command.rows}
        held.fresh = {item: found for item, found in ours.items() if found}
        told = tuple((logprobs, _without_gradient(loss)) for logprobs, loss in verdicts.results)
        return Part(told, frozenset(held.fresh))

    def _settle(self, held: Pass, *, keep: bool) -> None:
        fresh, held.fresh = held.fresh, {}
        if keep:
            for item, gradients in fresh.items():
                held.works[item].add(gradients)

    def _finish(self, command: Finish) -> None:
        works = self._passes[command.number].works
        for work in (works[item] for item in command.give):
            self.group.add_up(work.gradient)
            work.trainable.give(work.gradient)
            work.gradient = None
        for work in (works[item] for item in command.forget):
            if work.gradient is not None:
                work.trainable.take_back(work.gradient)
                work.gradient = None


def _without_gradient(loss: Loss | BadRequest) -> Loss | BadRequest:
    """All that rank 0 must know of it; of the gradient, whether it is finite."""
    if isinstance(loss, BadRequest):
        return loss
    return replace(loss, grad=np.zeros(1, np.float32) if loss.finite else np.full(1, np.nan, np.float32))
