"""Cutting a pass into micro-batches under a budget of tokens: datums of one run together, of like length in it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")


def cut(
    rows: Iterable[T], length: Callable[[T], int], group: Callable[[T], Hashable], max_tokens: int
) -> list[list[T]]:
    """Micro-batches of about the same size; each holds at most `max_tokens` tokens, or one row.

    Groups stay together, those with the longest rows first, and so do rows of like length in each. A micro-batch costs
    more the more groups (adapters) it has; only what is left of them shares one. Longest first, so that the largest
    memory need shows at the start; like lengths, because attention takes rows side by side.
    """
    groups: dict[Hashable, list[T]] = {}
    for row in sorted(rows, key=length, reverse=True):
        groups.setdefault(group(row), []).append(row)
    ordered = [row for members in groups.values() for row in members]
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


def cut_padded(
    rows: Iterable[T], length: Callable[[T], int], group: Callable[[T], Hashable], max_tokens: int
) -> list[list[T]]:
    """As `cut`, where rows are padded to the longest of their micro-batch: what counts is rows times that.

    A row that would be mostly padding begins a micro-batch of its own.
    """
    groups: dict[Hashable, list[T]] = {}
    for row in sorted(rows, key=length, reverse=True):
        groups.setdefault(group(row), []).append(row)
    batches: list[list[T]] = []
    shortest = longest = 0
    for row in (row for members in groups.values() for row in members):
        tokens = length(row)
        low, high = min(shortest, tokens), max(longest, tokens)
        if not batches or (len(batches[-1]) + 1) * high > max_tokens or 2 * low < high:
            batches.append([])
            low = high = tokens
        batches[-1].append(row)
        shortest, longest = low, high
    return batches
