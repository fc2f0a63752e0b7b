"""Logprobs of prompt tokens (S5, S7), through the float32 head a bounded number of positions at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.backends.torch.lora import Adapter, Segment
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.sequences import Job, PromptScores

_CELLS = 1 << 24  # float32 logits held at once: 64 MiB


def head_rows(vocab: int) -> int:
    """How many rows of logits may be held at once."""
    return max(1, _CELLS // vocab)


def segments(runs: Iterable[tuple[int, Adapter | None]]) -> tuple[Segment, ...]:
    """Segments of (rows, adapter) runs that follow one another; neighbours with the same adapter become one."""
    merged: list[Segment] = []
    start = 0
    for rows, adapter in runs:
        stop = start + rows
        if merged and merged[-1].adapter is adapter:
            merged[-1] = Segment(merged[-1].start, stop, adapter)
        else:
            merged.append(Segment(start, stop, adapter))
        start = stop
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Span:
    """Hidden states [tokens, H] of a job's prompt from position `start`."""

    job: Job
    start: int
    hidden: Tensor

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
    def wanted(self) -> Tensor:
        """Those states."""
        begin = self.first - self.start
        return self.hidden[begin : begin + self.scored]

    @property
    def scores(self) -> PromptScores:
        assert self.job.scores is not None
        return self.job.scores


@dataclass(frozen=True, slots=True)
class _Scored:
    """Logprobs [M], and the most likely ids and logprobs [M, top]."""

    logprobs: Tensor
    ids: Tensor
    values: Tensor


def score(model: CausalLM, spans: Sequence[Span]) -> None:
    """Fill the scores of the spans' jobs, at temperature 1 (S5). Spans of one adapter are neighbours."""
    spans = [s for s in spans if s.job.scores is not None and s.scored > 0]
    if not spans:
        return
    hidden = torch.cat([s.wanted for s in spans])
    tokens = [token for s in spans for token in s.job.prompt[s.first + 1 : s.first + 1 + s.scored]]
    targets = torch.tensor(tokens, device=hidden.device)
    parts = segments((s.scored, s.job.adapter) for s in spans)
    top = max(s.job.source.payload.topk_prompt_logprobs for s in spans)
    scored: list[_Scored] = []
    for i, j in _windows(len(hidden), head_rows(model.vocab_size)):
        logits = model.logits(hidden[i:j], _clip(parts, i, j))
        total = logits.logsumexp(-1, keepdim=True)
        scored.append(_score_rows(logits, total, targets[i:j], top))
        _fill_extras(spans, i, logits, total)
    _distribute(spans, scored)


def _windows(total: int, size: int) -> list[tuple[int, int]]:
    return [(i, min(i + size, total)) for i in range(0, total, size)]


def _clip(parts: Sequence[Segment], start: int, stop: int) -> tuple[Segment, ...]:
    inside = [s for s in parts if s.start < stop and s.stop > start]
    return tuple(Segment(max(s.start, start) - start, min(s.stop, stop) - start, s.adapter) for s in inside)


def _score_rows(logits: Tensor, total: Tensor, targets: Tensor, top: int) -> _Scored:
    best = logits.topk(top, -1)
    logprobs = logits.gather(-1, targets[:, None]) - total
    return _Scored(logprobs[:, 0].cpu(), best.indices.cpu(), (best.values - total).cpu())


def _fill_extras(spans: Sequence[Span], start: int, logits: Tensor, total: Tensor) -> None:
    """Show a window's logits, those from row `start` of all spans together, to whoever asks for more."""
    at = 0
    for span in spans:
        low, high = max(start, at), min(start + len(logits), at + span.scored)
        if low < high:
            part = slice(low - start, high - start)
            for extra in span.scores.extras:
                extra.fill(span.first + low - at, logits[part], total[part])
        at += span.scored


def _distribute(spans: Sequence[Span], scored: Sequence[_Scored]) -> None:
    logprobs = torch.cat([s.logprobs for s in scored]).numpy()
    ids = torch.cat([s.ids for s in scored]).numpy()
    values = torch.cat([s.values for s in scored]).numpy()
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
