"""The benchmark's bookkeeping: all sides get the same work in turns, medians are taken, targets are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from openrl.bench.jobs import jain
from openrl.bench.lanes import Lanes, Span
from openrl.bench.result import Finding, Rates, Result, percentiles
from openrl.bench.rounds import Side, compare
from openrl.bench.small import small_model
from openrl.bench.workload import Example, Tokens, Workload, trained_tokens
from openrl.errors import SettingsError
from openrl.models import info
from openrl_cli.bench import bench


@dataclass
class FakeSide:
    """Remembers what it was given; takes no time."""

    name: str
    log: list[str]
    trained: list[Sequence[Example]] = field(default_factory=list[Sequence[Example]])

    def train_step(self, batch: Sequence[Example]) -> None:
        self.log.append(self.name)
        self.trained.append(batch)

    def sample(self, prompts: Sequence[Tokens], new_tokens: int) -> int:
        self.log.append(self.name)
        return len(prompts) * new_tokens


def test_the_sides_take_turns_on_the_same_data_and_the_first_round_does_not_count() -> None:
    log: list[str] = []
    sides = {name: FakeSide(name, log) for name in ("a", "b", "c")}
    batch = Workload(1000).short(4)

    def work(side: Side) -> int:
        side.train_step(batch)
        return trained_tokens(batch)

    ticks: list[str] = []
    rates = compare("train", dict(sides), work, 2, ticks.append)
    assert {name: len(figures) for name, figures in rates.sides.items()} == {"a": 2, "b": 2, "c": 2}
    assert log == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert len(ticks) == len(log)
    assert all(given is batch for side in sides.values() for given in side.trained)


def test_warming_up_may_be_less_work() -> None:
    side = FakeSide("a", [])
    large, small = Workload(1000).short(8), Workload(1000).short(2)

    def of(batch: list[Example]) -> int:
        side.train_step(batch)
        return trained_tokens(batch)

    compare("train", {"a": side}, lambda _: of(large), 2, lambda _: None, warm=lambda _: of(small))
    assert [len(given) for given in side.trained] == [2, 8, 8]


def test_ratio_is_of_medians() -> None:
    rates = Rates("train", {"ours": [10, 30, 1000], "plain": [20, 15, 1]})
    assert rates.ratio("ours", "plain") == 2
    assert Result({}, [rates]).as_json()["tokens_per_second"][0]["medians"] == {"ours": 30, "plain": 15}


@pytest.mark.parametrize(
    ("figure", "target", "at_most", "met"),
    [(2.0, 2, False, True), (1.9, 2, False, False), (5.1, 5, True, False), (5, 5, True, True), (1, None, False, None)],
)
def test_a_finding_is_held_against_its_target(
    figure: float, target: float | None, at_most: bool, met: bool | None
) -> None:
    assert Finding("x", figure, "x", target, at_most).met is met


def test_mixed_lengths_span_their_range_with_half_the_positions_masked() -> None:
    batch = Workload(500).mixed()
    assert (len(batch), min(e.length for e in batch), max(e.length for e in batch)) == (64, 32, 512)
    assert sum(e.masked for e in batch) == pytest.approx(trained_tokens(batch) / 2, rel=0.01)


def test_the_workload_is_the_same_for_a_seed_and_within_the_vocabulary() -> None:
    first, second = Workload(500, seed=3).prompts(4, 16), Workload(500, seed=3).prompts(4, 16)
    assert np.array_equal(first, second)
    assert all(int(t.min()) >= 3 and int(t.max()) < 500 for t in first)


def test_percentiles_are_in_milliseconds() -> None:
    p50, p95 = percentiles([0.001 * n for n in range(1, 101)])
    assert p50 == pytest.approx(50.5)
    assert p95 == pytest.approx(96, abs=1)


def test_jain_s_index() -> None:
    assert jain([3, 3, 3, 3]) == 1
    assert jain([1, 0, 0, 0]) == 0.25


def test_lanes_tell_the_busy_share_and_the_longest_turn() -> None:
    spans = (Span(100, 101, 1, 0.7, "train"), Span(101, 101.5, 0.5, 0.1, "sample"), Span(104, 105, 0.5, 0.4, "train"))
    lanes = Lanes(100, 110, spans)
    assert lanes.busy == pytest.approx(0.2)
    assert lanes.longest("train") == 0.7
    assert lanes.longest("other") == 0


def test_parts_that_need_pytorch_are_refused_on_mlx_before_anything_starts() -> None:
    pytest.importorskip("mlx_lm")
    with pytest.raises(SettingsError, match=r"no 'matrix' on MLX") as raised:
        bench(["train", "matrix"], backend="mps")
    assert "memory" not in raised.value.hint
    with pytest.raises(SettingsError, match=r"no 'speed'\."):
        bench(["speed"], backend="mps")


def test_mlx_lm_as_a_side_trains_and_draws_as_many_tokens_as_asked(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    from openrl.bench.plain_mlx import MlxLoop

    folder = small_model(tmp_path / "small")
    assert info.describe(folder).parameters == 3_672_320
    loop, work = MlxLoop(folder, rank=2, dtype="float32"), Workload(2048)
    loop.train_step([*work.even(2, 4), Example(work.sequence(3), masked=1)])
    assert loop.sample(work.prompts(2, 4), 3) == 6
