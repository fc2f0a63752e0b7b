"""The benchmark's bookkeeping: both sides get the same work in turns, and medians are taken of what counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from openrl.bench import rounds, workload
from openrl.bench.workload import Tokens


@dataclass
class FakeLoop:
    """Remembers what it was given; takes no time."""

    name: str
    log: list[str]
    trained: list[tuple[Tokens, ...]] = field(default_factory=list[tuple[Tokens, ...]])

    def train_step(self, batch: tuple[Tokens, ...]) -> None:
        self.log.append(self.name)
        self.trained.append(batch)

    def sample(self, prompts: tuple[Tokens, ...], new_tokens: int) -> int:
        self.log.append(self.name)
        return len(prompts) * new_tokens


def test_the_sides_take_turns_on_the_same_data_and_the_first_round_does_not_count() -> None:
    log: list[str] = []
    ours, plain = FakeLoop("ours", log), FakeLoop("plain", log)
    measures = list(rounds.train_measures(workload.make(1000)))[:1]
    ticks: list[str] = []
    (comparison,) = rounds.compare(ours, plain, measures, 3, ticks.append)
    assert len(comparison.ours) == len(comparison.plain) == 3
    assert log == ["plain", "ours", "ours", "plain", "plain", "ours", "ours", "plain"]
    assert len(ticks) == len(log)
    assert ours.trained[0] is plain.trained[0]


def test_ratio_is_of_medians() -> None:
    comparison = rounds.Comparison("train", ours=[10, 30, 1000], plain=[20, 15, 1])
    assert comparison.ratio == 2
    assert rounds.Result({}, [comparison]).as_json()["tokens_per_second"][0]["ours_median"] == 30


def test_the_workload_is_the_same_for_a_seed_and_within_the_vocabulary() -> None:
    first, second = workload.make(500), workload.make(500)
    for name, batch in first.batches.items():
        assert [t.tolist() for t in batch] == [t.tolist() for t in second.batches[name]]
        assert workload.trained_tokens(batch) == sum(map(len, batch)) - len(batch)
        assert all(int(t.min()) >= 3 and int(t.max()) < 500 for t in batch)
    assert len({len(prompt) for prompt in first.prompts}) == 1
    assert len(first.prompts) == max(rounds.CONCURRENCY)


def test_latency_is_in_milliseconds() -> None:
    latency = rounds.latency("step", [0.001 * n for n in range(1, 101)])
    assert latency.p50 == pytest.approx(50.5)
    assert latency.p95 == pytest.approx(96, abs=1)
