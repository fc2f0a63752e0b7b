"""Who is computed next: the queue of sequences, those that are live, and what one prefill takes on.

Pure bookkeeping, nothing is computed here. Sequences are admitted first come, first served, while rows and cache
allow; only a little room to grow is asked for, not a request's whole `max_tokens`, since most end early. Among those
that could be admitted, prompts of like length are computed together, the first in the queue always among them. When
the cache runs full all the same, the youngest gives way: it loses its keys and values, keeps its tokens, and is
computed anew when there is room. The oldest never gives way and any one sequence fits alone, so that work always goes
on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from itertools import chain, islice

from openrl.backends.common.prefill import Prefix, choose, part
from openrl.backends.common.sequences import Job, Sequence

_MANY = 1 << 30
_HEADROOM = 64  # tokens a newcomer must have room for beside those it brings
# Beginnings at the head of the queue among which those of like length are looked for, and how far into the queue.
_VIEW = 256
_FURTHEST = 2048

# The stored blocks that a sequence, of which at most some tokens may be taken from the store, begins with.
Finder = Callable[[Sequence, int], list[int]]


class Schedule:
    """The sequences of the sampler and the rules of admission. `fits(slots, length)` speaks for the cache, `find` for
    the store of prompt beginnings; `reach` is how many tokens it takes before attending to them costs as much as all
    else."""

    def __init__(
        self,
        max_rows: int,
        prefill_tokens: int,
        fits: Callable[[int, int], bool],
        find: Finder = lambda *_: [],
        reach: float = 1e9,
    ) -> None:
        self._max_rows = max_rows
        self._max_prefill = prefill_tokens
        self._fits = fits
        self._find = find
        self._reach = reach
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

    def has_only(self, job: Job) -> bool:
        """Whether all sequences are one job's."""
        growing = self.growing.members if self.growing else ()
        return all(s.job is job for s in chain(self.live, growing, self.waiting))

    def longest(self) -> int:
        """Columns of the cache that the next decoding step needs."""
        longest = max((s.length for s in self.live), default=0)
        return max(longest, len(self.growing.tokens)) if self.growing else longest

    def relax(self) -> None:
        """Forget the limits that memory trouble imposed."""
        self.rows, self.prefixes, self.prefill_tokens = self._max_rows, _MANY, self._max_prefill

    def plan(self) -> list[Prefix]:
        """Take from the queue what one turn can prefill: prompts that together, padded, stay within `prefill_tokens`.

        One that is longer than that alone comes alone, to be computed in parts, and only while no other one is.
        """
        candidates = self._admissible()
        if candidates and candidates[0].long and self.growing is None:
            plan = candidates[:1]
        else:
            plan = choose([c for c in candidates if not c.long], self.prefill_tokens, self.prefixes)
        taken = {m for p in plan for m in p.members}
        if taken:
            self.waiting = deque(s for s in self.waiting if s not in taken)
        return plan

    def _admissible(self) -> list[Prefix]:
        """The beginnings at the head of the queue, each with the sequences for which there is room beside all before.

        Once there is none for one sequence, none after it gets a slot, however small: it would wait for ever.
        """
        tail = [self.growing.members[0]] if self.growing else []
        self._claimed = self.slots, max(map(_columns, [*self.live, *tail]), default=0)
        sources = {s.job.origin: s for s in self.live}
        found: list[Prefix] = []
        full = False
        for group in self._groups():
            if full and not any(member.last for member in group):
                continue
            prefix = self._prefix(group, sources)
            full = self._admit(prefix, full)
            if prefix.members:
                found.append(prefix)
        return found

    def _admit(self, prefix: Prefix, full: bool) -> bool:
        """Leave only those members for which there is room; whether there is none for more now."""
        group, prefix.members = prefix.members, []
        for member in group:
            needed = not member.last or (prefix.long and not prefix.members)
            full = full or (needed and not self._claim(member))
            if not (needed and full):
                prefix.members.append(member)
            elif prefix.long and not prefix.members:
                break  # nobody has a slot in which the prompt could be computed
        return full

    def _claim(self, sequence: Sequence) -> bool:
        """Ask for a row and its columns; whether they are to be had. One sequence alone always fits."""
        rows, reach = self._claimed[0] + 1, max(self._claimed[1], _columns(sequence))
        if rows > 1 and not (rows <= self.rows and self._fits(rows, reach)):
            return False
        self._claimed = rows, reach
        return True

    def _groups(self) -> list[list[Sequence]]:
        """Waiting sequences by what they start from, in the order of the first of each."""
        groups: dict[object, list[Sequence]] = {}
        for sequence in islice(self.waiting, _FURTHEST):
            start = sequence if sequence.begun else sequence.job.origin
            if start in groups:
                groups[start].append(sequence)
            elif len(groups) < _VIEW:
                groups[start] = [sequence]
        return list(groups.values())

    def _prefix(self, group: list[Sequence], sources: Mapping[tuple[str, bytes], Sequence]) -> Prefix:
        """What a group starts from, if not a live sequence (`sources`, by what they started from) that has it all."""
        head = group[0]
        unscored = [m.job.scores.begin for m in group if m.job.scores and m.job.unscored]
        if not (unscored or head.begun) and head.job.origin in sources:
            return Prefix(head.history(), group, source=sources[head.job.origin])
        prefix = Prefix(head.history(), group)
        # The last token's hidden state is not stored, nor are those that tell of the prompt tokens after them.
        prefix.blocks = self._find(head, min([len(prefix.tokens), *unscored]) - 1)
        prefix.long = prefix.fresh > self.part(prefix)
        prefix.done = prefix.start
        return prefix

    def part(self, prefix: Prefix) -> int:
        """How many more tokens of a prefix one turn may compute."""
        return part(self.prefill_tokens, max(prefix.done, prefix.start), self._reach)

    def surplus(self) -> list[Sequence]:
        """The youngest that must give way before the rest can decode."""
        back: list[Sequence] = []
        stay, tail = self.live, self.growing
        while len(stay) + (tail is not None) > 1:
            longest = max([s.length for s in stay] + ([len(tail.tokens)] if tail else []))
            if self._fits(len(stay) + (tail is not None), longest):
                break
            if tail is not None:
                back, tail = back + tail.members, None
            else:
                youngest = max(stay, key=lambda s: s.order)
                back.append(youngest)
                stay = [s for s in stay if s is not youngest]
        return back

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
        if self.growing is not None:
            held += self._leave(self.growing, job)
        return held

    def _leave(self, growing: Prefix, job: Job) -> list[Sequence]:
        """Take a job out of the prompt that is computed in parts; another's sequence takes over the slot, if any."""
        leader = growing.members[0]
        growing.members = [m for m in growing.members if m.job is not job]
        if growing.members and growing.members[0] is not leader:
            growing.members[0].slot, leader.slot = leader.slot, -1
        elif not growing.members:
            self.growing = None
            return [leader]
        return []


def _columns(sequence: Sequence) -> int:
    return min(sequence.length + _HEADROOM, sequence.final_length)
