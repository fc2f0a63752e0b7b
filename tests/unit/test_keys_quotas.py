"""Quotas of owners: what is refused, in which form, and that nothing else is disturbed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from openrl.keys.key import UNLIMITED, Quotas
from openrl.keys.principal import Scope
from openrl.server.app import create_app
from support.daemons import BASE, Harness
from support.fake_daemon import server_settings
from support.http import KEY, Http
from support.tenants import PASS, PROMPT, SECRET, World, scenario


async def give(world: World, quotas: Quotas) -> None:
    """Alice with quotas, bob without."""
    await world.key("alice", "alice", Scope.USE, quotas=quotas)
    await world.key("bob", "bob", Scope.USE)


async def train(world: World, who: str, run: str, seq: int, passes: int = 1) -> Any:
    """A forward_backward of 2 tokens a pass."""
    body = {"model_id": run, "seq_id": seq, "forward_backward_input": {**PASS, "data": PASS["data"] * passes}}
    return await world.post(who, "forward_backward", body)


async def step(world: World, who: str, run: str, seq: int) -> Any:
    return await world.result(who, await world.post(who, "optim_step", {"model_id": run, "seq_id": seq}))


async def save(world: World, who: str, run: str, seq: int, name: str, **more: Any) -> Any:
    body = {"model_id": run, "seq_id": seq, "path": name, **more}
    return await world.result(who, await world.post(who, "save_weights", body))


# ---- runs ----


@scenario
async def test_runs_at_a_time(world: World) -> None:
    """5.2: a failed future; a run that ends makes room, and sending again costs nothing."""
    await give(world, Quotas(runs=2))
    session, first = await world.open_run("alice")
    _, second = await world.open_run("alice", 1, session)
    _, refused = await world.open_run("alice", 2, session)
    assert "error" not in first | second
    assert refused["category"] == "user"
    assert "2 runs of alice are open; the limit is 2" in refused["error"]
    new = {"session_id": session, "model_seq_id": 1, "base_model": BASE, "lora_config": {"rank": 8}}
    assert "error" not in await world.result("alice", await world.post("alice", "create_model", new)), "a retry"
    assert "error" not in (await world.open_run("bob"))[1]
    await world.result("alice", await world.post("alice", "unload_model", {"model_id": f"{session}:train:0"}))
    assert "error" not in (await world.open_run("alice", 3, session))[1]


@scenario
async def test_runs_at_a_time_hold_for_creations_at_once_and_from_checkpoints(world: World) -> None:
    await give(world, Quotas(runs=2))
    session, _ = await world.open_run("alice")
    path = (await save(world, "alice", f"{session}:train:0", 1, "a"))["path"]
    made = await asyncio.gather(*(world.open_run("alice", number, session) for number in range(1, 6)))
    assert sum("error" not in done for _, done in made) == 1
    born = {"session_id": session, "model_seq_id": 9, "path": path, "optimizer": False}
    assert "quota" in (await world.result("alice", await world.post("alice", "load_weights", born)))["error"]


@scenario
async def test_runs_of_a_finished_or_silent_session_do_not_count(world: World) -> None:
    await give(world, Quotas(runs=1))
    session, _ = await world.open_run("alice")
    await world.post("alice", f"sessions/{session}/finish", {"reason": {"type": "success"}})
    other, done = await world.open_run("alice")
    assert "error" not in done
    daemon: Any = world.harness.daemon
    daemon._sessions._timeout = 0
    await daemon._sessions.expire_silent()
    assert "error" not in (await world.open_run("alice"))[1]
    assert other != session


# ---- tokens ----


@scenario
async def test_tokens_a_day_end_training_as_a_failed_future(world: World) -> None:
    """11.2, O9: the run's numbers go on, the gradient stays, and other calls and owners are not disturbed."""
    await give(world, Quotas(tokens_per_day=5))
    session, _ = await world.open_run("alice")
    run = f"{session}:train:0"
    worked = await world.call("alice", "POST", "retrieve_future", await train(world, "alice", run, 1, 2))
    assert "error" not in worked.text
    refused = await world.result("alice", await train(world, "alice", run, 2))
    assert refused["category"] == "user"
    assert "4 of 5 tokens today" in refused["error"]
    again = await world.result("alice", await train(world, "alice", run, 2))
    assert again == refused, "4.7"
    assert (await step(world, "alice", run, 3))["metrics"]["weight:sum"] == 2 + 14, "the first pass still counts"
    assert "path" in await save(world, "alice", run, 4, "a"), "saving costs no tokens"
    bobs, _ = await world.open_run("bob")
    done = await world.call("bob", "POST", "retrieve_future", await train(world, "bob", f"{bobs}:train:0", 1, 9))
    assert "error" not in done.text


@scenario
async def test_tokens_under_way_count_and_come_back_when_they_fail(world: World) -> None:
    """Many at once do not pass where one after the other would not."""
    await give(world, Quotas(tokens_per_day=6))
    session, _ = await world.open_run("alice")
    run = f"{session}:train:0"
    world.harness.worker.hold = asyncio.Event()
    promises = await asyncio.gather(*(train(world, "alice", run, seq) for seq in range(1, 9)))
    world.harness.worker.hold.set()
    ended = [await world.call("alice", "POST", "retrieve_future", promise) for promise in promises]
    assert sum("quota" in answer.text for answer in ended) == 5
    assert world.harness.daemon.quotas.spent_today("alice") == 6


