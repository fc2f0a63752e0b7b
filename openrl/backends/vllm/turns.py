"""Whose weights vLLM holds, and whose are next: it has room for one set of them at a time.

A turn is of one set of weights: the base model's, adapters included, or those of one checkpoint of a whole model.
Whatever waits for these weights when their turn begins belongs to it, and what comes later joins as long as nobody
waits for others. The turn ends when all that belongs to it is done; the next is that of the request that has waited
longest. So no side starves, and weights change no more often than they must.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from openrl.types import RequestId

BASE = ""  # the weights that vLLM was opened with


@dataclass(slots=True)
class Turns:
    """Pure bookkeeping. Weights are named by their checkpoint's key, the base model's by `BASE`."""

    holds: str = BASE  # while `loading`: what is being loaded
    loading: bool = False
    _members: set[RequestId] = field(default_factory=set[RequestId])  # of the present turn

    def take(self, queue: Sequence[tuple[RequestId, str]]) -> str | None:
        """What to load now, if it is time for other weights. `queue`: all requests that are not done and the weights
        each needs, in the order in which they came. Not to be called while `loading`."""
        self._members &= {request for request, _ in queue}
        if not self._members and queue and queue[0][1] != self.holds:
            return queue[0][1]
        if not self._members or all(weights == self.holds for _, weights in queue):
            self._members = {request for request, weights in queue if weights == self.holds}
        return None

    def has(self, request: RequestId) -> bool:
        """Whether it is a request's turn."""
        return not self.loading and request in self._members

    def load(self, weights: str) -> None:
        """Loading has begun."""
        self.holds, self.loading = weights, True
        self._members.clear()

    def loaded(self, weights: str) -> None:
        """These are in place: those asked for, or the base model's after a failure."""
        self.holds, self.loading = weights, False

    def clear(self) -> None:
        """vLLM has ended; the next one is opened with the base model's weights."""
        self.loaded(BASE)
        self._members.clear()
