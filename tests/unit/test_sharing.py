"""Sessions that share a device: who gets what, what those who wait are told, and what the status page shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from openrl.daemon.work import Finished, NewRun, NewSession, Pending, Raw, Train
from openrl.errors import Busy
from openrl.settings import SharingSettings
from openrl.types import Op, RequestId, RunId, SessionId, TrainPayload
from openrl.workers import messages
from support.daemons import BASE, Harness, expected_weight, payload
from support.thread_worker import Speed, ThreadWorker


class Sessions(Harness):
    """A harness whose runs and samplers may be of several sessions."""

    async def open_session(self, *tags: str, project: str | None = None) -> SessionId:
        return await self.daemon.create_session(NewSession("0.38.0", tags=tags, project_id=project), None)

    async def run_of(self, session: SessionId, number: int = 0) -> RunId:
        new = NewRun(session, number, BASE, 8, 1, True, True, True, {"type": "adamw"}, {})
        assert (await self.result(await self.daemon.create_run(new, Raw("application/json", b"{}")))).error is None
        return RunId(f"{session}:train:{number}")

    async def train_much(self, run: RunId, seq: int, tokens: int) -> RequestId:
        """A pass of that many tokens, all 1, a hundred to a datum."""
        datum = payload(*[1] * 100).data[0]
        work = Train(TrainPayload((datum,) * (tokens // 100), "cross_entropy"), backward=True)
        return await self.submit(run, seq, Op.FORWARD_BACKWARD, work)

    async def told(self, request: RequestId) -> Pending:
        """What a client that polls is told."""
        pending = await self.daemon.wait(request, 0.0)
        assert isinstance(pending, Pending)
        return pending


def scenario(
    test: Callable[[Sessions], Awaitable[None]] | None = None,
    *,
    speed: Speed | None = None,
    sharing: SharingSettings | None = None,
    **limits: Any,
) -> Any:
    """Run an async test over a fresh daemon; with a `speed`, over the real loop of a worker in a thread."""

    def decorate(test: Callable[[Sessions], Awaitable[None]]) -> Callable[[Path], None]:
        def run(tmp_path: Path) -> None:
            async def main() -> None:
                h = Sessions(tmp_path, **limits)
                h.settings = replace(h.settings, sharing=sharing or SharingSettings())
                if speed is not None:
                    h.kind = lambda: ThreadWorker(speed)
                await h.start()
                try:
                    await asyncio.wait_for(test(h), 30)
                finally:
                    await h.daemon.stop()

            asyncio.run(main())

        run.__name__ = test.__name__
        run.__doc__ = test.__doc__
        return run

    return decorate if test is None else decorate(test)


def passes(h: Harness) -> list[list[str]]:
    """The runs of each training pass that reached the device."""
    return [[item.run for item in op.items] for op in h.worker.calls if isinstance(op, messages.TrainPass)]


# ---- training ----


@scenario
async def test_a_session_of_eight_runs_has_one_share(h: Sessions) -> None:
    """Each pass is too large to be joined: the two sessions take turns, whatever the number of their runs."""
    many, one = await h.open_session(), await h.open_session()
    runs = [await h.run_of(many, i) for i in range(8)]
    other = await h.run_of(one)
    h.worker.hold = asyncio.Event()
    tokens = [7] * 100
    for run in runs:
        await h.train(run, 1, *tokens)
    mine = [await h.train(other, seq, *tokens) for seq in range(1, 5)]
    h.worker.hold.set()
    await h.result(mine[-1])
    order = [run[0] for run in passes(h)]
    assert order[:8].count(other) >= 3, order  # 4, but for a store too slow for its turn; of shares by run it had 1


@scenario
async def test_joined_passes_hold_runs_of_all_sessions(h: Sessions) -> None:
    runs = [await h.run_of(await h.open_session()) for _ in range(8)]
    blocker = await h.run_of(await h.open_session())
    h.worker.hold = asyncio.Event()
    await h.step(blocker, 1)
    requests = [await h.train(run, 1, i) for i, run in enumerate(runs)]
    steps = [await h.step(run, 2) for run in runs]
    h.worker.hold.set()
    for request in requests:
        assert (await h.result(request)).error is None
    assert [await h.weight(step) for step in steps] == [expected_weight(i) for i in range(8)]
    assert [len(joined) for joined in passes(h)] == [8]


@scenario(sharing=SharingSettings(weights={"owner:big-job": 9.0, "tag:big-*": 3.0, "*": 1.0}))
async def test_weights_divide_the_device(h: Sessions) -> None:
    """A session whose tag matches gets three times as much; a tag is not taken for an owner."""
    big, small = await h.open_session("big-job"), await h.open_session()
    runs = [await h.run_of(big), await h.run_of(small)]
    h.worker.hold = asyncio.Event()
    ends = [[await h.train(run, seq, *[7] * 100) for seq in range(1, 13)] for run in runs]
    h.worker.hold.set()
    await h.result(ends[0][-1])
    order = [run[0] for run in passes(h)][:12]
    assert order.count(runs[0]) == 9, order
    shown = {session["id"]: session["weight"] for session in h.daemon.status()["sessions"]}
    assert shown == {big: 3.0, small: 1.0}


@scenario(speed=Speed(train_turn=0.02))
async def test_a_short_pass_and_a_step_do_not_wait_for_anothers_long_pass(h: Sessions) -> None:
    """A pass of fifty micro-batches is under way; another session's three requests end in its midst."""
    long, short = await h.run_of(await h.open_session()), await h.run_of(await h.open_session())
    slow = await h.train_much(long, 1, 5000)
    await asyncio.sleep(0.1)
    await h.train(short, 1, 5)
    assert await h.weight(await h.step(short, 2)) == expected_weight(5)
    assert isinstance(await h.daemon.wait(slow, 0.0), Pending)
    assert await h.weight(await h.step(long, 2)) == expected_weight(5000)


