"""Logprobs of prompt tokens (S5, S7), through the float32 head a bounded number of positions at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.backends.torch.lora import Adapter, Segment
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.sequences import Job

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
    def scored(self) -> int:
        """How many prompt tokens these states predict: one each, none for the last of the prompt."""
        return min(len(self.hidden), len(self.job.prompt) - 1 - self.start)


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
    hidden = torch.cat([s.hidden[: s.scored] for s in spans])
    wanted = [token for s in spans for token in s.job.prompt[s.start + 1 : s.start + 1 + s.scored]]
    targets = torch.tensor(wanted, device=hidden.device)
    parts = segments((s.scored, s.job.adapter) for s in spans)
    top = max(s.job.source.payload.topk_prompt_logprobs for s in spans)
    scored = [
        _score_rows(model, hidden[i:j], targets[i:j], _clip(parts, i, j), top)
        for i, j in _windows(len(hidden), head_rows(model.vocab_size))
    ]
    _distribute(spans, scored)


def _windows(total: int, size: int) -> list[tuple[int, int]]:
    return [(i, min(i + size, total)) for i in range(0, total, size)]


def _clip(parts: Sequence[Segment], start: int, stop: int) -> tuple[Segment, ...]:
    inside = [s for s in parts if s.start < stop and s.stop > start]
    return tuple(Segment(max(s.start, start) - start, min(s.stop, stop) - start, s.adapter) for s in inside)


def _score_rows(model: CausalLM, hidden: Tensor, targets: Tensor, parts: tuple[Segment, ...], top: int) -> _Scored:
    logits = model.logits(hidden, parts)
    total = logits.logsumexp(-1, keepdim=True)
    best = logits.topk(top, -1)
    logprobs = logits.gather(-1, targets[:, None]) - total
    return _Scored(logprobs[:, 0].cpu(), best.indices.cpu(), (best.values - total).cpu())


def _distribute(spans: Sequence[Span], scored: Sequence[_Scored]) -> None:
    logprobs = torch.cat([s.logprobs for s in scored]).numpy()
    ids = torch.cat([s.ids for s in scored]).numpy()
    values = torch.cat([s.values for s in scored]).numpy()
    at = 0
    for span in spans:
        scores, count = span.job.scores, span.scored
        assert scores is not None
        first = span.start + 1
        scores.logprobs[first : first + count] = logprobs[at : at + count]
        if scores.top is not None:
            width = scores.top.ids.shape[1]
            scores.top.ids[first : first + count] = ids[at : at + count, :width]
            scores.top.logprobs[first : first + count] = values[at : at + count, :width]
        at += count
