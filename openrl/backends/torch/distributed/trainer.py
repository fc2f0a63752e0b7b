"""Training on several devices, as rank 0 leads it: `TrainBackend` over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from openrl.backends.base import TrainItem
from openrl.backends.common.batches import cut
from openrl.backends.common.micro_batches import MicroBatch, attempts
from openrl.backends.common.work import Outcome, Row, Work, neighbours, report, rows_of
from openrl.backends.torch.distributed.commands import (
    Begin,
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
from openrl.backends.torch.distributed.group import GroupBroken
from openrl.backends.torch.distributed.spread import spread
from openrl.backends.torch.distributed.team import Team
from openrl.backends.torch.trainable import Trainable
from openrl.checkpoints.full import is_full
from openrl.errors import BadRequest, OpenRLError
from openrl.types import AdamParams, Array, FullSpec, OptimOutput, RequestId, RunId, TrainSpec

LoraRow = Row[Trainable]
_Round = MicroBatch[Trainable]  # datums that the ranks compute at the same time


@dataclass(slots=True)
class _Pass:
    """A pass by its number; `touched` are the items that have a gradient on some rank."""

    number: int
    works: list[Work[Trainable]]
    touched: set[int] = field(default_factory=set[int])

    def item(self, work: Work[Trainable]) -> int:
        return next(index for index, other in enumerate(self.works) if other is work)


class SpreadTrainer:
    """Implements `TrainBackend` for adapters. Files are rank 0's: all ranks hold the same adapters."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._numbers = count()

    def create(self, run: RunId, spec: TrainSpec) -> None:
        """See `TrainBackend.create`."""
        if isinstance(spec, FullSpec):
            raise _refusal(self.team.size)
        states = self.team.ask(Create(run, spec), State)
        failed = [state.result for state in states if isinstance(state.result, OpenRLError)]
        if failed:
            self.drop(run)
            raise failed[0]
        self._agreed(states)

    def drop(self, run: RunId) -> None:
        """See `TrainBackend.drop`."""
        self.team.tell(Drop(run))

    def optim_step(self, run: RunId, adam: AdamParams) -> OptimOutput:
        """See `TrainBackend.optim_step`. Each rank takes the step, from the same gradient."""
        result = self._agreed(self.team.ask(Step(run, adam), State))
        assert result is not None
        return result

    def save(self, run: RunId, into: Path, *, optimizer: bool, gradients: bool) -> None:
        """See `TrainBackend.save`."""
        self.team.member.trainer.save(run, into, optimizer=optimizer, gradients=gradients)

    def load(self, run: RunId, source: Path, *, optimizer: bool) -> None:
        """See `TrainBackend.load`."""
        if is_full(source):
            raise _refusal(self.team.size)
        self._agreed(self.team.ask(Load(run, source, optimizer), State))

    def gradients(self, run: RunId) -> dict[str, Array]:
        """A copy of the accumulator G by parameter name; for tests and debugging."""
        return self.team.member.trainer.gradients(run)

    def parameters(self, run: RunId) -> dict[str, Array]:
        """A copy of the adapter's tensors by name; for tests and debugging."""
        return self.team.member.trainer.parameters(run)

    def use_threads(self, threads: int) -> None:
        """Share so many CPU threads among the ranks."""
        self.team.tell(UseThreads(max(1, threads // self.team.size)))

    def fetch(self, layer: int) -> None:
        """Have a layer's weights in rank 0's window, to sample; the next layer's come after them."""
        following = layer + 1 if layer + 1 < self.team.member.windows.layers else None
        self.team.tell(Fetch(layer, following))

    def _agreed(self, states: Sequence[State]) -> OptimOutput | None:
        """The result, where all ranks came to the same; raises it if it is an error.

        An error of some ranks alone leaves runs that differ: only a new start, and a replay, makes them one again.
        """
        own = states[0]
        if any((s.digest, str(s.result)) != (own.digest, str(own.result)) for s in states[1:]):
            told = "; ".join(f"rank {rank}: {s.result}" for rank, s in enumerate(states))
            raise self.team.lose(GroupBroken(f"the ranks no longer hold the same adapter ({told})."))
        if isinstance(own.result, OpenRLError):
            raise own.result
        return own.result

    # ---- passes ----

    def train_pass(self, items: tuple[TrainItem, ...]) -> Iterator[dict[RequestId, Outcome]]:
        """See `TrainBackend.train_pass`."""
        number = next(self._numbers)
        limits = self.team.ask(Begin(number, items), int)
        current = _Pass(number, self.team.member.works(number))
        rounds = self._rounds(current.works, min(limits))
        try:
            for _ in attempts(rounds, lambda work: self._attempt(current, work)):
                yield self._report(current)
            if not all(work.reported for work in current.works):
                yield self._report(current)
        finally:
            self.team.end(End(number))

    def _rounds(self, works: Sequence[Work[Trainable]], max_tokens: int) -> list[_Round]:
        rounds: list[list[LoraRow]] = []
        for backward in (True, False):
            rows = rows_of(works, backward=backward)
            rounds += cut(rows, lambda row: row.tokens, lambda row: id(row.work), max_tokens * self.team.size)
        return [_Round(rows) for rows in rounds]

    def _attempt(self, current: _Pass, work: _Round) -> list[_Round]:
        """Do a round; returns what is to be done in its place, if memory ran out on some rank.

        Nothing counts before all ranks have done their part.
        """
        shares = [neighbours(rows) for rows in spread(work.rows, lambda row: row.tokens, self.team.size)]
        parts = self.team.ask(self._commands(current, work, shares), Part)
        full = any(part.full for part in parts)
        self.team.tell(Settle(current.number, keep=not full))
        if full:
            return work.smaller(spared=work.sparing, where="a device")
        self._record(current, shares, parts)
        return []

    def _commands(self, current: _Pass, work: _Round, shares: Sequence[Sequence[LoraRow]]) -> list[Compute]:
        items = tuple(sorted({current.item(row.work) for row in work.rows}))
        backward = work.rows[0].work.item.backward
        chosen = [tuple((current.item(row.work), row.index) for row in rows) for rows in shares]
        return [Compute(current.number, rows, items, backward, work.sparing) for rows in chosen]

    def _record(self, current: _Pass, shares: Sequence[Sequence[LoraRow]], parts: Sequence[Part]) -> None:
        for rows, part in zip(shares, parts, strict=True):
            current.touched |= part.touched
            for row, (logprobs, loss) in zip(rows, part.verdicts, strict=True):
                row.work.record(row.index, logprobs, loss)

    def _report(self, current: _Pass) -> dict[RequestId, Outcome]:
        """What is done and was not reported yet; gradients of successes are added up over the ranks first (G6)."""
        ended = [i for i, work in enumerate(current.works) if work.done and not work.reported]
        good = tuple(i for i in ended if current.works[i].error is None and i in current.touched)
        self.team.tell(Finish(current.number, good, tuple(i for i in ended if i not in good)))
        return report(current.works)


def _refusal(ranks: int) -> BadRequest:
    return BadRequest(
        f"training all parameters is not possible on {ranks} devices; adapters are.",
        "Take a rank of 1 or more, or a server whose base model has one device (--devices 1).",
    )
