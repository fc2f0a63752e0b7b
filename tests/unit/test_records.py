"""The read side over a real daemon and its HTTP app: sessions, runs, traces, audit, bills, in the SDK's own models."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from openrl.daemon.work import NewRun, NewSession, Raw
from openrl.server.app import create_app
from openrl.types import RunId, SessionId
from support.daemons import BASE, Harness
from support.fake_daemon import server_settings
from support.http import KEY, Http
from support.scalar_worker import BAD, SECONDS


class Client:
    """A daemon's harness and calls over HTTP that must work."""

    def __init__(self, h: Harness) -> None:
        self.h = h
        self.http = Http(create_app(h.daemon, server_settings(), KEY, b"s" * 32))

    async def call(self, method: str, path: str, body: Any = None, status: int = 200, **params: Any) -> Any:
        answer = await self.http.acall(method, path, json=body, params=params or None)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def get(self, path: str, **params: Any) -> Any:
        return await self.call("GET", path, **params)

    async def search(self, **body: Any) -> types.SessionSearchResponse:
        return types.SessionSearchResponse.model_validate(await self.call("POST", "sessions/search", body))

    async def open(self, **fields: Any) -> SessionId:
        return await self.h.daemon.create_session(NewSession("0.38.0", **fields), None)

    async def bill(self) -> dict[str, Any]:
        hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        return await self.get("billing/usage/events", starting_on=hour - HOUR, ending_before=hour + HOUR)


HOUR = timedelta(hours=1)


def scenario(test: Callable[[Client], Awaitable[None]]) -> Callable[[Path], None]:
    """Run an async test over a fresh daemon, and stop the daemon whatever happens."""

    def run(tmp_path: Path) -> None:
        async def main() -> None:
            harness = await Harness(tmp_path).start()
            try:
                await asyncio.wait_for(test(Client(harness)), 60)
            finally:
                await harness.daemon.stop()

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


# ---- sessions ----


@scenario
async def test_t24_metadata_comes_back_as_strings(c: Client) -> None:
    """T24: any JSON goes in; an int in an answer would make get_session and get_training_run fail."""
    given = {"step": 3, "lr": 0.5, "on": True, "name": "x", "list": [1, "é"], "none": None}
    expected = {"step": "3", "lr": "0.5", "on": "true", "name": "x", "list": '[1,"é"]', "none": "null"}
    session = await c.open(user_metadata=given, display_name="a name")
    new = NewRun(session, 1, BASE, 8, 1, True, True, True, {"type": "adamw"}, given)
    await c.h.result(await c.h.daemon.create_run(new, Raw("application/json", b"{}")))
    got = types.GetSessionResponse.model_validate(await c.get(f"sessions/{session}"))
    assert (got.user_metadata, got.display_name) == (expected, "a name")
    assert got.training_run_ids == [f"{session}:train:1"]
    run = types.TrainingRun.model_validate(await c.get(f"training_runs/{session}:train:1"))
    assert run.user_metadata == expected
    assert [s.session_id for s in (await c.search(user_metadata={"step": "3", "on": "true"})).sessions] == [session]
    assert (await c.search(user_metadata={"step": "4"})).sessions == []


@scenario
async def test_a_session_lists_its_runs_and_samplers_in_order(c: Client) -> None:
    runs = [await c.h.open_run(number) for number in range(3)]
    sampler = await c.h.save_sampler(runs[0], 1, 4)
    base = await c.h.daemon.create_sampler(c.h.session, 9, BASE, None)
    got = await c.get(f"sessions/{c.h.session}", access_scope="accessible")
    assert got["training_run_ids"] == runs
    assert got["sampler_ids"] == [sampler, base]
    assert "display_name" not in got
    await c.call("GET", "sessions/nope", status=404)


@scenario
async def test_sessions_are_listed_newest_first(c: Client) -> None:
    """E39."""
    opened = [await c.open() for _ in range(5)]
    assert (await c.get("sessions", limit=2, offset=1))["sessions"] == [opened[3], opened[2]]
    assert (await c.get("sessions"))["sessions"] == opened[::-1]
    for bad in ({"limit": 0}, {"limit": "x"}, {"offset": -1}, {"access_scope": "mine"}):
        refused = await c.call("GET", "sessions", status=400, **bad)
        assert next(iter(bad)) in refused["detail"]


