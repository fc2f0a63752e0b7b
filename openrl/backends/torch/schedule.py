"""Who is computed next: the queue of sequences, those that are live, and what one prefill takes on.

Pure bookkeeping, nothing is computed here. Sequences are admitted first come, first served, while rows and cache
allow; only a little room to grow is asked for, not a request's whole `max_tokens`, since most end early. When the
cache runs full all the same, the youngest gives way: it loses its keys and values, keeps its tokens, and is computed
anew when there is room. The oldest never gives way and any one sequence fits alone, so that work always goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from torch import Tensor

from openrl.backends.torch.sequences import Job, Sequence

_MANY = 1 << 30
_HEADROOM = 64  # tokens a newcomer must have room for beside those it brings


@dataclass(slots=True, eq=False)
class Prefix:
    """Sequences that go on from the same tokens, which are therefore computed once.

    `source` is a live sequence whose cache already begins with these tokens; then they need not be computed at all.
    """

    tokens: list[int]
    members: list[Sequence]
    source: Sequence | None = None
    done: int = 0  # tokens computed so far, where that takes several turns
    end: Tensor | None = None  # hidden state [H] of the last token, once computed

    @property
    def job(self) -> Job:
        return self.members[0].job


class Schedule:
    """The sequences of the sampler and the rules of admission. `fits(slots, length)` speaks for the cache."""

    def __init__(self, max_rows: int, prefill_tokens: int, fits: Callable[[int, int], bool]) -> None:
        self._max_rows = max_rows
        self._max_prefill = prefill_tokens
        self._fits = fits
        self.waiting: deque[Sequence] = deque()
        self.live: list[Sequence] = []
        self.growing: Prefix | None = None  # a long prompt, computed in parts; its first member holds a slot
        self.rows = max_rows
        self.prefixes = _MANY
        self.prefill_tokens = prefill_tokens
        self._claimed = 0, 0  # rows and columns that live sequences and the plan being made ask for

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.live or self.growing)

    @property
    def slots(self) -> int:
        """Slots of the cache in use."""
        return len(self.live) + (self.growing is not None)

    def everyone(self) -> list[Sequence]:
        """All sequences that are not complete."""
        return [*self.waiting, *self.live, *(self.growing.members if self.growing else ())]

    def longest(self) -> int:
        """Columns of the cache that the next decoding step needs."""
        longest = max((s.length for s in self.live), default=0)
        return max(longest, len(self.growing.tokens)) if self.growing else longest

    def relax(self) -> None:
        """Forget the limits that memory trouble imposed."""
        self.rows, self.prefixes, self.prefill_tokens = self._max_rows, _MANY, self._max_prefill

    def plan(self) -> list[Prefix]:
        """Take from the queue what one turn can prefill: prompts that together, padded, stay within `prefill_tokens`.

        One that is longer than that alone comes alone, to be computed in parts.
        """
        plan: list[Prefix] = []
        self._claimed = len(self.live), max(map(_reach, self.live), default=0)
        computed, widest = 0, 0
        while self.waiting and len(plan) < self.prefixes:
            head = self.waiting[0]
            source = self._source(head)
            width = max(widest, head.length)
            if source is None and plan and (self.long(head) or (computed + 1) * width > self.prefill_tokens):
                break
            tokens, members = head.history(), self._take()
            if not members:
                break
            plan.append(Prefix(tokens, members, source))
            if source is None:
                computed, widest = computed + 1, width
            if source is None and self.long(head):
                break
        return plan

    def _take(self) -> list[Sequence]:
        """Sequences from the head of the queue that share their tokens, as far as there is room for them."""
        members: list[Sequence] = []
        while self.waiting and (not members or _alike(members[0], self.waiting[0])):
            head = self.waiting[0]
            if self.needs_slot(head):
                rows, reach = self._claimed[0] + 1, max(self._claimed[1], _reach(head))
                if rows > 1 and not (rows <= self.rows and self._fits(rows, reach)):
                    break
                self._claimed = rows, reach
            members.append(self.waiting.popleft())
        return members

    def _source(self, sequence: Sequence) -> Sequence | None:
        """A live sample of the same job, for one that has not begun."""
        if sequence.tokens or sequence.job.end is None:
            return None
        return next((s for s in self.live if s.job is sequence.job), None)

    def long(self, sequence: Sequence) -> bool:
        """Whether its tokens are too many for one turn."""
        return sequence.length > self.prefill_tokens

    def needs_slot(self, sequence: Sequence) -> bool:
        """One that draws a single token does not, unless its prompt is computed in parts."""
        return not sequence.last or self.long(sequence)

    def make_room(self) -> None:
        """Send the youngest back to the queue until the rest can decode."""
        while self.slots > 1 and not self._fits(self.slots, self.longest()):
            self.send_back(1)

    def send_back(self, count: int) -> None:
        """Return the youngest holders of `count` slots to the queue."""
        for _ in range(count):
            if self.growing is not None:
                back, self.growing = self.growing.members, None
            else:
                back = [max(self.live, key=lambda s: s.order)]
            self.requeue(back)

    def requeue(self, sequences: Iterable[Sequence]) -> None:
        """Take sequences out of whatever they are in and put them back where they were in the queue."""
        back = set(sequences)
        for sequence in back:
            sequence.slot = -1
        if self.growing is not None and self.growing.members[0] in back:
            self.growing = None
        self.retire(back)
        self.waiting = deque(sorted(back.union(self.waiting), key=lambda s: s.order))

    def retire(self, sequences: Set[Sequence]) -> None:
        """Take sequences out of the live ones. The list is a new one whenever it changes."""
        if any(s in sequences for s in self.live):
            self.live = [s for s in self.live if s not in sequences]

    def drop(self, job: Job) -> list[Sequence]:
        """Forget a job; returns its sequences that held a slot."""
        held = [s for s in self.live if s.job is job]
        self.retire(set(held))
        self.waiting = deque(s for s in self.waiting if s.job is not job)
        if self.growing is not None and self.growing.job is job:
            held.append(self.growing.members[0])
            self.growing = None
        return held


def _alike(first: Sequence, other: Sequence) -> bool:
    """Whether two sequences start from the same tokens: unbegun samples of one job."""
    return first.job is other.job and not first.tokens and not other.tokens


def _reach(sequence: Sequence) -> int:
    return min(sequence.length + _HEADROOM, sequence.final_length)
