"""What earlier requests computed, found again by its tokens: which prompt beginnings are stored, and who makes room.

A tree in which each step spells `BLOCK` tokens and names a block of keys and values. The first step also spells the
adapter's key, which stands for one immutable checkpoint and is never reused, so that new weights never meet what old
ones computed. Pure bookkeeping: the tensors are each engine's `Blocks`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

# Tokens of one step. Smaller ones find more, but each costs a lookup and a copy of its own.
BLOCK = 32

_Label = tuple[str | int, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """A block, and those that go on from it. `turn` is when it was last of use."""

    parent: _Node | None
    label: _Label
    block: int
    turn: int = 0
    children: dict[_Label, _Node] = field(default_factory=dict["_Label", "_Node"])


@dataclass(frozen=True, slots=True)
class Claim:
    """Blocks to be filled with one beginning's keys and values: `blocks[i]` with those of its block `first` + i."""

    first: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Since the start: `hits` prompts began with stored tokens, `hit_tokens` in all, which were not computed again;
    `computed_tokens` were. `stored_tokens` are held now, of at most `max_tokens`; `evicted_tokens` made room."""

    hits: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    stored_tokens: int = 0
    evicted_tokens: int = 0
    max_tokens: int = 0


class PrefixCache:
    """Hands out numbers of blocks, from 1, for at most `max_tokens` tokens; 0 stores nothing.

    What was of use in the current turn is never thrown out in it, so that what a pass reads is there until it ends.
    """

    def __init__(self, max_tokens: int) -> None:
        self._most = self._limit = max_tokens // BLOCK
        self._root = _Node(None, (), 0)
        # Least recently used first, and each node before its parent: so the first one has no children.
        self._order: OrderedDict[_Node, None] = OrderedDict()
        self._free: list[int] = []
        self._turn = 0
        self._stats = PrefixStats(max_tokens=self._most * BLOCK)
        self.size = 0  # blocks ever needed at once: the highest number handed out

    @property
    def limit(self) -> int:
        """Most blocks that may be held."""
        return self._limit

    def stats(self) -> PrefixStats:
        return replace(self._stats, stored_tokens=len(self._order) * BLOCK)

    def begin_turn(self) -> None:
        """What was of use until now may make room again."""
        self._turn += 1

    # ---- finding ----

    def find(self, key: str, tokens: Sequence[int], most: int) -> list[int]:
        """The blocks of the longest stored beginning of at most `most` tokens, under an adapter's key."""
        return [node.block for node in self._walk(key, tokens, most // BLOCK)]

    def use(self, key: str, tokens: Sequence[int], blocks: int) -> None:
        """Count a prompt of which the first `blocks` blocks, just found, are used and the rest is computed."""
        self._touch(self._walk(key, tokens, blocks))
        s = self._stats
        self._stats = replace(
            s,
            hits=s.hits + (blocks > 0),
            hit_tokens=s.hit_tokens + blocks * BLOCK,
            computed_tokens=s.computed_tokens + len(tokens) - blocks * BLOCK,
        )

    def _walk(self, key: str, tokens: Sequence[int], blocks: int) -> list[_Node]:
        path: list[_Node] = []
        node = self._root
        for label in _labels(key, tokens, blocks):
            if label not in node.children:
                break
            node = node.children[label]
            path.append(node)
        return path

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            node.turn = self._turn
            self._order.move_to_end(node)

    # ---- storing ----

    @contextmanager
    def claiming(self, wanted: Iterable[tuple[str, Sequence[int]]]) -> Generator[list[Claim]]:
        """Blocks for what is not yet stored of some beginnings (key, tokens), whole blocks of them, as far as there is
        room. They are filled within the `with`, and given back if that fails."""
        added: list[_Node] = []
        claims = [self._claim(key, tokens, added) for key, tokens in wanted]
        filled = False
        try:
            yield claims
            filled = True
        finally:
            if not filled:
                for node in reversed(added):
                    self._remove(node)

    def _claim(self, key: str, tokens: Sequence[int], added: list[_Node]) -> Claim:
        labels = list(_labels(key, tokens, len(tokens) // BLOCK))
        path = self._walk(key, tokens, len(labels))
        first = len(path)
        self._touch(path)
        blocks = self._take(len(labels) - first)
        for label, block in zip(labels[first:], blocks, strict=False):
            parent = path[-1] if path else self._root
            node = parent.children[label] = _Node(parent, label, block)
            self._order[node] = None
            path.append(node)
            added.append(node)
        self._touch(path)
        return Claim(first, blocks)

    def _take(self, count: int) -> list[int]:
        """Up to `count` blocks: unused ones, new ones, then those of whoever was not of use for longest."""
        taken: list[int] = []
        while len(taken) < count:
            if not self._free:
                if self.size < self._limit:
                    self.size += 1
                    self._free.append(self.size)
                elif not self._evict():
                    break
            taken.append(self._free.pop())
        return taken

    def _evict(self) -> bool:
        node = next(iter(self._order), None)
        if node is None or node.turn == self._turn:
            return False
        self._remove(node)
        self._stats = replace(self._stats, evicted_tokens=self._stats.evicted_tokens + BLOCK)
        return True

    def _remove(self, node: _Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.label]
        del self._order[node]
        self._free.append(node.block)

    # ---- memory ----

    def give_up(self) -> bool:
        """Forget everything and hold only half as much from now on; False if nothing was held."""
        held = self.size > 0
        if held:
            self._limit = min(self.size, self._limit) // 2
        self._root.children.clear()
        self._order.clear()
        self._free.clear()
        self.size = 0
        return held

    def relax(self) -> None:
        """Hold as much as at the start again."""
        self._limit = self._most


def reusable(config: Any) -> bool:
    """Whether a model's keys depend on nothing but the tokens so far, from its transformers config. Rotary angles of
    the kind "longrope" also depend on how long the sequence in hand is."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return all(kind.get("rope_type") != "longrope" for kind in kinds)


def _labels(key: str, tokens: Sequence[int], blocks: int) -> Iterator[_Label]:
    for i in range(min(blocks, len(tokens) // BLOCK)):
        label = tuple(tokens[i * BLOCK : (i + 1) * BLOCK])
        yield label if i else (key, *label)
