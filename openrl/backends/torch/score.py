"""Logprobs of prompt tokens (S5, S7), through the float32 head a bounded number of positions at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from openrl.backends.common import scoring
from openrl.backends.common.extras import Alternatives, Targets
from openrl.backends.common.lora import segments_of
from openrl.backends.common.scoring import Span, head_rows
from openrl.backends.torch.draw import draw_repeatedly
from openrl.backends.torch.model import CausalLM


@dataclass(frozen=True, slots=True)
class _Scored:
    """Logprobs [M], and the most likely ids and logprobs [M, top]."""

    logprobs: Tensor
    ids: Tensor
    values: Tensor


def score(model: CausalLM, spans: Sequence[Span]) -> None:
    """Fill the scores of the spans' jobs, at temperature 1 (S5). Spans of one adapter are neighbours."""
    spans = scoring.to_score(spans)
    if not spans:
        return
    hidden = torch.cat([s.wanted for s in spans])
    targets = torch.tensor([token for s in spans for token in s.targets], device=hidden.device)
    adapters = [s.job.adapter for s in spans for _ in range(s.scored)]
    top = scoring.most(spans)
    scored: list[_Scored] = []
    for i, j in scoring.windows(len(hidden), head_rows(model.vocab_size)):
        logits = model.logits(hidden[i:j], segments_of(adapters[i:j]))
        total = logits.logsumexp(-1, keepdim=True)
        scored.append(_score_rows(logits, total, targets[i:j], top))
        for extra, rows, first in scoring.extras_in(spans, i, j):
            _fill(extra, first, logits[rows], total[rows])
    scoring.distribute(
        spans,
        torch.cat([s.logprobs for s in scored]).numpy(),
        torch.cat([s.ids for s in scored]).numpy(),
        torch.cat([s.values for s in scored]).numpy(),
    )


def _score_rows(logits: Tensor, total: Tensor, targets: Tensor, top: int) -> _Scored:
    best = logits.topk(top, -1)
    logprobs = logits.gather(-1, targets[:, None]) - total
    return _Scored(logprobs[:, 0].cpu(), best.indices.cpu(), (best.values - total).cpu())


def _fill(extra: Targets | Alternatives, start: int, logits: Tensor, total: Tensor) -> None:
    """Read off logits [M, V] of a prompt's rows from `start` on, and their log-sums [M, 1], what is asked beside."""
    stop = start + len(logits)
    if isinstance(extra, Targets):
        asked = extra.asked(start, stop)
        rows, ids = (torch.from_numpy(np.asarray(x)).to(logits.device) for x in (asked.rows, asked.ids))
        extra.put(asked, (logits[rows, ids] - total[rows, 0]).cpu().numpy())
        return
    u = torch.from_numpy(extra.uniforms(start, stop)).to(logits.device)
    drawn = draw_repeatedly(logits, extra.temperature, u)
    extra.put(start, drawn.cpu().numpy(), (logits.gather(-1, drawn) - total).cpu().numpy())
