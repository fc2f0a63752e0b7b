"""What goes to which device next: pure functions over plain data.

Sessions take turns by their virtual token counters (`openrl.shares`), a session's runs among themselves by who was
served longest ago. Training passes of other runs, of whatever session, join a pass in one forward.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from openrl.shares import Account
from openrl.types import Op, RequestId, RunId, SessionId

TRAIN = frozenset({Op.FORWARD, Op.FORWARD_BACKWARD})
_MAX_LONG = 4  # long passes that take turns on a device: each holds gradients until it ends
_MAX_STEPS = 16  # of several runs in one batch: they run one after another, and whoever waits should not wait long
_HEAD_START = 32  # turns, for short work of a session's run before the passes of its other runs
_LEAST = 32  # part of the budget, that a pass counts as at least
_WORK = {Op.FORWARD: 1, Op.FORWARD_BACKWARD: 2}  # of a token; the way back is about as much as the way forward


@dataclass(frozen=True, slots=True)
class Ready:
    """A run's head that could go now. `served` is the turn in which the run last got the device (0: never).

    `alone`: it was in hand when a worker died, so it must not take others with it a second time.
    """

    run: RunId
    session: SessionId
    request: RequestId
    op: Op
    tokens: int
    model: str
    served: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Underway:
    """A batch that a device has in hand. `long`: a pass of more than one micro-batch."""

    sessions: frozenset[SessionId]
    long: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Device:
    """A model's device as it stands: what the sessions with work were served, and what it has in hand."""

    model: str
    accounts: Mapping[SessionId, Account]
    underway: tuple[Underway, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that go to one model's device together: training passes of several runs, steps of several runs, or one
    of anything else."""

    model: str
    members: tuple[Ready, ...]
    long: bool = False

    @property
    def underway(self) -> Underway:
        """The batch once it is in hand."""
        return Underway(frozenset(m.session for m in self.members), self.long, any(m.alone for m in self.members))


def plan(ready: Iterable[Ready], devices: Iterable[Device], budget: int) -> list[Batch]:
    """At most one batch for each device. `budget` bounds the tokens of a joined pass, so that its runs hear back soon;
    a single request may exceed it, and is then a long pass, in whose course the device takes up further work."""
    by_model: dict[str, list[Ready]] = defaultdict(list)
    for head in ready:
        by_model[head.model].append(head)
    batches = (_next(by_model[device.model], device, budget) for device in devices)
    return [batch for batch in batches if batch is not None]


def order(ready: Iterable[Ready], device: Device, budget: int) -> Iterator[Ready]:
    """In which order these would go, were nothing else to come and each alone."""
    turns = _Turns(ready, device, budget)
    while (head := turns.pop()) is not None:
        turns.count(head)
        yield head


def cost(head: Ready, budget: int) -> float:
    """What a request counts against its session, in tokens of a forward. Only passes count by tokens, the rest by time.

    However short, a pass takes the device a while, so it counts as some tokens at least: else a stream of tiny ones,
    whose session is always behind, would always go first.
    """
    work = _WORK.get(head.op)
    return 0.0 if work is None else max(work * head.tokens, budget / _LEAST)


def _next(ready: list[Ready], device: Device, budget: int) -> Batch | None:
    candidates = [head for head in ready if _admitted(head, device, budget)]
    turns = _Turns(candidates, device, budget)
    first = turns.pop()
    if first is None:
        return None
    if first.alone or first.op not in TRAIN | {Op.OPTIM_STEP}:
        return Batch(device.model, (first,))
    return Batch(device.model, _join(first, turns, budget), long=first.tokens > budget)


def _admitted(head: Ready, device: Device, budget: int) -> bool:
    """Whether a request may go to a device beside what that has in hand.

    What is short ends soon, so everyone waits for it: those who wait meanwhile join in one pass. Beside long passes
    there may be one of each session, so that many runs are no more than one, and one short batch.
    """
    if not device.underway:
        return True
    if head.alone or any(batch.alone or not batch.long for batch in device.underway):
        return False
    if any(head.session in batch.sessions for batch in device.underway):
        return False
    return head.tokens <= budget or len(device.underway) < _MAX_LONG


def _join(first: Ready, turns: _Turns, budget: int) -> tuple[Ready, ...]:
    """`first` and what goes with it, by turns: each pass that is taken counts against its session at once.

    Where a pass does not fit, later ones still may; but not those of sessions that are ahead of it by more than the
    budget, or a session of small passes would fill up the device for good.
    """
    kind = TRAIN if first.op in TRAIN else {first.op}
    members, tokens, limit = [first], first.tokens, math.inf
    turns.count(first)
    while (other := turns.pop()) is not None and turns.counter(other.session) <= limit:
        if other.op not in kind or other.alone:
            continue
        if tokens + other.tokens > budget:
            limit = min(limit, turns.counter(other.session) + budget)
        elif other.op in TRAIN or len(members) < _MAX_STEPS:
            members.append(other)
            tokens += other.tokens
            turns.count(other)
    return tuple(members)


class _Turns:
    """Takes requests out one by one: the session with the least counter first, and its run served longest ago.

    Short work that is no pass (a step, a save) has a head start of `budget` tokens, and of some turns among its
    session's runs: it takes little, and the next pass of its run can then join the others'. It is charged all the
    same, so a flood of it loses the head start.
    """

    def __init__(self, ready: Iterable[Ready], device: Device, budget: int) -> None:
        self._accounts = device.accounts
        self._budget = budget
        heads: dict[SessionId, list[Ready]] = defaultdict(list)
        for head in ready:
            heads[head.session].append(head)
        self._queues = {session: deque(sorted(own, key=_place)) for session, own in heads.items()}
        self._planned: dict[SessionId, float] = dict.fromkeys(self._queues, 0.0)
        self._heap = [(*self._rank(session), session) for session in self._queues]
        heapq.heapify(self._heap)
        self._out: SessionId | None = None  # whose request was popped last

    def counter(self, session: SessionId) -> float:
        """A session's counter, what was counted here included."""
        return self._accounts[session].counter + self._planned[session]

    def _rank(self, session: SessionId) -> tuple[float, int]:
        account = self._accounts[session]
        head_start = 0 if self._queues[session][0].op in TRAIN else self._budget / account.weight
        return self.counter(session) - head_start, account.turn

    def pop(self) -> Ready | None:
        """The next one, None when there is none left."""
        if self._out is not None and self._queues[self._out]:
            heapq.heappush(self._heap, (*self._rank(self._out), self._out))
        if not self._heap:
            return None
        *_, self._out = heapq.heappop(self._heap)
        return self._queues[self._out].popleft()

    def count(self, head: Ready) -> None:
        """The request that was popped last is taken, and counts from here on."""
        self._planned[head.session] += cost(head, self._budget) / self._accounts[head.session].weight


def _place(head: Ready) -> int:
    return head.served - (0 if head.op in TRAIN else _HEAD_START)
