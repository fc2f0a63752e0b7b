"""Datums laid end to end before the output head: which of them are scored together, in pieces of how many rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from openrl.backends.common.lora import Segment
from openrl.types import Array, FloatArray

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Span(Generic[A]):
    """One datum's part of the flattened positions: `length` rows with targets int64 [N, K].

    `adapter` None: the head itself is trained, or nothing at all.
    """

    adapter: A | None
    targets: Array

    @property
    def length(self) -> int:
        return self.targets.shape[0]


class Judge(Protocol):
    """Takes the logprobs [N, K] of datum `index` and returns dL/dlp float32 [N, K], or None where there is none."""

    def __call__(self, index: int, logprobs: FloatArray) -> FloatArray | None: ...


def groups(spans: Sequence[Span[A]], rows: int) -> Iterator[tuple[int, int, int]]:
    """(first, last, start row) of runs of spans that have at most `rows` rows together, or of one that has more."""
    first = start = count = 0
    for index, span in enumerate(spans):
        if count and count + span.length > rows:
            yield first, index, start
            first, start, count = index, start + count, 0
        count += span.length
    if count:
        yield first, len(spans), start


def pieces(start: int, group: Sequence[Span[A]], rows: int) -> list[tuple[int, int, tuple[Segment[A], ...]]]:
    """(first row, last row, segments) of the parts of a group that have at most `rows` rows."""
    total = sum(span.length for span in group)
    if total <= rows:
        return [(start, start + total, _segments(group))]
    adapter = group[0].adapter
    bounds = [(lo, min(lo + rows, total)) for lo in range(0, total, rows)]
    return [(start + lo, start + hi, (Segment(0, hi - lo, adapter),)) for lo, hi in bounds]


def padded_targets(group: Sequence[Span[A]]) -> Array:
    """Targets of all spans [rows, largest K]; a smaller K is filled up with token 0, without gradient (L20)."""
    width = max(span.targets.shape[1] for span in group)
    padded = [np.pad(span.targets, ((0, 0), (0, width - span.targets.shape[1]))) for span in group]
    return np.concatenate(padded)


def judge_group(group: Sequence[Span[A]], first: int, lp: FloatArray, judge: Judge) -> FloatArray:
    """dL/dlp of a whole group, zeros for datums without one."""
    g = np.zeros_like(lp)
    start = 0
    for offset, span in enumerate(group):
        rows, k = slice(start, start + span.length), span.targets.shape[1]
        judged = judge(first + offset, lp[rows, :k])
        if judged is not None:
            g[rows, :k] = judged
        start += span.length
    return g


def _segments(group: Sequence[Span[A]]) -> tuple[Segment[A], ...]:
    """Rows of a group by adapter; neighbours of one adapter are one segment."""
    segments: list[Segment[A]] = []
    start = 0
    for span in group:
        stop = start + span.length
        if segments and segments[-1].adapter is span.adapter:
            start = segments.pop().start
        segments.append(Segment(start, stop, span.adapter))
        start = stop
    return tuple(segments)
