"""Owners apart: what another owner's key sees of things, and what it may do with those that are published."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from openrl.keys.principal import Scope
from openrl.server.app import create_app
from openrl.store import migrations
from openrl.store.db import Database
from support.daemons import BASE, Harness
from support.fake_daemon import server_settings
from support.http import KEY, Http
from support.tenants import PROMPT, SECRET, World, furnish, scenario

API_TOKEN = "x-tinker-weights-access-token"


async def run_of(world: World, who: str) -> str:
    """A run of one's own, whose session's other numbers are free."""
    session, done = await world.open_run(who)
    assert "error" not in done, done
    return f"{session}:train:0"


def rest(path: str, suffix: str = "") -> str:
    run, _, name = path.removeprefix("tinker://").partition("/")
    return f"training_runs/{run}/checkpoints/{name}{suffix}"


# ---- nothing is told of what is someone else's ----


@scenario
async def test_what_is_anothers_reads_as_what_does_not_exist(world: World) -> None:
    """7.8: not the owner is 404; and not even the words differ."""
    await furnish(world)
    own = await run_of(world, "bob")
    ids = world.ids
    gone = {name: value.replace(ids["session"], "0123456789abcdef") for name, value in ids.items()}
    calls: list[tuple[str, str, Any]] = [
        ("GET", "sessions/{session}", None),
        ("GET", "training_runs/{run}", None),
        ("GET", "training_runs/{run}/checkpoints", None),
        ("GET", "samplers/{sampler}", None),
        ("DELETE", "training_runs/{run}/checkpoints/weights/a", None),
        ("PUT", "training_runs/{run}/checkpoints/weights/a/ttl", {"ttl_seconds": 7200}),
        ("POST", "training_runs/{run}/checkpoints/weights/a/publish", None),
        ("GET", "training_runs/{run}/checkpoints/weights/a/archive", None),
        ("POST", "weights_info", {"tinker_path": "{a}"}),
        ("POST", "copy_weights", {"source_path": "{a}", "destination_project_id": "p"}),
        ("POST", "retrieve_future", {"request_id": "{future}"}),
        ("POST", "cancel_future", {"request_id": "{future}"}),
        ("POST", "optim_step", {"model_id": "{run}", "seq_id": 5, "adam_params": {}}),
        ("POST", "get_info", {"model_id": "{run}"}),
        ("POST", "session_heartbeat", {"session_id": "{session}"}),
        ("POST", "asample", {"sampling_session_id": "{sampler}", "seq_id": 0, "prompt": PROMPT, "sampling_params": {}}),
        ("POST", "create_model", {"session_id": "{session}", "model_seq_id": 5, "base_model": BASE}),
        ("POST", "load_weights", {"session_id": own.split(":")[0], "model_seq_id": 3, "path": "{a}"}),
    ]
    for method, path, body in calls:
        answers: list[tuple[int, str]] = []
        for known in (ids, gone):
            filled = json.loads(fill(json.dumps(body), known))
            answer = await world.call("bob", method, fill(path, known), filled)
            answers.append((answer.status_code, answer.text.replace(known["session"], "SESSION")))
        assert answers[0] == answers[1], (method, path)


def fill(text: str, ids: dict[str, str]) -> str:
    for name, value in ids.items():
        text = text.replace(f"{{{name}}}", value)
    return text


@scenario
async def test_what_is_anothers_cannot_be_loaded(world: World) -> None:
    """7.3: a training request, so the refusal is a failed future; and the path tells nothing."""
    await furnish(world)
    own = await run_of(world, "bob")
    errors: list[str] = []
    for seq, path in enumerate((world.ids["a"], world.ids["a"].replace("/a", "/none")), 1):
        load = {"model_id": own, "seq_id": seq, "path": path, "optimizer": False, "openrl_reader": "*"}
        done = await world.result("bob", await world.post("bob", "load_weights", load))
        assert done["category"] == "user"
        errors.append(done["error"].replace(path, "PATH"))
    assert errors[0] == errors[1]
    step = {"model_id": own, "seq_id": 3, "adam_params": {}}
    assert "error" not in await world.result("bob", await world.post("bob", "optim_step", step)), "the run goes on"


@scenario
async def test_cancelling_and_acknowledging_are_ones_own(world: World) -> None:
    await furnish(world)
    gate = asyncio.Event()
    world.harness.worker.hold = gate
    sample = {"sampling_session_id": world.ids["sampler"], "prompt": PROMPT, "sampling_params": {"max_tokens": 1}}
    promised = await world.post("alice", "asample", {**sample, "seq_id": 0})
    await world.post("bob", "cancel_future", promised)
    assert (await world.call("reader", "POST", "cancel_future", promised)).status_code == 403
    gate.set()
    accept = {"accept": "application/x-protobuf"}
    answer = await world.call("alice", "POST", "retrieve_future", promised, **accept)
    assert answer.headers["content-type"] == "application/x-protobuf", answer.text
    target = {"type": "sampling_session", "sampling_session_id": world.ids["sampler"], "cloned_sampler_id": 0}
    poll = {"target": target, "prev_cursor": 0, "timeout": 0, "retrieved_request_ids": [promised["request_id"]]}
    assert len((await world.post("reader", "retrieve_futures", poll))["completions"]) == 1
    assert (await world.call("alice", "POST", "retrieve_future", promised, **accept)).status_code == 200
    await world.post("alice", "retrieve_futures", poll)
    assert (await world.call("alice", "POST", "retrieve_future", promised, **accept)).status_code == 410


@scenario
async def test_one_idempotency_key_of_two_owners_means_two_sessions(world: World) -> None:
    """4.7: the key is the client's own word, which another may use as well."""
    await furnish(world)
    made: dict[str, str] = {}
    for who in ("alice", "bob", "alice"):
        answer = await world.call(who, "POST", "create_session", {"sdk_version": "1"}, **{"x-idempotency-key": "k"})
        session = answer.json()["session_id"]
        assert made.setdefault(who, session) == session
    assert made["alice"] != made["bob"]


