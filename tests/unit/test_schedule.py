"""The sampler's bookkeeping without a model: order, sharing, room, giving way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from openrl.backends.base import SampleJob
from openrl.backends.common.prefill import Prefix, choose, part
from openrl.backends.common.prefix_cache import BLOCK
from openrl.backends.common.schedule import Schedule
from openrl.backends.common.sequences import Job, PromptScores, Sequence, arrange, row_knobs
from openrl.backends.common.stops import TokenStop
from openrl.types import AdapterRef, RequestId, SamplePayload, SamplingParams


class Desk:
    """A schedule over a cache of `room` tokens, and a counter for what is queued. `stored` blocks of each prompt are
    stored, where it has as many."""

    def __init__(self, rows: int = 8, prefill: int = 100, room: int = 10_000, stored: int = 0) -> None:
        def find(sequence: Sequence, most: int) -> list[int]:
            return [*range(1, 1 + min(stored, most // BLOCK))]

        self.schedule = Schedule(rows, prefill, lambda slots, length: slots * length <= room, find)
        self._queued = 0

    def add(
        self,
        name: str,
        prompt: int,
        samples: int = 1,
        limit: int = 50,
        adapter: str = "",
        same: bool = False,
        scored: bool = False,
        last_n: int | None = None,
    ) -> list[Sequence]:
        """Queue a request with a prompt of its own, or with `same` one that all such requests of that length have."""
        ref = AdapterRef(adapter, Path("unused")) if adapter else None
        token = 1 if same else 2 + self._queued
        payload = SamplePayload(
            np.full(prompt, token, np.int32),
            samples,
            SamplingParams(max_tokens=limit),
            prompt_logprobs=scored,
            prompt_logprobs_last_n=last_n,
        )
        source = SampleJob(RequestId(name), payload, ref)
        job = Job(source, [token] * prompt, limit, PromptScores.wanted(payload, 0), results=[None] * samples)
        stop = TokenStop(frozenset())
        made = [Sequence(job, i, self._queued + i, row_knobs(source, 0, i), stop) for i in range(samples)]
        self._queued += samples
        self.schedule.waiting.extend(made)
        return made

    def admit(self) -> list[Prefix]:
        """Plan, and let everything planned go live with one token drawn."""
        plan = self.schedule.plan()
        for prefix in plan:
            for job in prefix.jobs:
                job.end = torch.zeros(1)
            for member in prefix.members:
                member.tokens.append(1)
        live = [*self.schedule.live, *(m for p in plan for m in p.keepers)]
        self.schedule.live, _ = arrange(live)
        return plan

    def make_room(self) -> list[Sequence]:
        back = self.schedule.surplus()
        self.schedule.requeue(back)
        return back


def names(plan: list[Prefix]) -> list[str]:
    """Requests of each prefix, with the number of their sequences."""
    return ["+".join(f"{job.request}*{sum(m.job is job for m in p.members)}" for job in p.jobs) for p in plan]


def test_first_come_first_served_within_the_prefill_budget() -> None:
    desk = Desk(prefill=100)
    for name, prompt in (("a", 20), ("b", 30), ("c", 31), ("d", 32), ("e", 5)):
        desk.add(name, prompt)
    assert names(desk.admit()) == ["a*1", "b*1", "c*1"]  # four of width 32 would be 128
    assert names(desk.admit()) == ["d*1", "e*1"]


def test_prompts_of_like_length_are_computed_together() -> None:
    """Padding would double the work of taking them in their order; the first one always goes."""
    desk = Desk(rows=64, prefill=512)
    for i in range(8):
        desk.add(f"long{i}", 240 + i)
        desk.add(f"short{i}", 20 + i)
    assert names(desk.admit()) == ["long0*1", "long1*1"]
    assert names(desk.admit()) == [f"short{i}*1" for i in range(8)]
    assert names(desk.admit()) == ["long2*1", "long3*1"]


def test_the_first_in_the_queue_is_never_passed_over() -> None:
    """However many that go well together come after it."""
    desk = Desk(rows=10_000, prefill=512, room=1 << 40)
    desk.add("odd", 400)
    for i in range(300):
        desk.add(f"a{i}", 20 + i % 9, limit=1)
    assert names(desk.admit())[0] == "odd*1"


def test_every_prompt_is_taken_within_as_many_turns_as_wait_before_it() -> None:
    rng = np.random.default_rng(0)
    desk = Desk(rows=10_000, prefill=512, room=1 << 40)
    made = [desk.add(str(i), int(rng.integers(1, 500)))[0] for i in range(500)]
    turn = 0
    while desk.schedule.waiting:
        for prefix in desk.admit():
            width = max(len(prefix.tokens), 1)
            assert width <= 512
            assert turn <= made.index(prefix.members[0])
        turn += 1
    assert turn < 350


def test_little_of_what_is_computed_is_padding() -> None:
    """512 prompts of 8 to 256 tokens: under a tenth of the work is padding until the queue runs short."""
    rng = np.random.default_rng(1)
    desk = Desk(rows=10_000, prefill=512, room=1 << 40)
    for i in range(512):
        desk.add(str(i), int(rng.integers(8, 257)), limit=1)
    padded = useful = 0
    while len(desk.schedule.waiting) > 50:
        plan = desk.admit()
        padded += len(plan) * max(p.fresh for p in plan)
        useful += sum(p.fresh for p in plan)
    assert useful > 0.9 * padded


def test_what_is_stored_need_not_be_computed() -> None:
    desk = Desk(prefill=100, stored=20)
    desk.add("a", 600)
    (plan,) = desk.schedule.plan()
    assert (plan.start, plan.done, plan.fresh, plan.long) == (576, 576, 24, False)
    assert len(plan.blocks) == 18
    desk.add("b", 64)
    (plan,) = desk.schedule.plan()
    assert plan.fresh == 32  # of whole blocks alone nothing would be left to draw from


def test_prompt_tokens_that_are_scored_are_computed() -> None:
    desk = Desk(prefill=100, stored=20)
    desk.add("all", 90, scored=True)
    (plan,) = desk.schedule.plan()
    assert plan.fresh == 90
    desk.add("last", 75, scored=True, last_n=10)
    (plan,) = desk.schedule.plan()
    assert plan.start == 64
    desk.add("last", 74, scored=True, last_n=10)  # the state before the first scored token, number 63, is needed
    (plan,) = desk.schedule.plan()
    assert plan.start == 32


def test_parts_become_smaller_as_there_is_more_to_attend_to() -> None:
    """So that each takes as long as the first; also what follows a long stored beginning is computed in parts then."""
    assert [part(512, start, 2000.0) for start in (0, 512, 2000, 6000)] == [512, 384, 256, 128]
    assert part(512, 10**6, 2000.0) == 64
    assert part(40, 10**6, 2000.0) == 40
    schedule = Schedule(8, 512, lambda *_: True, lambda _, most: [*range(1, 1 + most // BLOCK)], reach=2000.0)
    prefix = Prefix([1] * 2000, [], blocks=[*range(1, 51)])
    assert schedule.part(prefix) == 256


def test_reading_long_stored_beginnings_has_its_price() -> None:
    """They are padded like tokens, at a 32nd of the price."""
    short = [Prefix([1] * 30, []) for _ in range(3)]
    deep = Prefix([1] * 4110, [], blocks=[*range(1, 129)])
    assert choose([*short, deep], 512, 99) == short
    near = Prefix([1] * 160, [], blocks=[1, 2, 3, 4])
    assert choose([*short, near], 512, 99) == [*short, near]


def test_samples_of_a_request_share_their_prompt() -> None:
    desk = Desk()
    desk.add("a", 60, samples=3)
    desk.add("b", 40, samples=2)
    assert names(desk.admit()) == ["a*3"]
    assert names(desk.admit()) == ["b*2"]


def test_requests_with_one_prompt_share_it() -> None:
    """A group sent as requests of one sample each, with others in between; not across adapters."""
    desk = Desk(rows=20)
    for i in range(3):
        desk.add(f"a{i}", 60, adapter="x", same=True)
        desk.add(f"b{i}", 60, adapter="y", same=True)
    desk.add("scored", 60, adapter="x", same=True, scored=True, limit=1)
    assert names(desk.admit()) == ["a0*1+a1*1+a2*1+scored*1"]
    assert names(desk.admit()) == ["b0*1+b1*1+b2*1"]


def test_later_requests_with_a_live_prompt_begin_as_copies() -> None:
    desk = Desk(rows=20)
    (first,) = desk.add("a", 60, same=True)
    desk.admit()
    desk.add("b", 60, same=True)
    desk.add("c", 60, limit=1, same=True)
    (plan,) = desk.schedule.plan()
    assert (names([plan]), plan.source) == (["b*1+c*1"], first)
    desk.add("scored", 60, scored=True, same=True)
    (plan,) = desk.schedule.plan()
    assert plan.source is None


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
    assert names(desk.admit()) == ["short*1", "later*1"]
    desk.add("last", 10)
    assert names(desk.admit()) == ["long*2"]
    assert names(desk.admit()) == ["last*1"]


def test_short_prompts_pass_a_long_one_that_is_being_computed() -> None:
    desk = Desk(prefill=100)
    desk.add("long", 150)
    desk.add("next", 160)
    (desk.schedule.growing,) = desk.schedule.plan()
    desk.add("short", 10)
    assert names(desk.admit()) == ["short*1"]
    assert desk.schedule.plan() == []
    desk.schedule.growing = None
    assert names(desk.schedule.plan()) == ["next*1"]


def test_a_long_prompt_of_a_job_that_is_dropped_goes_on_for_another() -> None:
    desk = Desk(prefill=100)
    (first,) = desk.add("a", 150, same=True)
    (second,) = desk.add("b", 150, same=True)
    (desk.schedule.growing,) = desk.schedule.plan()
    first.slot = 4
    assert desk.schedule.drop(first.job) == []
    assert desk.schedule.growing.members == [second]
    assert (first.slot, second.slot) == (-1, 4)
    assert desk.schedule.drop(second.job) == [second]
    assert not desk.schedule.busy


def test_who_waits_for_room_is_not_overtaken_by_smaller_ones() -> None:
    desk = Desk(rows=8, room=400)
    desk.add("a", 100, limit=100)
    desk.admit()
    desk.add("large", 300)
    desk.add("small", 10)
    desk.add("single", 20, limit=1)
    assert names(desk.schedule.plan()) == ["single*1"]
    assert desk.schedule.plan() == []


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
    assert desk.make_room() == [middle]
    assert desk.schedule.live == [oldest]
    assert list(desk.schedule.waiting) == [middle, waiting]
    assert middle.slot == -1
    assert len(middle.tokens) == 1


def test_one_sequence_alone_never_gives_way() -> None:
    desk = Desk(room=60)
    (only,) = desk.add("a", 10, limit=50)
    desk.admit()
    only.tokens += [1] * 49
    assert desk.make_room() == []
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
