"""The clients of one sampler over HTTP, with a real daemon and a scalar worker: news of ends, numbers, cancelling."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from openrl.daemon.daemon import Daemon
from openrl.daemon.models import ModelPool
from openrl.wire import bodies
from support.daemons import Harness
from support.scalar_worker import INFO, ScalarWorker
from support.wired import Wired, over_http, sample_body

CLONE = 1_000_000_000


async def open_sampler(w: Wired) -> str:
    await w.open_run()
    return await w.open_sampler()


async def draw(w: Wired, sampler: str, *seqs: int) -> list[str]:
    return [await w.promise("asample", sample_body(sampler, seq)) for seq in seqs]


async def news(w: Wired, sampler: str, cursor: int = 0, clone: int = 0, **more: Any) -> dict[str, Any]:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
    answer = await w.post("retrieve_futures", {"target": target, "prev_cursor": cursor, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def all_news(w: Wired, sampler: str, count: int, clone: int = 0) -> tuple[list[str], int]:
    """Ids in the order in which they are told, and the last cursor; cursors must grow with every event."""
    found: list[str] = []
    cursor = 0
    while len(found) < count:
        told = await news(w, sampler, cursor, clone)
        assert told["cursor"] >= cursor + len(told["completions"])
        found += [event["request_id"] for event in told["completions"]]
        cursor = told["cursor"]
    return found, cursor


def depth(w: Wired) -> int:
    return w.h.daemon.status()["queue"]["sample"]


# ---- what ended ----


@over_http()
async def test_every_end_is_told_once_to_its_own_client(w: Wired) -> None:
    """4.5: one clone's events, each with the result's size; the cursor grows, and stays where nothing is new."""
    sampler = await open_sampler(w)
    ours, theirs = await draw(w, sampler, 5, 2, 9), await draw(w, sampler, 3 * CLONE, 3 * CLONE + 1)
    found, cursor = await all_news(w, sampler, 3)
    assert sorted(found) == sorted(ours)
    assert sorted((await all_news(w, sampler, 2, clone=3))[0]) == sorted(theirs)
    assert await news(w, sampler, cursor, timeout=0) == {"completions": [], "cursor": cursor}
    event = (await news(w, sampler))["completions"][0]
    size = len((await w.result(event["request_id"])).content)
    assert event == {
        "state": "finished",
        "request_id": event["request_id"],
        "response_payload_uncompressed_size": size,
    }


@over_http()
async def test_events_are_told_again_until_they_are_acknowledged(w: Wired) -> None:
    """4.5: the answer may get lost, so the same cursor brings the same events, any number of times."""
    sampler = await open_sampler(w)
    for request in await draw(w, sampler, 0, 1, 2):
        await w.result(request)
    first = await news(w, sampler)
    assert await news(w, sampler) == first
    assert (await news(w, sampler, first["cursor"] - 1))["completions"] == first["completions"][-1:]


@over_http(long_poll_seconds=10)
async def test_a_poll_is_answered_as_soon_as_something_ends(w: Wired) -> None:
    sampler = await open_sampler(w)
    w.h.worker.hold = asyncio.Event()
    (request,) = await draw(w, sampler, 0)
    waiting = [asyncio.create_task(news(w, sampler)) for _ in range(2)]
    await asyncio.sleep(0.05)
    w.h.worker.hold.set()
    for told in await asyncio.wait_for(asyncio.gather(*waiting), 3):
        assert [event["request_id"] for event in told["completions"]] == [request]


@over_http(long_poll_seconds=10)
async def test_t42_timeout_0_is_answered_at_once(w: Wired) -> None:
    """T42: the client's limit is five seconds, whatever the server's own hold."""
    sampler = await open_sampler(w)
    started = time.monotonic()
    assert await news(w, sampler, 7, timeout=0) == {"completions": [], "cursor": 7}
    assert await news(w, sampler, 7, timeout=0.05) == {"completions": [], "cursor": 7}
    assert time.monotonic() - started < 2


@over_http()
async def test_t43_a_result_goes_only_when_its_client_says_so(w: Wired) -> None:
    """T43: read or not, it stays until it is named in `retrieved_request_ids`; then 410, and never executed again."""
    sampler, other = await open_sampler(w), await w.open_sampler(1)
    first, second = await draw(w, sampler, 0, 1)
    for request in (first, first, second):
        assert (await w.result(request)).status_code == 200
    await news(w, other, timeout=0, retrieved_request_ids=[first])  # not the one that it belongs to
    assert (await w.result(first)).status_code == 200
    told = await news(w, sampler, timeout=0, retrieved_request_ids=[first, "nothing"])
    assert len(told["completions"]) == 2
    assert (await w.retrieve(first)).status_code == 410
    assert (await w.result(second)).status_code == 200
    assert await draw(w, sampler, 0) == [first]
    assert len(w.h.worker.jobs) == 2


def test_t41_events_and_numbers_survive_a_kill(tmp_path: Path) -> None:
    """T41, T23: after a kill the same cursors mean the same, no number is given out again, and the poller goes on."""

    async def main() -> None:
        h = await Harness(tmp_path).start()
        w = Wired(h)
        sampler = await open_sampler(w)
        old = await draw(w, sampler, 0, 1)
        found, cursor = await all_news(w, sampler, 2)
        joined = [await join(w, sampler) for _ in range(2)]
        h.worker.hold = asyncio.Event()
        late = await draw(w, sampler, 2)
        await h.kill()

        h = await Harness(tmp_path).start()
        w = Wired(h)
        assert sorted(found) == sorted(old)
        assert (await all_news(w, sampler, 3))[0][:2] == found
        told = await news(w, sampler, cursor)
        assert [event["request_id"] for event in told["completions"]] == late
        assert told["cursor"] > cursor
        assert await join(w, sampler) not in [0, *joined]
        await h.daemon.stop()

    asyncio.run(main())


def test_t41_a_server_that_loads_or_stops_answers_503(tmp_path: Path) -> None:
    """T41: 404 would kill the client's poller for good; 503 is asked again every second."""

    async def main() -> None:
        h = await Harness(tmp_path).start()
        w = Wired(h, long_poll_seconds=20)
        sampler = await open_sampler(w)
        waiting = asyncio.create_task(w.post("retrieve_futures", {"target": {"sampling_session_id": sampler}}))
        await asyncio.sleep(0.05)
        h.daemon.begin_stop()
        assert (await asyncio.wait_for(waiting, 3)).status_code == 503
        await h.daemon.stop()

        unready = Harness(tmp_path)
        unready.daemon = Daemon(unready.settings, ModelPool((), lambda _: ScalarWorker(), lambda _: INFO), bodies)
        w = Wired(unready)
        for path, body in (
            ("retrieve_futures", {"target": {"sampling_session_id": sampler}}),
            ("join_sampling_session", {"sampling_session_id": sampler}),
        ):
            assert (await w.post(path, body)).status_code == 503
        await unready.daemon.abandon()

    asyncio.run(main())