@scenario
async def test_tokens_of_failed_work_are_given_back(world: World) -> None:
    from support.scalar_worker import BAD

    await give(world, Quotas(tokens_per_day=4))
    session, _ = await world.open_run("alice")
    run = f"{session}:train:0"
    bad = {"model_input": {"chunks": [{"tokens": [BAD, BAD]}]}, "loss_fn_inputs": PASS["data"][0]["loss_fn_inputs"]}
    for seq in range(1, 5):
        body = {"model_id": run, "seq_id": seq, "forward_backward_input": {**PASS, "data": [bad]}}
        done = await world.result("alice", await world.post("alice", "forward_backward", body))
        assert "quota" not in done["error"]
    worked = await world.call("alice", "POST", "retrieve_future", await train(world, "alice", run, 5, 2))
    assert "quota" not in worked.text


@scenario
async def test_tokens_a_day_end_samples_as_a_failed_future(world: World) -> None:
    """6.4: final (a 429 would be sent again for hours); and the poller hears of it, too (4.5)."""
    await give(world, Quotas(tokens_per_day=7))
    session = (await world.post("alice", "create_session", {"sdk_version": "1"}))["session_id"]
    sampler = (
        await world.post(
            "alice",
            "create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE},
        )
    )["sampling_session_id"]
    sample = {"sampling_session_id": sampler, "prompt": PROMPT, "sampling_params": {"max_tokens": 1}}
    accept = {"accept": "application/x-protobuf"}
    for seq in range(2):  # 3 tokens each
        promised = await world.post("alice", "asample", {**sample, "seq_id": seq})
        answer = await world.call("alice", "POST", "retrieve_future", promised, **accept)
        assert answer.headers["content-type"] == "application/x-protobuf", answer.text
    promised = await world.post("alice", "asample", {**sample, "seq_id": 2})
    refused = await world.result("alice", promised)
    assert refused["category"] == "user"
    assert "6 of 7 tokens" in refused["error"]
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    news = await world.post("alice", "retrieve_futures", {"target": target, "prev_cursor": 0, "timeout": 0})
    assert [entry["state"] for entry in news["completions"]] == ["finished", "finished", "failed"]


@scenario
async def test_a_sample_that_others_may_leave_room_for_is_told_to_wait(world: World) -> None:
    """6.4: 429 is back-pressure; the SDK sends it again."""
    await give(world, Quotas(tokens_per_day=20))
    session = (await world.post("alice", "create_session", {"sdk_version": "1"}))["session_id"]
    new = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = (await world.post("alice", "create_sampling_session", new))["sampling_session_id"]
    sample = {"sampling_session_id": sampler, "prompt": PROMPT, "sampling_params": {"max_tokens": 12}}
    world.harness.worker.hold = asyncio.Event()
    promised = await world.post("alice", "asample", {**sample, "seq_id": 0})
    assert (await world.call("alice", "POST", "asample", {**sample, "seq_id": 1})).status_code == 429
    assert (await world.post("alice", "asample", {**sample, "seq_id": 0}))["request_id"] == promised["request_id"]
    world.harness.worker.hold.set()
    accept = {"accept": "application/x-protobuf"}
    await world.call("alice", "POST", "retrieve_future", promised, **accept)
    assert (await world.call("alice", "POST", "asample", {**sample, "seq_id": 1})).status_code == 200


def test_todays_tokens_outlive_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        h = await Harness(tmp_path).start()
        world = World(h, Http(create_app(h.daemon, server_settings(long_poll_seconds=20.0), KEY, SECRET), key=None))
        await give(world, Quotas(tokens_per_day=4))
        session, _ = await world.open_run("alice")
        run = f"{session}:train:0"
        await world.call("alice", "POST", "retrieve_future", await train(world, "alice", run, 1, 2))
        await h.kill()
        await h.start()
        world.http = Http(create_app(h.daemon, server_settings(long_poll_seconds=20.0), KEY, SECRET), key=None)
        assert h.daemon.quotas.spent_today("alice") == 4
        assert "quota" in (await world.result("alice", await train(world, "alice", run, 2)))["error"]
        await h.daemon.stop()

    asyncio.run(main())


# ---- bytes ----


@scenario
async def test_bytes_of_checkpoints(world: World) -> None:
    """The save fails, the run goes on, and nothing is left of it; deleting makes room; an overwrite counts once."""
    await give(world, UNLIMITED)
    session, _ = await world.open_run("alice")
    run = f"{session}:train:0"
    path = (await save(world, "alice", run, 1, "a"))["path"]
    size = (await world.harness.daemon.checkpoint(path)).size_bytes
    for key in world.harness.daemon.keys.ring.all():
        if key.owner == "alice":
            await world.harness.daemon.keys.revoke(key.id)
    await world.key("alice", "alice", Scope.USE, quotas=Quotas(checkpoint_bytes=size + 5))
    refused = await save(world, "alice", run, 2, "b")
    assert refused["category"] == "user"
    assert "limit" in refused["error"]
    folders = world.harness.settings.data_dir / "checkpoints" / run / "weights"
    assert [folder.name.partition("--")[0] for folder in folders.iterdir()] == ["a"]
    assert "path" in await save(world, "alice", run, 3, "a", overwrite=True)
    sampler = {"model_id": run, "seq_id": 4, "path": "s"}
    for call in ("save_weights_for_sampler", "save_weights_external"):
        done = await world.result("alice", await world.post("alice", call, sampler))
        assert "quota" in done["error"]
        sampler["seq_id"] += 1
    copy = {"source_path": path, "destination_project_id": "p"}
    answer = await world.call("alice", "POST", "copy_weights", copy)
    assert answer.status_code == 400
    assert "quota" in answer.text
    assert "path" in await save(world, "bob", f"{(await world.open_run('bob'))[0]}:train:0", 1, "b")
    await world.call("alice", "DELETE", f"training_runs/{run}/checkpoints/weights/a")
    assert "path" in await save(world, "alice", run, 6, "b")
    assert json.dumps(await step(world, "alice", run, 7)).count("error") == 0
