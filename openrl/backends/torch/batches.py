"""Cutting a pass into micro-batches: datums of like length together, under a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def cut(rows: Iterable[T], length: Callable[[T], int], max_tokens: int) -> list[list[T]]:
    """Micro-batches of about the same size, longest rows first; each holds at most `max_tokens` tokens, or one row.

    Longest first, so that the largest memory need shows at the start, and so that attention, which alone takes rows
    side by side, finds rows of like length in each.
    """
    ordered = sorted(rows, key=length, reverse=True)
    total = sum(length(row) for row in ordered)
    enough = total / max(1, -(-total // max_tokens))
    batches: list[list[T]] = []
    used = max_tokens
    for row in ordered:
        if used >= enough or used + length(row) > max_tokens:
            batches.append([])
            used = 0
        batches[-1].append(row)
        used += length(row)
    return batches


def halves(rows: Sequence[T]) -> list[list[T]]:
    """Two micro-batches instead of one that was too large."""
    middle = (len(rows) + 1) // 2
    return [list(rows[:middle]), list(rows[middle:])]
