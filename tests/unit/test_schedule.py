"""The sampler's bookkeeping without a model: order, sharing, room, giving way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from openrl.backends.base import SampleJob
from openrl.backends.torch.schedule import Prefix, Schedule
from openrl.backends.torch.sequences import Job, Sequence, arrange, row_knobs
from openrl.backends.torch.stops import TokenStop
from openrl.types import AdapterRef, RequestId, SamplePayload, SamplingParams


class Desk:
    """A schedule over a cache of `room` tokens, and a counter for what is queued."""

    def __init__(self, rows: int = 8, prefill: int = 100, room: int = 10_000) -> None:
        self.schedule = Schedule(rows, prefill, lambda slots, length: slots * length <= room)
        self._queued = 0

    def add(self, name: str, prompt: int, samples: int = 1, limit: int = 50, adapter: str = "") -> list[Sequence]:
        ref = AdapterRef(adapter, Path("unused")) if adapter else None
        payload = SamplePayload(np.ones(prompt, np.int32), samples, SamplingParams(max_tokens=limit))
        source = SampleJob(RequestId(name), payload, ref)
        job = Job(source, [1] * prompt, limit, None, results=[None] * samples)
        stop = TokenStop(frozenset())
        made = [Sequence(job, i, self._queued + i, row_knobs(source, 0, i), stop) for i in range(samples)]
        self._queued += samples
        self.schedule.waiting.extend(made)
        return made

    def admit(self) -> list[Prefix]:
        """Plan, and let everything planned go live with one token drawn."""
        plan = self.schedule.plan()
        for prefix in plan:
            prefix.job.end = torch.zeros(1)
            for member in prefix.members:
                member.tokens.append(1)
        live = [*self.schedule.live, *(m for p in plan for m in p.members)]
        self.schedule.live, _ = arrange(live)
        return plan


def names(plan: list[Prefix]) -> list[str]:
    return [f"{p.job.request}*{len(p.members)}" for p in plan]


def test_first_come_first_served_within_the_prefill_budget() -> None:
    desk = Desk(prefill=100)
    for name, prompt in (("a", 20), ("b", 30), ("c", 30), ("d", 30), ("e", 5)):
        desk.add(name, prompt)
    assert names(desk.admit()) == ["a*1", "b*1", "c*1"]  # four of width 30 would be 120
    assert names(desk.admit()) == ["d*1", "e*1"]


def test_samples_of_a_request_share_their_prompt() -> None:
    desk = Desk()
    desk.add("a", 60, samples=3)
    desk.add("b", 40, samples=2)
    assert names(desk.admit()) == ["a*3"]
    assert names(desk.admit()) == ["b*2"]


def test_more_samples_than_rows_begin_as_copies() -> None:
    desk = Desk(rows=2)
    first, second, third = desk.add("a", 10, samples=3)
    assert names(desk.admit()) == ["a*2"]
    assert desk.schedule.plan() == []
    desk.schedule.retire({first})
    (plan,) = desk.schedule.plan()
    assert (plan.members, plan.source) == ([third], second)


def test_a_prompt_too_long_for_one_turn_comes_alone() -> None:
    desk = Desk(prefill=100)
    desk.add("short", 10)
    desk.add("long", 150, samples=2)
    desk.add("later", 10)
    assert names(desk.admit()) == ["short*1"]
    assert names(desk.admit()) == ["long*2"]
    assert names(desk.admit()) == ["later*1"]


def test_single_tokens_need_no_slot() -> None:
    """Requests that only score their prompt pass by a full cache and full rows."""
    desk = Desk(rows=1, room=200)
    desk.add("a", 100, limit=100)
    desk.admit()
    desk.add("score", 90, limit=1)
    desk.add("b", 10)
    assert names(desk.schedule.plan()) == ["score*1"]


def test_newcomers_need_a_little_headroom_only() -> None:
    """Two sequences that may grow to 1000 tokens each share a cache of 1000: most end early."""
    desk = Desk(room=1000)
    desk.add("a", 10, limit=990)
    desk.add("b", 10, limit=990)
    assert names(desk.admit()) == ["a*1", "b*1"]


def test_the_youngest_gives_way_and_returns_to_its_place() -> None:
    desk = Desk(rows=3, room=200)
    (oldest,) = desk.add("a", 10, limit=190)
    (middle,) = desk.add("b", 10, limit=190)
    desk.admit()
    (waiting,) = desk.add("c", 150)
    oldest.tokens += [1] * 95
    desk.schedule.make_room()
    assert desk.schedule.live == [oldest]
    assert list(desk.schedule.waiting) == [middle, waiting]
    assert middle.slot == -1
    assert len(middle.tokens) == 1


def test_one_sequence_alone_never_gives_way() -> None:
    desk = Desk(room=60)
    (only,) = desk.add("a", 10, limit=50)
    desk.admit()
    only.tokens += [1] * 49
    desk.schedule.make_room()
    assert desk.schedule.live == [only]


def test_rows_of_one_adapter_are_neighbours_and_few_move() -> None:
    desk = Desk(rows=16)
    for i, adapter in enumerate("abab"):
        desk.add(str(i), 5, adapter=adapter)
    desk.admit()
    keys = [s.job.adapter_key for s in desk.schedule.live]
    assert keys == ["a", "a", "b", "b"]
    before = {s.job.request: s.slot for s in desk.schedule.live}
    desk.schedule.retire({desk.schedule.live[0]})
    order, moves = arrange(desk.schedule.live)
    assert [s.job.adapter_key for s in order] == ["a", "b", "b"]
    assert [s.slot for s in order] == [0, 1, 2]
    assert sorted(moves) == [(1, 0), (3, 1)]
    assert before[order[2].job.request] == 2


def test_drop_forgets_a_job_wherever_it_is() -> None:
    desk = Desk(rows=2)
    made = desk.add("a", 10, samples=3)
    desk.admit()
    assert set(desk.schedule.drop(made[0].job)) == set(made[:2])
    assert not desk.schedule.busy
