"""Runs both sides of the benchmark in turns and reduces the rounds to medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from openrl.bench.workload import Tokens, Workload, trained_tokens

CONCURRENCY = (1, 8, 32)


class Loop(Protocol):
    """One side: trains on a batch, samples from prompts and says how many tokens came."""

    def train_step(self, batch: tuple[Tokens, ...]) -> None: ...

    def sample(self, prompts: tuple[Tokens, ...], new_tokens: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens a second of both sides, one figure a round."""

    name: str
    ours: list[float] = field(default_factory=list[float])
    plain: list[float] = field(default_factory=list[float])

    @property
    def ratio(self) -> float:
        """How many times faster we are, by medians."""
        return statistics.median(self.ours) / statistics.median(self.plain)


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one kind of request."""

    name: str
    count: int
    p50: float
    p95: float


@dataclass(slots=True)
class Result:
    """Everything that one run measured. `setting` says on what: machine, threads, versions, model."""

    setting: dict[str, str]
    comparisons: list[Comparison] = field(default_factory=list["Comparison"])
    latencies: list[Latency] = field(default_factory=list["Latency"])

    def as_json(self) -> dict[str, Any]:
        """Plain data, with medians and ratios spelled out."""
        comparisons = [
            {
                **asdict(c),
                "ours_median": statistics.median(c.ours),
                "plain_median": statistics.median(c.plain),
                "ratio": c.ratio,
            }
            for c in self.comparisons
        ]
        return {
            "setting": self.setting,
            "tokens_per_second": comparisons,
            "milliseconds": [asdict(latency) for latency in self.latencies],
        }


Measure = tuple[str, Callable[[Loop], int]]  # a name, and work on one side that returns its tokens


def train_measures(work: Workload) -> Iterator[Measure]:
    """One training step for each batch of the workload."""
    for name, batch in work.batches.items():

        def step(side: Loop, batch: tuple[Tokens, ...] = batch) -> int:
            side.train_step(batch)
            return trained_tokens(batch)

        yield f"train {name}", step


def sample_measures(work: Workload) -> Iterator[Measure]:
    """Sampling at each level of concurrency."""
    for count in CONCURRENCY:

        def draw(side: Loop, prompts: tuple[Tokens, ...] = work.prompts[:count]) -> int:
            return side.sample(prompts, work.new_tokens)

        yield f"sample {count} at once", draw


def compare(
    ours: Loop, plain: Loop, measures: Sequence[Measure], rounds: int, tick: Callable[[str], None]
) -> list[Comparison]:
    """Each measure on both sides, `rounds` times in turns after one round that does not count.

    In turns, so that a machine that slows down or warms up does so for both; the side that goes first alternates.
    """
    comparisons = [Comparison(name) for name, _ in measures]
    for number in range(rounds + 1):
        for (name, work), comparison in zip(measures, comparisons, strict=True):
            sides = [(ours, comparison.ours), (plain, comparison.plain)]
            for side, figures in sides if number % 2 else reversed(sides):
                speed = _speed(side, work)
                if number > 0:
                    figures.append(speed)
                tick(name)
    return comparisons


def _speed(side: Loop, work: Callable[[Loop], int]) -> float:
    started = time.perf_counter()
    tokens = work(side)
    return tokens / (time.perf_counter() - started)


def latency(name: str, seconds: Sequence[float]) -> Latency:
    """p50 and p95 of at least 20 figures."""
    percentiles = statistics.quantiles(seconds, n=20)
    return Latency(name, len(seconds), 1000 * statistics.median(seconds), 1000 * percentiles[-1])
