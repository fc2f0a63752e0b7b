"""Samples that wait for the sampler, in fair order between sessions: pure bookkeeping.

Tokens are counted as in the paper that `openrl.shares` names: a prompt token once, a drawn token twice. What a sample
will draw is guessed when it begins, from what its session's samples drew lately, and counts at once: long samples hold
their rows for long, so a session of long ones must be given rows less often from the start. What was really drawn
counts in the end, and as soon as it is more than the guess.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from openrl.backends.base import SampleJob
from openrl.shares import Shares
from openrl.types import RequestId, SampleOutput, SessionId, session_of

_DRAWN = 2  # cost of a drawn token, in prompt tokens: it needs a pass over the weights for itself
_FIRST_GUESS = 128  # tokens of a sequence, of a session of which nothing is known
_FADING = 0.9  # weight of the past in the guess, at each sample
_GUESSES = 1000  # sessions that are remembered


@dataclass(slots=True)
class _Begun:
    """A sample that the sampler has: what its session has been charged for it, and what of that is used up."""

    session: SessionId
    prompt: int
    charged: float
    used: float


class Backlog:
    """Who waits, and whom the sampler has. A session's own samples go in the order in which they came."""

    def __init__(self) -> None:
        self._shares = Shares()
        self._waiting: dict[SessionId, OrderedDict[RequestId, SampleJob]] = {}
        self._begun: dict[RequestId, _Begun] = {}
        self._held: Counter[SessionId] = Counter()  # samples of each session, waiting and begun
        self._weights: dict[SessionId, float] = {}
        self._guesses: OrderedDict[SessionId, float] = OrderedDict()  # tokens of a sequence

    def __len__(self) -> int:
        """Samples that wait."""
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, job: SampleJob) -> bool:
        """Queue a sample. True if it is the only one of its session."""
        session = session_of(job.request)
        self._waiting.setdefault(session, OrderedDict())[job.request] = job
        self._held[session] += 1
        if self._weights.get(session) != job.weight:
            self._weights[session] = job.weight
            self._shares.sync(self._weights)
        return self._held[session] == 1

    def take(self) -> SampleJob:
        """The next sample for the sampler, of those that wait; there must be one."""
        session = min(self._waiting, key=lambda session: self._shares.account(session).rank)
        _, job = self._waiting[session].popitem(last=False)
        if not self._waiting[session]:
            del self._waiting[session]
        prompt = len(job.payload.prompt)
        cost = prompt + _DRAWN * self._guess(session, job)
        self._begun[job.request] = _Begun(session, prompt, cost, prompt)
        self._shares.serve(session, cost)
        return job

    def begun(self) -> list[RequestId]:
        """The samples that the sampler has."""
        return list(self._begun)

    def drawn(self, rows: Iterable[RequestId]) -> None:
        """A turn in which each of these rows drew about a token; what that was exactly is settled at the end."""
        for request in rows:
            if (begun := self._begun.get(request)) is not None:
                begun.used += _DRAWN
                if begun.used > begun.charged:
                    self._charge(begun, begun.used)

    def end(self, request: RequestId, output: SampleOutput | None) -> None:
        """A sample has ended, with `output` or without any; or it is given up, waiting or not."""
        begun = self._begun.pop(request, None)
        if begun is not None:
            if output is not None:
                self._learn(begun.session, output)
                drawn = sum(len(sequence.tokens) for sequence in output.sequences)
                begun.used = begun.prompt + _DRAWN * drawn
            self._charge(begun, begun.used)
            self._leave(begun.session)
        elif self._drop(request):
            self._leave(session_of(request))

    def _charge(self, begun: _Begun, whole: float) -> None:
        """Make `whole` what a sample's session has been charged for it."""
        self._shares.charge(begun.session, whole - begun.charged)
        begun.charged = whole

    def _guess(self, session: SessionId, job: SampleJob) -> float:
        usual = self._guesses.get(session, _FIRST_GUESS)
        most = job.payload.params.max_tokens
        return job.payload.num_samples * (usual if most is None else min(usual, most))

    def _learn(self, session: SessionId, output: SampleOutput) -> None:
        for sequence in output.sequences:
            usual = self._guesses.get(session, float(len(sequence.tokens)))
            self._guesses[session] = _FADING * usual + (1 - _FADING) * len(sequence.tokens)
            self._guesses.move_to_end(session)
        if len(self._guesses) > _GUESSES:
            self._guesses.popitem(last=False)

    def _drop(self, request: RequestId) -> bool:
        session = session_of(request)
        queue = self._waiting.get(session)
        if queue is None or queue.pop(request, None) is None:
            return False
        if not queue:
            del self._waiting[session]
        return True

    def _leave(self, session: SessionId) -> None:
        self._held[session] -= 1
        if not self._held[session]:
            del self._held[session], self._weights[session]
            self._shares.sync(self._weights)
