"""How many samples are under way, of which session, waiting or drawn: for limits, for status, and for whoever waits."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

from openrl.types import RequestId, SessionId, session_of


@dataclass(slots=True)
class Held:
    """A session's samples at one model. Those that wait are numbered in the order in which they came."""

    waiting: OrderedDict[RequestId, int] = field(default_factory=OrderedDict[RequestId, int])
    drawn: set[RequestId] = field(default_factory=set[RequestId])

    @property
    def count(self) -> int:
        return len(self.waiting) + len(self.drawn)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample stands among `waiting` ones, from 1 on: about, since nobody knows how long others will take."""

    position: int
    waiting: int
    others: tuple[SessionId, ...]  # other sessions that have samples there


class SampleCounts:
    """Told of each sample's life by `Sampling`."""

    def __init__(self) -> None:
        self._models: dict[str, dict[SessionId, Held]] = {}
        self._where: dict[RequestId, str] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._where)

    def add(self, request: RequestId, model: str) -> None:
        """An accepted sample waits."""
        self._where[request] = model
        self._number += 1
        sessions = self._models.setdefault(model, defaultdict(Held))
        sessions[session_of(request)].waiting[request] = self._number

    def begin(self, request: RequestId) -> None:
        """The sampler has it; also told of samples that have ended meanwhile."""
        if (model := self._where.get(request)) is not None:
            held = self._models[model][session_of(request)]
            if held.waiting.pop(request, None) is not None:
                held.drawn.add(request)

    def end(self, request: RequestId) -> None:
        """It has ended, however."""
        if (model := self._where.pop(request, None)) is not None:
            session = session_of(request)
            held = self._models[model][session]
            held.waiting.pop(request, None)
            held.drawn.discard(request)
            if not held.count:
                del self._models[model][session]

    def again(self, request: RequestId) -> None:
        """Its worker died; it waits once more."""
        if (model := self._where.get(request)) is not None:
            self.end(request)
            self.add(request, model)

    def at(self, model: str) -> dict[SessionId, Held]:
        """The sessions that have samples at a model; not to be changed."""
        return self._models.get(model, {})

    def sessions(self) -> dict[SessionId, int]:
        """How many samples each session has under way."""
        counts: dict[SessionId, int] = defaultdict(int)
        for sessions in self._models.values():
            for session, held in sessions.items():
                counts[session] += held.count
        return counts

    def place(self, request: RequestId) -> Place | None:
        """Where a sample stands in the queue; None once it is drawn. Sessions of equal weight take turns."""
        model = self._where.get(request)
        if model is None:
            return None
        mine, sessions = session_of(request), self._models[model]
        queue = sessions[mine].waiting
        if request not in queue:
            return None
        ahead = min(queue[request] - next(iter(queue.values())), len(queue) - 1)
        others = {session: len(held.waiting) for session, held in sessions.items() if session != mine}
        before = ahead + sum(min(count, ahead + 1) for count in others.values())
        return Place(before + 1, len(queue) + sum(others.values()), tuple(others))
