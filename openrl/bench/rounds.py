"""Takes all sides of a comparison in turns over the same work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from openrl.bench.result import Rates
from openrl.bench.workload import Example, Tokens

Tick = Callable[[str], None]


class Drawer(Protocol):
    """One side: draws so many tokens after each prompt, and says how many came."""

    def sample(self, prompts: Sequence[Tokens], new_tokens: int) -> int: ...


class Side(Drawer, Protocol):
    """One that also trains on a batch."""

    def train_step(self, batch: Sequence[Example]) -> None: ...


_S = TypeVar("_S", bound=Drawer)


def compare(
    name: str,
    sides: Mapping[str, _S],
    work: Callable[[_S], int],
    rounds: int,
    tick: Tick,
    warm: Callable[[_S], int] | None = None,
) -> Rates:
    """`work`, which returns its tokens, on each side, `rounds` times in turns, after one turn that does not count (of
    `warm`, if given).

    In turns, so that a machine that slows down or warms up does so for all; the side that goes first changes.
    """
    rates = Rates(name, {side: [] for side in sides})
    for number in range(rounds + 1):
        order = list(sides.items())
        first = number % len(order)
        for label, side in order[first:] + order[:first]:
            speed = _speed(side, work if number or warm is None else warm)
            if number > 0:
                rates.sides[label].append(speed)
            tick(f"{name}: {label}")
    return rates


def _speed(side: _S, work: Callable[[_S], int]) -> float:
    started = time.perf_counter()
    tokens = work(side)
    return tokens / (time.perf_counter() - started)
