"""A request on its way through the sampler: the job, its sequences, and the results they gather."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openrl.backends.base import SampleJob
from openrl.backends.common.extras import Alternatives, Targets
from openrl.backends.common.stops import StopWatch
from openrl.backends.common.uniforms import RowKnobs
from openrl.types import RequestId, SampledSequence, SampleOutput, SamplePayload, TopK

_EMPTY_LOGPROB = -99999.0  # of the cells at prompt positions that are not scored, such as 0 (S7)
_UINT64 = (1 << 64) - 1

# (ids, logprobs) of the most likely tokens at one position, descending.
TopRow = tuple[list[int], list[float]]


@dataclass(slots=True, eq=False)
class PromptScores:
    """What is asked of a prompt's tokens, filled in as its parts are computed (S5, S7).

    `logprobs` and `top` are those of positions from `first` on; targets and alternatives are of all positions but 0.
    """

    logprobs: np.ndarray[tuple[int], np.dtype[np.float32]]
    top: TopK | None
    first: int
    targets: Targets | None
    alternatives: Alternatives | None

    @classmethod
    def wanted(cls, payload: SamplePayload, seed: int) -> PromptScores | None:
        """Room for what a request asks for; None if that is nothing. `seed` is that of its draws."""
        tokens, top, k = len(payload.prompt), payload.topk_prompt_logprobs, payload.prompt_alt_tokens_k
        targets, last = payload.target_prompt_logprobs, payload.prompt_logprobs_last_n
        if not (payload.prompt_logprobs or top or k or targets is not None):
            return None
        plain = payload.prompt_logprobs or top > 0
        table = TopK(np.zeros((tokens, top), np.int32), np.full((tokens, top), _EMPTY_LOGPROB, np.float32))
        return cls(
            logprobs=np.full(tokens, np.nan, np.float32),
            top=table if top else None,
            first=tokens if not plain else 1 if last is None else tokens - last,
            targets=None if targets is None else Targets(targets),
            alternatives=Alternatives(tokens, k, payload.params.temperature, seed) if k else None,
        )

    @property
    def extras(self) -> list[Targets | Alternatives]:
        return [extra for extra in (self.targets, self.alternatives) if extra is not None]

    @property
    def begin(self) -> int:
        """The first position of which anything is asked."""
        return 1 if self.extras else self.first


@dataclass(slots=True, eq=False)
class Job:
    """One request. `results` has a place for each sequence; the job is done when all are filled."""

    source: SampleJob
    prompt: list[int]
    limit: int  # most tokens a sequence may draw
    scores: PromptScores | None  # None: not asked for
    adapter: Any = None  # the engine's own, set on admission; None: the base model
    end: Any = None  # hidden state [H] of the last prompt token, once computed: later samples start from it
    results: list[SampledSequence | None] = field(default_factory=list["SampledSequence | None"])
    ended: bool = False  # answered, or forgotten
    origin: tuple[str, bytes] = field(init=False)  # equal for jobs whose samples start from the same keys and values

    def __post_init__(self) -> None:
        self.origin = self.adapter_key, np.array(self.prompt, np.int32).tobytes()

    @property
    def request(self) -> RequestId:
        return self.source.request

    @property
    def adapter_key(self) -> str:
        """Empty for the base model."""
        return self.source.adapter.key if self.source.adapter is not None else ""

    @property
    def unscored(self) -> bool:
        """Whether something is asked of the prompt that is not computed yet."""
        return self.scores is not None and self.end is None

    @property
    def done(self) -> bool:
        return all(result is not None for result in self.results)

    def output(self) -> SampleOutput:
        """The answer of a job that is done."""
        sequences = tuple(result for result in self.results if result is not None)
        scores = self.scores
        if scores is None:
            return SampleOutput(sequences)
        return SampleOutput(
            sequences,
            prompt_logprobs=scores.logprobs if self.source.payload.prompt_logprobs else None,
            topk_prompt=scores.top,
            target_prompt=scores.targets.cells if scores.targets else None,
            alt_tokens=scores.alternatives.drawn if scores.alternatives else None,
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a job's samples. `order` is its place among all sequences ever queued; `slot` that in the cache, or -1.

    A live sequence has keys and values for all its tokens but the last.
    """

    job: Job
    index: int
    order: int
    knobs: RowKnobs
    watch: StopWatch
    slot: int = -1
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top: list[TopRow] = field(default_factory=list[TopRow])

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.job.prompt) + len(self.tokens)

    @property
    def final_length(self) -> int:
        """Most tokens it can come to, prompt included."""
        return len(self.job.prompt) + self.job.limit

    @property
    def begun(self) -> bool:
        """Whether it has tokens of its own, so that it shares its beginning with nobody."""
        return bool(self.tokens)

    @property
    def last(self) -> bool:
        """Whether the next token must be the last one, so that nothing need be kept for more."""
        return len(self.tokens) + 1 >= self.job.limit

    def history(self) -> list[int]:
        """All tokens so far, prompt included; not to be changed."""
        return self.job.prompt + self.tokens if self.tokens else self.job.prompt

    def push(self, token: int, logprob: float, top: TopRow | None) -> bool:
        """Take a drawn token; whether the sequence is complete now, in which case the job has its result."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.top.append(top)
        stopped = self.watch.push(token)
        if not stopped and len(self.tokens) < self.job.limit:
            return False
        self.job.results[self.index] = self._result("stop" if stopped else "length")
        return True

    def _result(self, reason: str) -> SampledSequence:
        top = None
        if self.top:
            ids, logprobs = zip(*self.top, strict=True)
            top = TopK(np.array(ids, np.int32), np.array(logprobs, np.float32))
        return SampledSequence(np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32), reason, top)


def row_knobs(source: SampleJob, seed: int, index: int) -> RowKnobs:
    """How sample `index` of a job draws: its seed is `seed` + index (S11)."""
    params = source.payload.params
    return RowKnobs(
        seed=(seed + index) & _UINT64,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        top=source.payload.topk_sample_logprobs,
    )


def arrange(live: Items[Sequence]) -> tuple[list[Sequence], list[tuple[int, int]]]:
    """Give every sequence a slot so that those of one adapter are neighbours, moving as few as can be.

    Sets `slot`; returns the sequences in their new order, and (old, new) slots of those that had one and must move.
    """
    groups: dict[str, list[Sequence]] = {}
    for sequence in sorted(live, key=lambda s: (s.slot < 0, s.slot, s.order)):
        groups.setdefault(sequence.job.adapter_key, []).append(sequence)
    order: list[Sequence] = []
    for group in groups.values():
        order += _fill(range(len(order), len(order) + len(group)), group)
    moves = [(s.slot, place) for place, s in enumerate(order) if s.slot not in (-1, place)]
    for place, sequence in enumerate(order):
        sequence.slot = place
    return order, moves


def _fill(places: range, group: list[Sequence]) -> list[Sequence]:
    """The group in the order of `places`: who is in one of them stays, the others take what is free."""
    staying = {s.slot: s for s in group if s.slot in places}
    others = iter([s for s in group if s.slot not in places])
    return [staying[place] if place in staying else next(others) for place in places]