@scenario(speed=Speed(train_turn=0.05, step=0.01))
async def test_runs_in_step_with_each_other_keep_joining(h: Sessions) -> None:
    """Eight clients that each send their next pass once they have heard of the last: passes take all of them, though
    the first to hear is the first to ask."""
    runs = [await h.run_of(await h.open_session()) for _ in range(8)]

    async def client(run: RunId) -> None:
        for seq in range(1, 21, 2):
            trained = await h.train(run, seq, 1)
            stepped = await h.step(run, seq + 1)
            await h.result(trained)
            await h.result(stepped)

    await asyncio.gather(*map(client, runs))
    joined = h.worker.training.passes  # type: ignore[attr-defined]
    assert sum(joined) == 80
    assert len(joined) <= 16, joined


@scenario
async def test_a_suspect_is_alone_on_the_device(h: Sessions) -> None:
    """What was in hand when a worker died goes alone the second time, so that it takes nobody else down again."""
    runs = [await h.run_of(await h.open_session()) for _ in range(2)]
    deaths: list[int] = []

    def die(op: messages.WorkerOp) -> bool:
        deadly = isinstance(op, messages.TrainPass) and any(99 in i.payload.data[0].tokens for i in op.items)
        deaths.extend([1] if deadly else [])
        return deadly

    h.worker.hold = asyncio.Event()
    h.prepare = lambda worker: setattr(worker, "die_on", die)
    h.worker.die_on = die
    await h.step(runs[0], 1)
    bad, good = await h.train(runs[0], 2, 99), await h.train(runs[1], 1, 5)
    h.worker.hold.set()
    assert (await h.result(bad)).category == "server"
    assert (await h.result(good)).error is None
    assert len(deaths) == 2


# ---- sampling ----


@scenario(speed=Speed(sample_turn=0.05), max_inflight_samples=5000)
async def test_a_flood_of_samples_does_not_hold_up_anothers_single_one(h: Sessions) -> None:
    flood, small = await h.open_session(), await h.open_session()
    flooding = await h.daemon.create_sampler(flood, 0, BASE, None)
    single = await h.daemon.create_sampler(small, 0, BASE, None)
    flooded = [await h.sample(flooding, seq) for seq in range(300)]
    started = time.monotonic()
    assert (await h.result(await h.sample(single, 0))).error is None
    assert time.monotonic() - started < 0.5
    assert isinstance(await h.daemon.wait(flooded[-1], 0.0), Pending), "the flood is far from its end"
    for request in flooded:
        await h.daemon.clients.cancel(request)


@scenario(max_inflight_samples=20)
async def test_above_the_limit_only_those_are_refused_who_have_their_part(h: Sessions) -> None:
    """6.4: one session's flood meets 429; another's first samples are taken."""
    samplers = [await h.daemon.create_sampler(await h.open_session(), 0, BASE, None) for _ in range(2)]
    h.worker.hold = asyncio.Event()
    for seq in range(20):
        await h.sample(samplers[0], seq)
    with pytest.raises(Busy):
        await h.sample(samplers[0], 20)
    for seq in range(10):
        await h.sample(samplers[1], seq)
    with pytest.raises(Busy):
        await h.sample(samplers[1], 10)
    h.worker.hold.set()


@scenario(sharing=SharingSettings(max_samples=3))
async def test_a_cap_on_the_samples_of_a_session(h: Sessions) -> None:
    sampler = await h.daemon.create_sampler(await h.open_session(), 0, BASE, None)
    h.worker.hold = asyncio.Event()
    requests = [await h.sample(sampler, seq) for seq in range(3)]
    with pytest.raises(Busy, match="3 of this session"):
        await h.sample(sampler, 3)
    h.worker.hold.set()
    for request in requests:
        await h.result(request)
    await h.sample(sampler, 3)