# ---- lists ----


async def shown(world: World, who: str) -> dict[str, Any]:
    runs = (await world.call(who, "GET", "training_runs")).json()
    everyone = (await world.call(who, "GET", "training_runs?access_scope=accessible")).json()
    search = await world.post(who, "sessions/search", {"owner": {"type": "accessible"}})
    found = await world.post(who, "sessions/search", {"owner": {"type": "user", "owner_urns": ["tml:user:alice"]}})
    return {
        "runs": runs["cursor"]["total_count"],
        "accessible": everyone["cursor"]["total_count"],
        "sessions": len((await world.call(who, "GET", "sessions?access_scope=accessible")).json()["sessions"]),
        "search": len(search["sessions"]),
        "of alice": len(found["sessions"]),
        "checkpoints": (await world.call(who, "GET", "checkpoints")).json()["cursor"]["total_count"],
        "audit": len((await world.call(who, "GET", "audit")).json()["entries"]) > 0,
        "bytes": [row["user_name"] for row in (await bytes_stored(world, who))],
    }


async def bytes_stored(world: World, who: str) -> list[Any]:
    return (await world.call(who, "GET", "billing/usage/checkpoints/current")).json()["data"]


@scenario
async def test_lists_hold_what_is_ones_own_and_an_administrators_all(world: World) -> None:
    """8.9: owned is the default; accessible is all that the caller may read."""
    await furnish(world)
    alice = {"runs": 1, "accessible": 1, "sessions": 1, "search": 1, "of alice": 1, "checkpoints": 3, "audit": True}
    nothing = dict.fromkeys(alice, 0) | {"audit": False, "bytes": []}
    assert await shown(world, "alice") == alice | {"bytes": ["alice"]}
    assert await shown(world, "reader") == alice | {"bytes": ["alice"]}
    assert await shown(world, "bob") == nothing
    for admin in ("admin", "other_admin"):
        assert await shown(world, admin) == alice | {"runs": 0, "bytes": ["alice"]}
    audited = (await world.call("admin", "GET", "audit")).json()["entries"]
    assert {entry["event_details"]["user"] for entry in audited} == {"tml:user:alice", "tml:user:local"}
    assert {"key_create", "key_revoke"} <= {entry["event"] for entry in audited}
    events = {entry["event"] for entry in (await world.call("alice", "GET", "audit")).json()["entries"]}
    assert events == {"session_create", "run_create", "checkpoint_create", "checkpoint_publish"}


