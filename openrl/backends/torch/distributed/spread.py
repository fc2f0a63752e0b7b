"""Which rank computes which datum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def spread(rows: Sequence[T], cost: Callable[[T], int], ranks: int) -> list[list[T]]:
    """The rows of each rank: the longest first, each to the rank that has least, the lower one among equals. With fewer
    rows than ranks, some have none."""
    parts: list[list[T]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(rows, key=cost, reverse=True):
        rank = loads.index(min(loads))
        parts[rank].append(row)
        loads[rank] += cost(row)
    return parts
