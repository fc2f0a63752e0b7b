"""Logprobs of prompt tokens (S5, S7) with MLX, through the float32 head a bounded number of positions at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from openrl.backends.common import scoring
from openrl.backends.common.extras import Alternatives, Targets
from openrl.backends.common.inverse import Index
from openrl.backends.common.lora import segments_of
from openrl.backends.common.scoring import Span, head_rows
from openrl.backends.mps.model import MlxModel
from openrl.backends.mps.sample_draw import draw_repeatedly
from openrl.types import FloatArray


@dataclass(frozen=True, slots=True)
class _Scored:
    """Logprobs [M], and the most likely ids and logprobs [M, top]."""

    logprobs: FloatArray
    ids: Index
    values: FloatArray


def score(model: MlxModel, spans: Sequence[Span]) -> None:
    """Fill the scores of the spans' jobs, at temperature 1 (S5). Spans of one adapter are neighbours."""
    spans = scoring.to_score(spans)
    if not spans:
        return
    hidden = mx.concatenate([s.wanted for s in spans])
    targets = mx.array([token for s in spans for token in s.targets])
    adapters = [s.job.adapter for s in spans for _ in range(s.scored)]
    top = scoring.most(spans)
    scored: list[_Scored] = []
    for i, j in scoring.windows(len(hidden), head_rows(model.vocab_size)):
        logits = model.logits(hidden[i:j], segments_of(adapters[i:j]))
        total = mx.logsumexp(logits, axis=-1, keepdims=True)
        scored.append(_score_rows(logits, total, targets[i:j], top))
        for extra, rows, first in scoring.extras_in(spans, i, j):
            _fill(extra, first, logits[rows], total[rows])
    scoring.distribute(
        spans,
        np.concatenate([s.logprobs for s in scored]),
        np.concatenate([s.ids for s in scored]),
        np.concatenate([s.values for s in scored]),
    )


def _score_rows(logits: mx.array, total: mx.array, targets: mx.array, top: int) -> _Scored:
    logprobs = mx.take_along_axis(logits, targets[:, None], axis=-1) - total
    ids = mx.argsort(-logits, axis=-1)[:, :top] if top else mx.zeros((len(logits), 0), mx.int32)
    values = mx.take_along_axis(logits, ids, axis=-1) - total if top else mx.zeros((len(logits), 0))
    mx.eval(logprobs, ids, values)
    return _Scored(np.array(logprobs)[:, 0], np.array(ids).astype(np.int64), np.array(values))


def _fill(extra: Targets | Alternatives, start: int, logits: mx.array, total: mx.array) -> None:
    """Read off logits [M, V] of a prompt's rows from `start` on, and their log-sums [M, 1], what is asked beside."""
    stop = start + len(logits)
    if isinstance(extra, Targets):
        asked = extra.asked(start, stop)
        if asked.places.size:
            rows, ids = mx.array(asked.rows), mx.array(asked.ids)
            extra.put(asked, np.array(logits[rows, ids] - total[rows, 0]))
        return
    drawn = draw_repeatedly(logits, extra.temperature, extra.uniforms(start, stop))
    extra.put(start, drawn, np.array(mx.take_along_axis(logits, mx.array(drawn), axis=-1) - total))
