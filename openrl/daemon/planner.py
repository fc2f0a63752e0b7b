"""What goes to which device next: a pure function over plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from openrl.types import Op, RequestId, RunId

_TRAIN = frozenset({Op.FORWARD, Op.FORWARD_BACKWARD})


@dataclass(frozen=True, slots=True)
class Ready:
    """A run's head that could go now. `served` is the turn in which the run last got the device (0: never).

    `alone`: it was in hand when a worker died, so it must not take others with it a second time.
    """

    run: RunId
    request: RequestId
    op: Op
    tokens: int
    model: str
    served: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that go to one model's device together: training passes of several runs, or one of anything else."""

    model: str
    members: tuple[Ready, ...]


def plan(ready: Iterable[Ready], idle: Collection[str], budget: int) -> list[Batch]:
    """At most one batch for each idle model: whoever has waited longest goes first, and other runs' training joins it.

    `budget` bounds the tokens of a joined pass, so that its runs hear back soon; a single request may exceed it. Losses
    are sums, so joining changes results by rounding only.
    """
    batches: list[Batch] = []
    for model in idle:
        mine = sorted((r for r in ready if r.model == model), key=lambda r: r.served)
        if mine:
            batches.append(Batch(model, _join(mine, budget)))
    return batches


def _join(candidates: list[Ready], budget: int) -> tuple[Ready, ...]:
    first = candidates[0]
    if first.op not in _TRAIN or first.alone:
        return (first,)
    members, tokens, runs = [first], first.tokens, {first.run}
    for other in candidates[1:]:
        fits = tokens + other.tokens <= budget
        if other.op in _TRAIN and not other.alone and fits and other.run not in runs:
            members.append(other)
            runs.add(other.run)
            tokens += other.tokens
    return tuple(members)