@scenario
async def test_t31_a_search_is_paged_by_a_cursor_with_an_offset(c: Client) -> None:
    """T31: the SDK refuses a cursor without offset. Every session comes once, newest first."""
    opened = [await c.open(display_name=f"n{i}") for i in range(7)]
    found: list[str] = []
    cursor = None
    pages = 0
    while pages < 9:
        pages += 1
        page = await c.search(limit=3, **({"cursor": cursor} if cursor else {}))
        found += [session.session_id for session in page.sessions]
        if page.next_cursor is None:
            break
        assert page.next_cursor.last_created_at.tzinfo is not None
        cursor = page.next_cursor.model_dump(mode="json")
    assert (found, pages) == (opened[::-1], 3)
    await c.call("POST", "sessions/search", {"cursor": {"last_created_at": "2026-01-01T00:00:00"}}, status=400)


@scenario
async def test_a_search_by_name_id_project_owner_and_status(c: Client) -> None:
    """8.5: name or id, every word somewhere; statuses with reasons; one user owns all."""
    first = await c.open(display_name="Straße north RUN", project_id="p1")
    second = await c.open(display_name="run south")
    third = await c.open()
    await c.h.daemon.finish_session(second, "errored", "boom")

    async def ids(**body: Any) -> list[str]:
        return [session.session_id for session in (await c.search(**body)).sessions]

    assert await ids(display_name="run") == [second, first]
    assert await ids(display_name="STRASSE run") == [first]
    assert await ids(display_name="south", session_id=third) == [third, second]
    assert await ids(session_id=first) == [first]
    assert await ids(project_ids=["p1"]) == [first]
    assert await ids(project_ids=["default"]) == [third, second]
    assert await ids(project_ids=[]) == []
    assert await ids(statuses=[{"type": "active"}]) == [third, first]
    assert await ids(statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == [second]
    assert await ids(statuses=[{"type": "client_finished", "reasons": ["success"]}]) == []
    assert await ids(statuses=[{"type": "cancelled"}, {"type": "failed"}]) == []
    assert await ids(owner={"type": "accessible"}) == [third, second, first]
    assert await ids(owner={"type": "user", "owner_urns": ["tml:user:local"]}) == [third, second, first]
    assert await ids(owner={"type": "user", "owner_urns": ["tml:user:other"]}) == []
    for bad in ({"limit": 201}, {"limit": 0}, {"statuses": []}, {"display_name": ""}, {"owner": {"type": "x"}}):
        await c.call("POST", "sessions/search", bad, status=400)
    finished = (await c.search(session_id=second)).sessions[0]
    assert finished.status is not None
    assert finished.status.model_dump() == {
        "type": "client_finished",
        "reason": {"type": "errored"},
        "detail": "boom",
    }


@scenario
async def test_a_summary_counts_named_checkpoints(c: Client) -> None:
    run = await c.h.open_run()
    await c.h.result(await c.h.save(run, 1, "a"))
    await c.h.save_sampler(run, 2, 1)  # ephemeral: part of a sampler, nobody's checkpoint
    summary = (await c.search()).sessions[0]
    assert summary.checkpoints_count == 1
    assert (summary.checkpoint_storage_bytes or 0) > 0
    assert (summary.owner, summary.project_id) == ("tml:user:local", "default")


@scenario
async def test_a_silent_session_has_no_status(c: Client) -> None:
    """8.5: neither finished nor known to run; its next sign of life makes it active again."""
    session = await c.open()
    c.h.daemon._sessions._timeout = -1  # type: ignore[attr-defined]
    await c.h.daemon._housekeeping.once()  # type: ignore[attr-defined]
    assert (await c.search()).sessions[0].status is None
    await c.h.daemon.heartbeat(session)
    assert (await c.search(statuses=[{"type": "active"}])).sessions[0].session_id == session


@scenario
async def test_a_session_moves_into_a_project_with_its_runs(c: Client) -> None:
    """E42, E37: also when it is finished, and over a restart."""
    run = await c.h.open_run()
    await c.h.daemon.finish_session(c.h.session, "success", None)
    await c.call("PUT", f"sessions/{c.h.session}/project", {"project_id": "p2"})
    await c.call("PUT", f"sessions/{c.h.session}/project", {"project_id": ""}, status=400)
    await c.call("PUT", "sessions/nope/project", {"project_id": "p2"}, status=404)
    await c.h.kill()
    await c.h.start()
    c = Client(c.h)
    assert (await c.search()).sessions[0].project_id == "p2"
    assert [r["training_run_id"] for r in (await c.get("training_runs", project_id="p2"))["training_runs"]] == [run]
    assert (await c.get("training_runs", project_id="default"))["cursor"]["total_count"] == 0


# ---- runs ----


@scenario
async def test_t25_runs_are_paged_with_a_cursor(c: Client) -> None:
    """T25: without it the SDK refuses the answer; a page is as long as was asked, so that the CLI does not stop."""
    runs = [await c.h.open_run(number) for number in range(5)]
    page = types.TrainingRunsResponse.model_validate(await c.get("training_runs", limit=2, offset=2))
    assert [run.training_run_id for run in page.training_runs] == [runs[2], runs[1]]
    assert page.cursor.model_dump() == {"offset": 2, "limit": 2, "total_count": 5}
    assert len((await c.get("training_runs", limit=100))["training_runs"]) == 5
    assert (await c.get("training_runs", offset=9))["training_runs"] == []


@scenario
async def test_a_run_shows_its_newest_checkpoints_and_last_request(c: Client) -> None:
    """E38."""
    run = await c.h.open_run()
    before = types.TrainingRun.model_validate(await c.get(f"training_runs/{run}"))
    assert before.last_checkpoint is None
    for seq, name in enumerate(("a", "b"), 1):
        await c.h.result(await c.h.save(run, seq, name))
    await c.h.save_sampler(run, 3, 1)
    got = types.TrainingRun.model_validate(await c.get(f"training_runs/{run}"))
    assert got.last_checkpoint is not None
    assert got.last_checkpoint.checkpoint_id == "weights/b"
    assert got.last_checkpoint.checkpoint_type == "training"
    assert got.last_checkpoint.tinker_path == f"tinker://{run}/weights/b"
    assert got.last_sampler_checkpoint is None, "ephemeral ones cannot be asked for"
    assert got.last_request_time > before.last_request_time
    assert (got.lora_rank, got.is_lora, got.corrupted) == (8, True, False)
    await c.call("GET", "training_runs/nope", status=404)


# ---- traces ----


@scenario
async def test_a_trace_has_every_request_in_order_of_its_life(c: Client) -> None:
    """E43: accepted <= dispatched <= started <= done; nested events that Perfetto can match; no key needed."""
    run = await c.h.open_run()
    await c.h.train(run, 1, 5)
    await c.h.train(run, 2, BAD)
    await c.h.weight(await c.h.step(run, 3))
    sampler = await c.h.save_sampler(run, 4, 1)
    for seq in range(3):
        await c.h.result(await c.h.sample(sampler, seq))
    await c.h.train(run, 9, 1)  # waits for numbers that never come
    export = await c.get(f"sessions/{c.h.session}/trace_export")
    assert export["status"] == "ready"
    path = export["url"].removeprefix("http://localhost:8000")
    answer = await Http(c.http.app, key=None).acall("GET", "/" + path)
    assert answer.status_code == 200
    events = answer.json()["traceEvents"]
    whole = {e["args"]["request_id"]: e for e in events if e["ph"] == "b" and "request_id" in e["args"]}
    assert len(whole) == 9
    for event in whole.values():
        times = [event["args"][name] for name in ("accepted_at", "dispatched_at", "started_at", "done_at")]
        if event["args"]["seq_id"] == 9:
            assert times[1:] == [None, None, None]
        else:
            assert times == sorted(times)
            assert event["ts"] == round(times[0] * 1e6)
    _check_nesting(events)
    failed = [event["args"] for event in whole.values() if event["args"]["state"] == "failed"]
    assert [args["error"] for args in failed] == ["a bad datum"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {run, sampler}
    await c.call("GET", "sessions/nope/trace_export", status=404)


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """Begins and ends of each id match like brackets, and plain slices of a track do not overlap."""
    open_names: dict[str, list[tuple[str, int]]] = {}
    for event in events:
        if event["ph"] == "b":
            open_names.setdefault(event["id"], []).append((event["name"], event["ts"]))
        elif event["ph"] == "e":
            name, begun = open_names[event["id"]].pop()
            assert name == event["name"]
            assert begun <= event["ts"]
    assert not any(open_names.values())
    slices = sorted((e["pid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X")
    for (pid, _, end), (other, begin, _) in itertools.pairwise(slices):
        assert pid != other or end <= begin


# ---- audit ----


@scenario
async def test_the_audit_log_says_who_did_what(c: Client) -> None:
    """E44, 8.7: oldest first, by resource and UTC day."""
    run = await c.h.open_run()
    await c.h.result(await c.h.save(run, 1, "a"))
    path = f"tinker://{run}/weights/a"
    await c.h.result(await c.h.load(run, 2, path))
    await c.h.daemon.create_sampler(c.h.session, 1, None, path)
    await c.call("PUT", f"sessions/{c.h.session}/project", {"project_id": "p"})
    await c.h.daemon.finish_session(c.h.session, "success", None)
    await c.h.daemon.finish_session(c.h.session, "errored", None)  # the first reason wins
    log = types.AuditLogResponse.model_validate(await c.get("audit", event_type="all"))
    assert [entry.event for entry in log.entries] == [
        "session_create",
        "run_create",
        "checkpoint_create",
        "checkpoint_read",
        "checkpoint_read",
        "project_session_assign",
        "session_finish",
    ]
    save, load, sample = log.entries[2:5]
    assert (save.model_id, save.tinker_path) == (run, path)
    assert (load.purpose, load.tinker_path, sample.purpose) == ("load_weights", path, "sample")
    assert load.event_details["user"] == "tml:user:local"
    assert load.event_details["session_id"] == c.h.session
    assert len((await c.get("audit", event_type="checkpoints"))["entries"]) == 3
    assert len((await c.get("audit", event_type="projects"))["entries"]) == 1
    assert (await c.get("audit", event_type="teams"))["entries"] == []
    assert len((await c.get("audit", day=datetime.now(UTC).date()))["entries"]) == 7
    assert (await c.get("audit", day="2020-01-31"))["entries"] == []
    await c.call("GET", "audit", event_type="runs", status=400)
    await c.call("GET", "audit", day="yesterday", status=400)


@scenario
async def test_what_failed_is_not_in_the_audit_log(c: Client) -> None:
    run = await c.h.open_run()
    await c.h.result(await c.h.save(run, 1, "a"))
    assert (await c.h.result(await c.h.save(run, 2, "a"))).error
    assert (await c.h.result(await c.h.load(run, 3, f"tinker://{run}/weights/b"))).error
    assert len((await c.get("audit", event_type="checkpoints"))["entries"]) == 1


# ---- bills ----


@scenario
async def test_the_bill_is_what_was_used(c: Client) -> None:
    """E45: tokens of passes, prompts and samples, checkpoints, device seconds; failures cost nothing."""
    run = await c.h.open_run()
    await c.h.train(run, 1, 5, 6, 7)
    await c.h.train(run, 2, 8)
    await c.h.train(run, 3, BAD, 1)
    await c.h.weight(await c.h.step(run, 4))
    await c.h.result(await c.h.save(run, 5, "a"))
    sampler = await c.h.save_sampler(run, 6, 1)
    for seq in range(3):
        await c.h.result(await c.h.sample(sampler, seq))  # a prompt of two tokens, one drawn
    raw = await c.bill()
    bill = types.BillingUsageResponse.model_validate(raw)
    amounts: dict[str, float] = {}
    for event in bill.data:
        info = event.event_info.model_dump()
        amount = info.get("token_count", info.get("count", info.get("gigabyte_hours")))
        amounts[event.event_info.type] = amounts.get(event.event_info.type, 0) + amount
        assert event.base_model == BASE
        assert event.project_id == "default"
        assert event.session_id == (None if event.event_info.type == "storage" else c.h.session)
        assert event.estimated_cost_usd == (None if event.event_info.type == "checkpoint" else 0)
    assert amounts.pop("storage") > 0
    assert amounts == {"training": 4, "sampling_prefill": 6, "sampling_sample": 3, "checkpoint": 2}
    assert set(bill.sessions) == {c.h.session}
    seconds: dict[str, float] = {}
    for use in raw["device_seconds"]:
        seconds[use["activity"]] = seconds.get(use["activity"], 0) + use["seconds"]
    assert seconds == {"training": pytest.approx(3 * SECONDS), "sampling": pytest.approx(3 * SECONDS)}


@scenario
async def test_a_window_must_be_whole_hours_and_at_most_two_weeks(c: Client) -> None:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    for start, end in [
        (now + timedelta(minutes=1), now + HOUR),
        (now + 2 * HOUR, now + 3 * HOUR),
        (now, now),
        (now - timedelta(days=15), now),
        ("x", now),
    ]:
        await c.call("GET", "billing/usage/events", status=400, starting_on=start, ending_before=end)
    await c.call("GET", "billing/usage/events", status=400)
    long_ago = await c.get(
        "billing/usage/events", starting_on="2026-01-01T00:00:00Z", ending_before="2026-01-01T05:00:00Z"
    )
    assert long_ago["data"] == []


@scenario
async def test_storage_is_reported_while_it_lasts(c: Client) -> None:
    """E46, and E45 by time: an overwritten name counts each of its versions while it was there."""
    run = await c.h.open_run()
    await c.h.result(await c.h.save(run, 1, "a"))
    await c.h.result(await c.h.save(run, 2, "a", overwrite=True))
    now = types.CurrentCheckpointStorageUsageResponse.model_validate(await c.get("billing/usage/checkpoints/current"))
    size = (await c.h.daemon.checkpoint(f"tinker://{run}/weights/a")).size_bytes
    assert [(row.project_id, row.checkpoint_count, row.size_bytes) for row in now.data] == [("default", 1, size)]
    assert now.data[0].size_gigabytes == size / 1e9
    assert (now.effective_rate_usd_per_gigabyte_month, now.data[0].estimated_monthly_cost_usd) == (0, 0)
    assert (await c.get("billing/usage/checkpoints/current", project_id="other"))["data"] == []
    spans = await c.h.daemon._db.run(  # type: ignore[attr-defined]
        lambda db: [tuple(row) for row in db.execute("SELECT from_at, to_at FROM storage ORDER BY id")]
    )
    assert len(spans) == 2
    assert spans[0][0] <= spans[0][1] <= spans[1][0] + 0.01
    assert spans[1][1] is None


@scenario
async def test_a_retry_is_metered_once(c: Client) -> None:
    run = await c.h.open_run()
    for _ in range(3):
        await c.h.result(await c.h.train(run, 1, 5, 6))
    await c.h.kill()
    await c.h.start()
    c = Client(c.h)
    await c.h.weight(await c.h.step(run, 2))  # replays request 1
    bill = types.BillingUsageResponse.model_validate(await c.bill())
    assert [event.event_info.token_count for event in bill.data if event.event_info.type == "training"] == [2]


# ---- size ----


@scenario
async def test_lists_stay_fast_with_many_rows(c: Client) -> None:
    """1,000 checkpoints of 200 runs and 5,000 finished requests: a page costs what it shows."""
    run = await c.h.open_run()

    def fill(db: Any) -> None:
        spec = db.execute("SELECT spec FROM runs").fetchone()[0]
        now = time.time()
        for number in range(200):
            other = f"{c.h.session}:train:{number + 10}"
            db.execute(
                "INSERT INTO runs SELECT ?, session_id, base_model, spec, state, user_metadata, ?,"
                " last_request_at, reason, next_seq, snapshot_folder, snapshot_seq, owner FROM runs WHERE id = ?",
                (other, now + number / 1e3, run),
            )
            for index in range(5):
                db.execute(
                    "INSERT INTO checkpoints (path, run_id, kind, name, folder, base_model, spec, size_bytes,"
                    " created_at, user_metadata, ephemeral) VALUES (?, ?, 'weights', ?, 'f', ?, ?, 7, ?, '{}', 0)",
                    (f"tinker://{other}/weights/{index}", other, str(index), BASE, spec, now + index),
                )
            for seq in range(25):
                db.execute(
                    "INSERT INTO requests (id, scope, seq, op, state, content_type, payload, accepted_at,"
                    " started_at, done_at) VALUES (?, ?, ?, 'optim_step', 'done', 'x', x'', ?, ?, ?)",
                    (f"{other}:{seq}", other, seq, now, now, now),
                )

    await c.h.daemon._db.run(fill)  # type: ignore[attr-defined]

    async def seconds(path: str, **params: Any) -> float:
        await c.get(path, **params)
        start = time.perf_counter()
        await c.get(path, **params)
        return time.perf_counter() - start

    assert await seconds("training_runs", limit=20) < 0.1
    assert await seconds("training_runs", limit=100, offset=100) < 0.2
    assert await seconds("sessions") < 0.1
    assert await seconds(f"sessions/{c.h.session}") < 0.1
    assert await seconds("billing/usage/checkpoints/current") < 0.1
    page = await c.get("training_runs", limit=1)
    assert page["training_runs"][0]["last_checkpoint"]["checkpoint_id"] == "weights/4"
    export = await c.get(f"sessions/{c.h.session}/trace_export")
    answer = await c.http.acall("GET", "/" + export["url"].removeprefix("http://localhost:8000"))
    assert json.loads(answer.content)["otherData"]["requests"] == 5001
    assert RunId(run) in {e["args"].get("name") for e in answer.json()["traceEvents"]}
