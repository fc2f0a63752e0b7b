"""What one prefill takes on: prompts of like length, so that little of a padded pass is padding.

Costs are in tokens. A pass computes as many for each of its rows as for the longest, and reads the stored beginnings
of all as if each were as long as the longest, which is cheap but not for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from openrl.backends.common.prefix_cache import BLOCK
from openrl.backends.common.sequences import Job, Sequence

_STORED_PER_TOKEN = 32  # stored tokens that are read in the time in which one is computed
_PASS = 64  # tokens that could be computed in the time which a pass takes beside its tokens
_TIGHT = _PASS // 4
_SMALLEST_PART = 64


@dataclass(slots=True, eq=False)
class Prefix:
    """Sequences that go on from the same tokens under the same adapter; the tokens are therefore computed once.

    `source` is a live sequence whose cache already begins with these tokens; then they need not be computed at all.
    """

    tokens: list[int]
    members: list[Sequence]
    source: Sequence | None = None
    blocks: list[int] = field(default_factory=list[int])  # of the stored beginning, which is not computed again
    long: bool = False  # too much for one turn: computed in parts, in the slot of the first member
    done: int = 0  # tokens that are there so far, stored or computed
    end: Any = None  # the engine's own: hidden state [H] of the last token, once computed

    @property
    def job(self) -> Job:
        """The first member's, whose adapter is everyone's."""
        return self.members[0].job

    @property
    def jobs(self) -> list[Job]:
        return list(dict.fromkeys(m.job for m in self.members))

    @property
    def start(self) -> int:
        """Tokens that are stored."""
        return len(self.blocks) * BLOCK

    @property
    def fresh(self) -> int:
        """Tokens to be computed."""
        return 0 if self.source else len(self.tokens) - self.start

    @property
    def keepers(self) -> list[Sequence]:
        """Members that need a slot: those that draw more than one token, and the one whose slot a long prompt fills."""
        return [m for i, m in enumerate(self.members) if not m.last or (self.long and i == 0)]


def part(budget: int, start: int, reach: float) -> int:
    """How many tokens from position `start` on are computed in the time of `budget` tokens at the very beginning: each
    also attends to those before it, and that takes as long as all else once they are `reach`."""
    scaled = int(budget * reach / (reach + start)) // BLOCK * BLOCK
    return min(budget, max(_SMALLEST_PART, scaled))


@dataclass(frozen=True, slots=True)
class _Pass:
    """A padded pass: `rows` of `width` new tokens after `past` stored ones."""

    rows: int = 0
    width: int = 0
    past: int = 0

    @property
    def cost(self) -> float:
        return self.rows * (self.width + self.past / _STORED_PER_TOKEN)

    def joined(self, prefix: Prefix) -> _Pass:
        return _Pass(self.rows + 1, max(self.width, prefix.fresh), max(self.past, prefix.start))


def choose(candidates: Items[Prefix], budget: int, most: int) -> list[Prefix]:
    """At most `most` of the candidates, which are in the order of their arrival, for a pass of `budget` tokens.

    The first one always goes, so that nobody waits for ever. Then those go that bring hardly any padding, and then,
    since a pass of its own costs too, those that bring no more than that.
    """
    chosen: dict[Prefix, None] = {}
    total = _Pass()
    for padding in (_TIGHT, max(_PASS, budget // 8)):
        for prefix in candidates:
            if len(chosen) == most:
                break
            if prefix in chosen:
                continue
            joined = total.joined(prefix) if prefix.source is None else total
            wasted = joined.cost - total.cost - _Pass().joined(prefix).cost
            if not chosen or joined is total or (joined.cost <= budget and wasted <= padding):
                chosen[prefix] = None
                total = joined
    return list(chosen)
