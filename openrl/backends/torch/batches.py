"""Cutting a pass into micro-batches: datums of like length together, under a budget of padded tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

# Padding that a micro-batch may hold before it pays to start another one: what its fixed costs are worth in tokens.
_SPARE_TOKENS = 48
_SPARE_SHARE = 0.05


def cut(rows: Iterable[T], length: Callable[[T], int], max_tokens: int) -> list[list[T]]:
    """Micro-batches, longest rows first; each holds at most `max_tokens` tokens with its padding, or one row.

    Longest first, so that the largest memory need shows at the start.
    """
    batches: list[list[T]] = []
    batch: list[T] = []
    used = 0
    for row in sorted(rows, key=length, reverse=True):
        longest = length(batch[0]) if batch else length(row)
        padding = longest * (len(batch) + 1) - used - length(row)
        if batch and (longest * (len(batch) + 1) > max_tokens or padding > _SPARE_TOKENS + _SPARE_SHARE * used):
            batches.append(batch)
            batch, used = [], 0
        batch.append(row)
        used += length(row)
    return [*batches, batch] if batch else batches


def halves(rows: Sequence[T]) -> list[list[T]]:
    """Two micro-batches instead of one that was too large."""
    middle = (len(rows) + 1) // 2
    return [list(rows[:middle]), list(rows[middle:])]