# ---- what those who wait are told ----


@scenario
async def test_who_waits_for_training_is_told_where_it_stands_and_for_whom(h: Sessions) -> None:
    """4.3: queue_state and queue_state_reason of try_again."""
    first, second = await h.open_session(), await h.open_session()
    runs = [await h.run_of(first), await h.run_of(second), await h.run_of(second, 1)]
    h.worker.hold = asyncio.Event()
    doing = await h.train(runs[0], 1, *[1] * 90)
    await asyncio.sleep(0.02)
    waiting = await h.train(runs[1], 1, *[1] * 90)
    later = await h.step(runs[1], 2)
    third = await h.train(runs[2], 1, *[1] * 90)
    missing = await h.train(runs[0], 3, 1)
    assert await h.told(doing) == Pending("active", "")
    assert await h.told(waiting) == Pending("paused_capacity", f"position 1 of 2: session {first} trains (0 s)")
    told = await h.told(later)
    assert told.reason.startswith("position 1 of 2, with 1 request of this run before it: ")
    assert (await h.told(third)).reason.startswith("position 2 of 2: session ")
    assert (await h.told(missing)).reason == "2 requests of this run before it"
    h.worker.hold.set()
    await h.result(later)
    await h.result(doing)
    assert await h.told(missing) == Pending("active", "request 2 of this run has not arrived yet")


@scenario
async def test_who_waits_only_for_itself_is_not_paused(h: Sessions) -> None:
    session = await h.open_session()
    runs = [await h.run_of(session, i) for i in range(2)]
    h.worker.hold = asyncio.Event()
    await h.train(runs[0], 1, 1)
    await asyncio.sleep(0.02)
    waiting = await h.told(await h.train(runs[1], 1, 1))
    assert waiting == Pending("active", f"position 1 of 1: session {session} trains (0 s)")
    h.worker.hold.set()


@scenario(speed=Speed(sample_turn=0.3, rows=1))
async def test_who_waits_for_a_sample_is_told_where_it_stands(h: Sessions) -> None:
    flood, small = await h.open_session(), await h.open_session()
    flooding = await h.daemon.create_sampler(flood, 0, BASE, None)
    single = await h.daemon.create_sampler(small, 0, BASE, None)
    requests = [await h.sample(flooding, seq) for seq in range(10)]
    mine = await h.sample(single, 0)
    await asyncio.sleep(0.1)
    told = await h.told(mine)
    assert told == Pending("paused_capacity", f"about position 2 of 11 waiting samples: session {flood} also sampling")
    assert (await h.told(requests[4])).reason.startswith("about position 6 of 11")
    for request in (mine, *requests):
        await h.daemon.clients.cancel(request)


# ---- status ----


@scenario(speed=Speed(sample_turn=0.01, train_turn=0.05, train_token=0.0))
async def test_status_shows_sessions_shares_and_what_the_device_does(h: Sessions) -> None:
    trains, samples = await h.open_session("x", project="p"), await h.open_session()
    run = await h.run_of(trains)
    sampler = await h.daemon.create_sampler(samples, 0, BASE, None)
    began = time.time()
    assert h.daemon.status()["models"][0]["now"]["lane"] == "idle"
    busy = [await h.train_much(run, seq, 500) for seq in (1, 2)]
    drawn = [await h.sample(sampler, seq) for seq in range(30)]
    await asyncio.sleep(0.03)
    picture = h.daemon.status()
    now = picture["models"][0]["now"]
    assert (now["lane"], now["runs"], now["sessions"]) == ("train+sample", [run], sorted([trains, samples]))
    queued = {session["id"]: session for session in picture["sessions"]}
    assert queued[trains]["train_queued"] == 2
    assert queued[samples]["samples_queued"] + queued[samples]["samples_drawn"] > 0
    for request in (*busy, *drawn):
        assert isinstance(await h.daemon.wait(request, 10), Finished)
    await asyncio.sleep(0.1)
    picture = h.daemon.status()
    shown = {session["id"]: session for session in picture["sessions"]}
    assert shown[trains]["project"] == "p"
    assert shown[trains]["seconds"]["train"] == pytest.approx(10 * 0.05, rel=0.3)
    assert shown[samples]["seconds"]["sample"] > 0
    assert sum(session["share"] for session in shown.values()) == pytest.approx(1, abs=0.01)
    assert 0 < picture["models"][0]["busy"] <= 1
    lanes = h.daemon.overview.device_lanes(began)
    spans = lanes["models"][BASE]
    assert {span["kind"] for span in spans} >= {"train", "sample"}
    assert all(a["end"] <= b["start"] + 1e-3 for a, b in pairwise(spans))
    assert max(span["longest"] for span in spans if span["kind"] == "train") < 0.2
    assert h.daemon.overview.device_lanes(time.time() + 1)["models"][BASE] == []