@over_http({"result_ttl": 0.01})
async def test_numbers_go_on_after_results_have_expired(w: Wired) -> None:
    """4.5: the cursor never falls, or a poller that is ahead would never hear of anything again."""
    sampler = await open_sampler(w)
    await draw(w, sampler, 0, 1)
    _, cursor = await all_news(w, sampler, 2)
    await asyncio.sleep(0.05)
    await w.h.daemon._housekeeping.once()
    assert (await news(w, sampler, timeout=0))["completions"] == []
    (request,) = await draw(w, sampler, 2)
    told = await news(w, sampler, cursor, timeout=0.05)
    while not told["completions"]:
        told = await news(w, sampler, cursor)
    assert [event["request_id"] for event in told["completions"]] == [request]


@over_http()
async def test_an_unknown_sampler_is_404(w: Wired) -> None:
    await w.open_run()
    body = {"sampling_session_id": "nobody:sample:0"}
    assert (await w.post("join_sampling_session", body)).status_code == 404
    assert (await w.post("retrieve_futures", {"target": body})).status_code == 404
    assert (await w.post("retrieve_futures", {"target": {**body, "type": "run"}})).status_code == 400


# ---- clones ----


async def join(w: Wired, sampler: str) -> int:
    answer = await w.post("join_sampling_session", {"sampling_session_id": sampler})
    assert answer.status_code == 200, answer.text
    return answer.json()["client_counter"]


@over_http()
async def test_t23_no_clone_gets_0_or_another_ones_number(w: Wired) -> None:
    """T23: two clones that share a number would get each other's tokens from the replay table."""
    sampler, other = await open_sampler(w), await w.open_sampler(1)
    numbers = await asyncio.gather(*(join(w, sampler) for _ in range(20)))
    assert len(set(numbers)) == 20
    assert min(numbers) > 0
    assert await join(w, other) > 0


@over_http()
async def test_t22_clones_draw_in_ranges_of_their_own(w: Wired) -> None:
    """T22: the numbers of a clone begin at its own times 10^9 and wait for none below."""
    sampler = await open_sampler(w)
    for clone in (2, 1):
        (request,) = await draw(w, sampler, clone * CLONE + 4)
        assert (await all_news(w, sampler, 1, clone))[0] == [request]


# ---- cancelling ----