@scenario
async def test_bills_and_status_are_ones_own(world: World) -> None:
    await furnish(world)
    for who in ("alice", "bob"):
        bobs = run = world.ids["run"] if who == "alice" else await run_of(world, who)
        body = {"model_id": run, "seq_id": 4 if who == "alice" else 1, "adam_params": {}}
        await world.result(who, await world.post(who, "optim_step", body))
    hour = await world.harness.daemon.rest.bill(*_today())
    assert {use.session_id for use in hour.device} >= {world.ids["session"]}
    for who, sessions in (("alice", 1), ("bob", 1), ("admin", 2)):
        start, end = (at.isoformat().replace("+00:00", "Z") for at in _today())
        query = f"billing/usage/events?starting_on={start}&ending_before={end}"
        assert len((await world.call(who, "GET", query)).json()["sessions"]) == sessions
    for who, runs in (("reader", 1), ("admin", 2)):
        status = await world.call(who, "GET", "status")
        assert len(status.json()["runs"]) == runs
        assert (bobs.partition(":")[0] in status.text) is (who == "admin"), "in no part of it"


def _today() -> Any:
    start = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return start, start + timedelta(days=2)


# ---- published checkpoints, administrators, access tokens ----


@scenario
async def test_a_published_checkpoint_is_everyones_to_read_and_its_owners_to_change(world: World) -> None:
    """7.4, 7.8."""
    await furnish(world)
    run = await run_of(world, "bob")
    session, path = run.split(":")[0], world.ids["public"]
    assert (await world.post("bob", "weights_info", {"tinker_path": path}))["base_model"] == BASE
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    await world.post("bob", "create_sampling_session", sampling)
    load = {"model_id": run, "seq_id": 1, "path": path, "optimizer": True}
    assert "error" not in await world.result("bob", await world.post("bob", "load_weights", load))
    born = {"session_id": session, "model_seq_id": 5, "path": path, "optimizer": False}
    assert "error" not in await world.result("bob", await world.post("bob", "load_weights", born))
    assert (await world.call("bob", "GET", rest(path, "/archive"))).status_code == 302
    copied = await world.post("bob", "copy_weights", {"source_path": path, "destination_project_id": "p"})
    assert (await world.call("bob", "PUT", rest(copied["tinker_path"], "/ttl"), {"ttl_seconds": 7200})).is_success
    assert (await world.call("alice", "POST", "weights_info", copied)).status_code == 404, "the copy is bob's"
    changes = ("PUT", "/ttl", {"ttl_seconds": 7200}), ("DELETE", "", None), ("DELETE", "/publish", None)
    for method, suffix, body in changes:
        assert (await world.call("bob", method, rest(path, suffix), body)).status_code == 404
    assert (await world.call("alice", "DELETE", rest(path, "/publish"))).status_code == 200
    assert (await world.call("bob", "POST", "weights_info", {"tinker_path": path})).status_code == 404


@scenario
async def test_an_administrator_may_load_and_change_what_is_anothers(world: World) -> None:
    await furnish(world)
    run = await run_of(world, "other_admin")
    load = {"model_id": run, "seq_id": 1, "path": world.ids["a"], "optimizer": True}
    assert "error" not in await world.result("other_admin", await world.post("other_admin", "load_weights", load))
    into_alices = {"model_id": world.ids["run"], "seq_id": 4, "path": world.ids["a"], "optimizer": True}
    assert "error" not in await world.result("admin", await world.post("admin", "load_weights", into_alices))
    assert (await world.call("other_admin", "DELETE", rest(world.ids["a"]))).status_code == 204
    assert (await world.call("alice", "POST", "weights_info", {"tinker_path": world.ids["a"]})).status_code == 404


