"""Training's side of one model's device: what it has in hand, what it has been given to whom, and how fast it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from openrl.daemon.execute import Member
from openrl.daemon.planner import TRAIN, Batch, Device, Underway, cost
from openrl.shares import Shares
from openrl.types import Op, RunId, SessionId

_FADING = 0.9  # weight of the past in the pace, at each pass
_FIRST_PACE = 1000.0  # tokens a second, until a pass has been timed
_PATIENCE = 0.1  # of a usual pass's time, that a pass may wait for others to join it
_MOST_PATIENCE = 0.02  # seconds


@dataclass(slots=True, eq=False)
class InHand:
    """A batch from its dispatch until all of it is committed; `freed` once the device is done with it."""

    batch: Batch
    members: list[Member]
    held: dict[RunId, Member]  # those of them that nobody else may touch yet
    since: float = field(default_factory=time.monotonic)
    freed: bool = False


class TrainLane:
    """Owned by the scheduler, one for each model."""

    def __init__(self, model: str, budget: int) -> None:
        self.model = model
        self._budget = budget
        self.shares = Shares()
        self._in_hand: list[InHand] = []
        self._ended: dict[RunId, float] = {}  # runs whose clients have just heard, or will in a moment
        self._sizes: dict[RunId, int] = {}  # tokens of their newest passes
        self._freed_at = 0.0
        self._work, self._seconds = 0.0, 0.0
        self._usual = 0.0  # seconds of a pass

    @property
    def underway(self) -> list[InHand]:
        """What the device works on."""
        return [batch for batch in self._in_hand if not batch.freed]

    def device(self) -> Device:
        """The lane as the planner sees it."""
        underway: tuple[Underway, ...] = tuple(batch.batch.underway for batch in self.underway)
        return Device(self.model, self.shares.accounts(), underway)

    def sync(self, waiting: Collection[SessionId], weight: Callable[[SessionId], float]) -> None:
        """Say which sessions have work that waits; those whose work is in hand are known here."""
        held = {member.session for batch in self._in_hand for member in batch.batch.members}
        self.shares.sync({session: weight(session) for session in held.union(waiting)})

    def begin(self, batch: Batch, members: list[Member]) -> InHand:
        """A batch goes to the device, and its passes count against their sessions."""
        for member in batch.members:
            self.shares.serve(member.session, cost(member, self._budget))
            self._ended.pop(member.run, None)
            if member.op in TRAIN:
                self._sizes[member.run] = member.tokens
        in_hand = InHand(batch, members, {handle.id: (handle, entry) for handle, entry in members})
        self._in_hand.append(in_hand)
        return in_hand

    def free(self, in_hand: InHand) -> None:
        """The device is done with a batch: what is not a pass now counts by its time."""
        if in_hand.freed:
            return
        in_hand.freed = True
        self._freed_at = time.monotonic()
        for member in in_hand.batch.members:
            self._ended[member.run] = self._freed_at
            if member.op is Op.UNLOAD:
                self._forget(member.run)
        if in_hand.batch.members[0].op in TRAIN:
            self._measure(in_hand)
            return
        elapsed = self._freed_at - in_hand.since
        for member, (_, entry) in zip(in_hand.batch.members, in_hand.members, strict=True):
            seconds = entry.timing.watch.seconds or elapsed / len(in_hand.members)
            self.shares.charge(member.session, max(1.0, seconds * self.pace))

    def end(self, in_hand: InHand) -> None:
        """All of a batch is committed, or will not be."""
        self.free(in_hand)
        self._in_hand.remove(in_hand)

    @property
    def pace(self) -> float:
        """Tokens of a forward that passes had in a second lately."""
        return self._work / self._seconds if self._seconds else _FIRST_PACE

    def _measure(self, in_hand: InHand) -> None:
        seconds = sum(entry.timing.watch.seconds for _, entry in in_hand.members)
        if not seconds:
            return
        work = sum(cost(member, self._budget) for member in in_hand.batch.members)
        self._work, self._seconds = _FADING * self._work + work, _FADING * self._seconds + seconds
        self._usual = _FADING * self._usual + (1 - _FADING) * seconds if self._usual else seconds

    def patience(self, batch: Batch, waiting: Collection[RunId]) -> float:
        """Seconds that a batch should wait before it goes, 0 for none; asked again whenever something changes.

        It waits for a session that has the better claim and whose next request is here, while the one before it is
        being committed. And a pass waits a little for others that would join it: clients that train in step with each
        other all hear at once and come back within milliseconds. Were the first one's pass to go at once, the others
        would be joined behind it, and the two groups would stay apart for good.
        """
        first, now = batch.members[0], time.monotonic()
        left = self._freed_at + _MOST_PATIENCE - now
        if left > 0 and any(self._before(session, first.session) for session in self._committing()):
            return left
        if first.op not in TRAIN or first.alone or not self._ended:
            return 0.0
        patience = min(_MOST_PATIENCE, _PATIENCE * self._usual)
        self._ended = {run: at for run, at in self._ended.items() if now - at < patience}
        room = self._budget - sum(member.tokens for member in batch.members)
        expected = [at for run, at in self._ended.items() if run not in waiting and self._sizes.get(run, 0) <= room]
        return max(0.0, max(expected) + patience - now) if expected else 0.0

    def _committing(self) -> set[SessionId]:
        """Sessions of runs whose next request has arrived, while the results of the one before are written down."""
        held = [handle for batch in self._in_hand if batch.freed for handle, _ in batch.held.values()]
        return {handle.run.session_id for handle in held if handle.queue.goes_on}

    def _before(self, session: SessionId, other: SessionId) -> bool:
        return session != other and self.shares.account(session).rank < self.shares.account(other).rank

    def _forget(self, run: RunId) -> None:
        self._ended.pop(run, None)
        self._sizes.pop(run, None)
