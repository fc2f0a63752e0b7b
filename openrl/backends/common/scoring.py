"""Whose prompt tokens a pass can score, and what becomes of the scores; the sums are each engine's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from openrl.backends.common.extras import Alternatives, Targets
from openrl.backends.common.sequences import Job, PromptScores
from openrl.types import FloatArray

_CELLS = 1 << 24  # float32 logits held at once: 64 MiB


def head_rows(vocab: int) -> int:
    """How many rows of logits may be held at once."""
    return max(1, _CELLS // vocab)


@dataclass(frozen=True, slots=True)
class Span:
    """Hidden states [tokens, H], the engine's own, of a job's prompt from position `start`."""

    job: Job
    start: int
    hidden: Any

    @property
    def first(self) -> int:
        """The first of the states, counted from the prompt's start, that tells of a token of which anything is asked:
        each tells of the token after its own."""
        return max(self.start, self.scores.begin - 1)

    @property
    def scored(self) -> int:
        """How many of them there are; the prompt's last one tells of none."""
        return max(0, min(self.start + len(self.hidden), len(self.job.prompt) - 1) - self.first)

    @property
    def wanted(self) -> Any:
        """Those states."""
        begin = self.first - self.start
        return self.hidden[begin : begin + self.scored]

    @property
    def targets(self) -> list[int]:
        """The tokens that they tell of."""
        return self.job.prompt[self.first + 1 : self.first + 1 + self.scored]

    @property
    def scores(self) -> PromptScores:
        assert self.job.scores is not None
        return self.job.scores


def to_score(spans: Sequence[Span]) -> list[Span]:
    """Those of which anything is asked."""
    return [s for s in spans if s.job.scores is not None and s.scored > 0]


def most(spans: Sequence[Span]) -> int:
    """How many of the most likely tokens any of them wants."""
    return max(s.job.source.payload.topk_prompt_logprobs for s in spans)


def windows(total: int, size: int) -> list[tuple[int, int]]:
    """Rows 0..`total` in parts of at most `size`."""
    return [(i, min(i + size, total)) for i in range(0, total, size)]


def extras_in(spans: Sequence[Span], start: int, stop: int) -> Iterator[tuple[Targets | Alternatives, slice, int]]:
    """Who asks for more of the spans' rows `start`..`stop`: with which of these rows, counted from `start`, are theirs,
    and the prompt row that the first of those is."""
    at = 0
    for span in spans:
        low, high = max(start, at), min(stop, at + span.scored)
        if low < high:
            for extra in span.scores.extras:
                yield extra, slice(low - start, high - start), span.first + low - at
        at += span.scored


def distribute(spans: Sequence[Span], logprobs: FloatArray, ids: npt.NDArray[Any], values: FloatArray) -> None:
    """Hand out the logprobs [M] of all spans' targets, and the most likely ids and their logprobs [M, top]."""
    at = 0
    for span in spans:
        scores, stop = span.scores, at + span.scored
        first = max(span.first + 1, scores.first)
        begin, positions = at + first - span.first - 1, slice(first, span.first + 1 + span.scored)
        if begin < stop:
            scores.logprobs[positions] = logprobs[begin:stop]
            if scores.top is not None:
                width = scores.top.ids.shape[1]
                scores.top.ids[positions] = ids[begin:stop, :width]
                scores.top.logprobs[positions] = values[begin:stop, :width]
        at = stop