@scenario
async def test_an_access_token_reads_in_place_of_the_caller_and_is_not_kept(world: World) -> None:
    """7.3, 7.5, T52: it is another account's key or JWT."""
    await furnish(world)
    run, path, key = await run_of(world, "bob"), world.ids["a"], world.keys["alice"]
    jwt = (await world.post("alice", "auth/token", {}))["jwt"]
    body = {"source_path": path, "destination_project_id": "p"}
    for token, status in ((key, 200), (jwt, 200), (world.keys["bob"], 404), ("tml-nobody", 401)):
        assert (await world.call("bob", "POST", "copy_weights", body, **{API_TOKEN: token})).status_code == status
    load = {"model_id": run, "path": path, "optimizer": True}
    for seq, (token, worked) in enumerate(((jwt, True), (world.keys["bob"], False), (key, True)), 1):
        promised = await world.post("bob", "load_weights", {**load, "seq_id": seq, "weights_access_token": token})
        assert ("error" not in await world.result("bob", promised)) is worked
    born = {"session_id": run.split(":")[0], "model_seq_id": 5, "path": path, "weights_access_token": key}
    assert "error" not in await world.result("bob", await world.post("bob", "load_weights", born))
    kept = b"".join(file.read_bytes() for file in world.harness.settings.data_dir.glob("openrl.sqlite*"))
    assert not any(secret.encode() in kept for secret in (*world.keys.values(), jwt))


def test_a_load_by_token_that_waits_for_a_restart_still_works(tmp_path: Path) -> None:
    """What is stored is on whose behalf it reads, so that the token itself need not be."""

    async def main() -> None:
        h = await Harness(tmp_path).start()
        world = World(h, Http(create_app(h.daemon, server_settings(long_poll_seconds=20.0), KEY, SECRET), key=None))
        await furnish(world)
        run = await run_of(world, "bob")
        h.worker.hold = asyncio.Event()
        load = {"model_id": run, "seq_id": 1, "path": world.ids["a"], "optimizer": True}
        promised = await world.post("bob", "load_weights", {**load, "weights_access_token": world.keys["alice"]})
        await h.kill()
        await h.start()
        world.http = Http(create_app(h.daemon, server_settings(long_poll_seconds=20.0), KEY, SECRET), key=None)
        assert "error" not in await world.result("bob", promised)
        await h.daemon.stop()

    asyncio.run(main())


# ---- what outlives a server ----


def test_owners_outlive_a_kill_and_a_lost_store(tmp_path: Path) -> None:
    """From the rows after a kill; from the manifests when the rows are gone. Keys are lost with the store."""

    async def main() -> None:
        h = await Harness(tmp_path).start()
        world = World(h, Http(create_app(h.daemon, server_settings(long_poll_seconds=20.0), KEY, SECRET), key=None))
        await furnish(world)
        for lost in (False, True):
            await h.kill()
            if lost:
                for file in tmp_path.glob("openrl.sqlite*"):
                    file.unlink()
            await h.start()
            world.http = Http(create_app(h.daemon, server_settings(long_poll_seconds=20.0), KEY, SECRET), key=None)
            if lost:
                await world.key("alice", "alice", Scope.USE)
                await world.key("bob", "bob", Scope.USE)
            else:
                assert (await world.call("bob", "GET", f"sessions/{world.ids['session']}")).status_code == 404
                future = {"request_id": world.ids["future"]}
                assert (await world.call("bob", "POST", "retrieve_future", future)).status_code == 410
            for who, status in (("alice", 200), ("bob", 404), ("admin", 200)):
                answer = await world.call(who, "POST", "weights_info", {"tinker_path": world.ids["a"]})
                assert answer.status_code == status, (who, lost)
                runs = await world.call(who, "GET", f"training_runs/{world.ids['run']}/checkpoints")
                assert runs.status_code == status
            public = await world.call("bob", "POST", "weights_info", {"tinker_path": world.ids["public"]})
            assert public.status_code == 200
        await h.daemon.stop()

    asyncio.run(main())