@over_http()
async def test_a_cancelled_sample_stops_and_fails(w: Wired) -> None:
    """4.6: its place is free at once, its future says so, the poller hears of it, and the others go on."""
    sampler = await open_sampler(w)
    w.h.worker.hold = asyncio.Event()
    doomed, other = await draw(w, sampler, 0, 1)
    assert depth(w) == 2
    assert (await w.post("cancel_future", {"request_id": doomed})).status_code == 200
    assert depth(w) == 1
    failed = (await w.result(doomed)).json()
    assert failed == {"error": "the sample was cancelled by its client.", "category": "user"}
    assert (await news(w, sampler))["completions"] == [{"state": "failed", "request_id": doomed}]
    assert await draw(w, sampler, 0) == [doomed]  # sent again, it is not drawn again
    w.h.worker.hold.set()
    assert (await w.result(other)).headers["content-type"] == "application/x-protobuf"
    assert len(w.h.worker.jobs) == 2


@over_http()
async def test_cancelling_is_idempotent_and_spares_what_is_no_running_sample(w: Wired) -> None:
    run = await w.open_run()
    sampler = await w.open_sampler()
    (done,) = await draw(w, sampler, 0)
    before = (await w.result(done)).content
    step = await w.step(run, 1)
    for request in (done, done, step, "no:such:0", "x"):
        assert (await w.post("cancel_future", {"request_id": request})).status_code == 200
    assert (await w.result(done)).content == before
    assert "error" not in (await w.result(step)).json()


def test_a_sample_is_cancelled_before_any_worker_is_ready(tmp_path: Path) -> None:
    """4.6: also one that waits, and also one from before a restart."""

    async def main() -> None:
        h = await Harness(tmp_path).start()
        w = Wired(h)
        sampler = await open_sampler(w)
        h.worker.hold = asyncio.Event()
        (request,) = await draw(w, sampler, 0)
        await h.kill()

        h = Harness(tmp_path)
        h.prepare = lambda worker: setattr(worker, "hold", asyncio.Event())
        w = Wired(await h.start())
        assert depth(w) == 1
        await w.post("cancel_future", {"request_id": request})
        assert depth(w) == 0
        assert (await w.result(request)).json()["category"] == "user"
        await h.kill()

        h = await Harness(tmp_path).start()
        w = Wired(h)
        assert depth(w) == 0
        assert (await w.result(request)).json()["category"] == "user"
        await h.daemon.stop()

    asyncio.run(main())


# ---- clients that are gone ----


async def sampler_alone(w: Wired) -> str:
    """In a session without runs, which a held worker would keep from leaving the device."""
    w.session = (await w.post("create_session", {"sdk_version": "0.38.0"})).json()["session_id"]
    return await w.open_sampler()


@over_http({"session_timeout": 0.5}, long_poll_seconds=0.1)
async def test_samples_of_a_silent_session_leave_the_device_and_come_back(w: Wired) -> None:
    """Nobody waits for them; but silence is no end (T50), so with the next sign of life they are drawn after all."""
    sampler = await sampler_alone(w)
    w.h.worker.hold = asyncio.Event()
    one, other = await draw(w, sampler, 0, 1)
    await asyncio.sleep(0.6)
    await w.h.daemon._housekeeping.once()
    assert depth(w) == 0
    await w.post("cancel_future", {"request_id": other})
    w.h.worker.hold.set()
    assert (await w.retrieve(one)).status_code == 408  # asking is a sign of life
    await w.h.daemon._housekeeping.once()
    assert (await w.result(one)).headers["content-type"] == "application/x-protobuf"
    assert (await w.result(other)).json()["category"] == "user"
    assert [job.request for job in w.h.worker.jobs] == [one, other, one]


@over_http()
async def test_samples_of_a_finished_session_stop_and_fail(w: Wired) -> None:
    sampler = await sampler_alone(w)
    w.h.worker.hold = asyncio.Event()
    (request,) = await draw(w, sampler, 0)
    assert (await w.post(f"sessions/{w.session}/finish", b"")).status_code == 200
    await w.h.daemon._housekeeping.once()
    assert depth(w) == 0
    assert "because its session is finished" in (await w.result(request)).json()["error"]


@over_http({"session_timeout": 0.5}, long_poll_seconds=0.1)
async def test_who_asks_for_news_is_not_silent(w: Wired) -> None:
    """4.5: a client that only polls is there, with or without heartbeats."""
    sampler = await sampler_alone(w)
    w.h.worker.hold = asyncio.Event()
    await draw(w, sampler, 0)
    await asyncio.sleep(0.6)
    await news(w, sampler, timeout=0)
    await w.h.daemon._housekeeping.once()
    assert depth(w) == 1
    w.h.worker.hold.set()