def test_what_was_there_before_keys_is_the_machines_own(tmp_path: Path) -> None:
    """A store of the schema before owners."""

    async def main() -> None:
        before = migrations.MIGRATIONS
        number = [step.__name__ for step in before].index("m006_owners")
        migrations.MIGRATIONS = before[:number]
        try:
            Database(tmp_path / "openrl.sqlite").close()
        finally:
            migrations.MIGRATIONS = before
        with sqlite3.connect(tmp_path / "openrl.sqlite") as old:
            old.execute(
                "INSERT INTO sessions (id, state, created_at, last_seen, sdk_version, tags, user_metadata)"
                " VALUES ('old', 'active', 1.0, 1.0, '', '[]', '{}')"
            )
        h = await Harness(tmp_path).start()
        world = World(h, Http(create_app(h.daemon, server_settings(long_poll_seconds=20.0), KEY, SECRET), key=None))
        await world.key("bob", "bob", Scope.USE)
        assert (await world.call("admin", "GET", "sessions/old")).status_code == 200
        assert (await world.call("bob", "GET", "sessions/old")).status_code == 404
        await h.daemon.stop()

    asyncio.run(main())


# ---- forged ids ----

BAD_IDS = [
    "",
    "..",
    "../../etc/passwd",
    "%2e%2e%2fapi_key",
    "a\x00b",
    ":train:0",
    "::",
    "tinker://",
    "' OR 1=1 --",
    "x" * 5000,
    "ключ",
]


@pytest.mark.parametrize("bad", BAD_IDS, ids=range(len(BAD_IDS)))
def test_forged_ids_find_nothing(tmp_path: Path, bad: str) -> None:
    """Ids and paths that climb, break out of SQL or are absurd: a clean refusal, whoever asks."""

    @scenario
    async def forged(world: World) -> None:
        await furnish(world)
        mine = world.ids["session"]
        bodies: list[tuple[str, Any]] = [
            ("retrieve_future", {"request_id": bad}),
            ("get_info", {"model_id": bad}),
            ("get_info", {"model_id": f"{mine}:{bad}"}),
            ("weights_info", {"tinker_path": f"tinker://{mine}:train:0/weights/{bad}"}),
            ("weights_info", {"tinker_path": f"tinker://{bad}/weights/a"}),
            ("save_weights", {"model_id": world.ids["run"], "seq_id": 4, "path": bad}),
            ("create_sampling_session", {"session_id": mine, "sampling_session_seq_id": 3, "model_path": bad}),
            ("create_session", {"sdk_version": bad, "project_id": bad}),
        ]
        for who in ("alice", "bob"):
            for path, body in bodies:
                answer = await world.call(who, "POST", path, body)
                assert answer.status_code in (200, 400, 404, 410), (path, answer.text)
                if path == "save_weights" and answer.status_code == 200:
                    assert (await world.result(who, answer.json()))["category"] == "user"
                elif path != "create_session":
                    assert answer.status_code != 200
        adopt = await world.call("admin", "POST", "checkpoints/adopt", {"folder": bad})
        assert adopt.status_code == 400
        names = {file.name for file in world.harness.settings.data_dir.rglob("*")}
        assert "passwd" not in names

    forged(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "//signed/archives/../../api_key",
        "//signed/archives/%2e%2e/%2e%2e/api_key",
        "//signed/files/..%2f..%2fapi_key/x",
        "//hf/../api/v1/status",
        "//hf/%2e%2e/%2e%2e/api_key",
        "training_runs/../keys",
        "//api/v1/../v1/keys",
        "//api/v1//keys",
    ],
)
def test_paths_that_climb_open_nothing(tmp_path: Path, path: str) -> None:
    @scenario
    async def climb(world: World) -> None:
        await furnish(world)
        for who in (None, "bob"):
            answer = await world.call(who, "GET", path)
            assert answer.status_code in (401, 403, 404), answer.text
            assert "tml-" not in answer.text

    climb(tmp_path)
