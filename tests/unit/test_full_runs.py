"""One run of a base model trains all of its parameters at a time (F6): who has the place, and what is said of it."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from pathlib import Path

import pytest

from openrl.checkpoints.layout import Address
from openrl.daemon.runs import RunHandle
from openrl.daemon.work import Finished, LoadState, NewRun, NewSession, Raw, Unload
from openrl.errors import OutOfMemory
from openrl.store.records import Checkpoint, RunState
from openrl.store.runs import decode_spec, encode_spec
from openrl.types import CheckpointKind, FullSpec, LoraSpec, Op, RunId, SessionId
from openrl.wire import replies
from openrl.workers import messages
from openrl.workers.messages import WorkerOp
from support import daemons
from support.daemons import BASE, Harness, expected_weight

scenario = partial(daemons.scenario, seconds=60)


async def create(h: Harness, session: SessionId, number: int, **changes: object) -> Finished:
    """Ask for a run of all parameters; its end, good or bad."""
    flags = {"train_attn": True, "train_mlp": True, "train_unembed": True, **changes}
    new = NewRun(session, number, BASE, 0, None, **flags, optimizer={"type": "adamw"}, user_metadata={})  # type: ignore[arg-type]
    return await h.result(await h.daemon.create_run(new, Raw("application/json", b"{}")))


async def full_run(h: Harness) -> RunId:
    """Such a run in a session of its own."""
    h.session = await h.daemon.create_session(NewSession("0.38.0"), None)
    done = await create(h, h.session, 0)
    assert done.error is None, done.error
    return RunId(f"{h.session}:train:0")


def handle(h: Harness, run: RunId) -> RunHandle:
    return h.daemon._runs.get(run)


async def fall_silent(h: Harness, run: RunId) -> None:
    sessions = h.daemon._sessions
    session = sessions.get(handle(h, run).run.session_id)
    sessions._sessions[session.id] = type(session)(**{**_fields(session), "last_seen": time.time() - 10_000})
    await h.daemon._housekeeping.once()


def _fields(session: object) -> dict[str, object]:
    return {name: getattr(session, name) for name in session.__slots__}  # type: ignore[attr-defined]


@scenario
async def test_f1_c9_rank_0_makes_a_full_run(h: Harness) -> None:
    """F1, C9: accepted, and reported with is_lora false and no rank; a choice of groups fails in words."""
    run = await full_run(h)
    (made,) = [op for op in h.worker.calls if isinstance(op, messages.CreateRun)]
    assert made == messages.CreateRun(run, FullSpec())
    info = replies.run_info(h.daemon.run(run), None)
    assert (info["is_lora"], info["lora_rank"]) == (False, None)
    listed = replies.training_run(h.daemon.run(run))
    assert (listed["is_lora"], listed["lora_rank"]) == (False, None)
    assert [entry["rank"] for entry in h.daemon.status()["runs"]] == [None]
    refused = await create(h, h.session, 1, train_mlp=False)
    assert refused.category == "user"
    assert "train_attn, train_mlp and train_unembed must be true" in (refused.error or "")


def test_c9_specs_outlive_the_store() -> None:
    """C9: both kinds as JSON and back; weights_info says what a checkpoint is of."""
    for spec in (FullSpec(), LoraSpec(4, 1, train_mlp=False)):
        assert decode_spec(encode_spec(spec)) == spec
    path = str(Address(RunId("s:train:0"), CheckpointKind.TRAINING, "a"))
    saved = Checkpoint(path, RunId("s:train:0"), CheckpointKind.TRAINING, "a", "f", BASE, FullSpec(), 1, 1.0, None, {})
    info = replies.weights_info(saved)
    assert (info["is_lora"], info["lora_rank"], info["train_mlp"]) == (False, None, True)


@scenario
async def test_f6_a_second_one_hears_who_has_the_place(h: Harness) -> None:
    """F6: at once, with the name of the run and what to do; LoRA runs are not concerned; unloading frees the place."""
    run = await full_run(h)
    refused = await create(h, h.session, 1)
    assert refused.category == "user"
    assert f"and so does run {run}" in (refused.error or "")
    assert "Unload that run or finish its session" in (refused.error or "")
    assert not any(isinstance(op, messages.CreateRun) and op.run != run for op in h.worker.calls)
    lora = NewRun(h.session, 2, BASE, 4, 1, True, True, True, {"type": "adamw"}, {})
    assert (await h.result(await h.daemon.create_run(lora, Raw("application/json", b"{}")))).error is None
    assert (await h.result(await h.submit(run, 1, Op.UNLOAD, Unload()))).error is None
    assert (await create(h, h.session, 3)).error is None


@scenario
async def test_f6_two_at_once_are_not_both_accepted(h: Harness) -> None:
    """F6: also when both are asked for before either is in the store; sent again, the first gets its own answer."""
    h.session = await h.daemon.create_session(NewSession("0.38.0"), None)
    first, second = await asyncio.gather(create(h, h.session, 0), create(h, h.session, 1))
    assert [first.error is None, second.error is None] == [True, False]
    assert (await create(h, h.session, 0)).error is None


@scenario
async def test_f6_somebody_elses_run_is_not_named(h: Harness) -> None:
    """docs/security.md: what belongs to someone else is not spoken of."""
    run = await full_run(h)
    session = await h.daemon.create_session(NewSession("0.38.0", owner="bob"), None)
    refused = await create(h, session, 0)
    assert "so does a run of someone else" in (refused.error or "")
    assert run not in (refused.error or "")


@scenario
async def test_f6_a_silent_session_makes_way_and_its_run_goes_on_later(h: Harness) -> None:
    """F6: the suspended run is on disk; while another has the place its requests fail and use up their numbers, and
    then it goes on where it was."""
    run = await full_run(h)
    await h.train(run, 1, 3)
    await h.weight(await h.step(run, 2))
    await fall_silent(h, run)
    assert handle(h, run).worker is None
    other = await full_run(h)
    refused = await h.result(await h.train(run, 3, 9))
    assert f"and so does run {other}" in (refused.error or "")
    assert handle(h, run).run.state is RunState.LIVE
    await h.daemon.finish_session(h.session, "success", None)
    await h.train(run, 4, 5)
    assert await h.weight(await h.step(run, 5)) == expected_weight(3, 5)
    assert handle(h, other).worker is None


@scenario
async def test_f6_a_finished_session_makes_way_at_once(h: Harness) -> None:
    """F6: before housekeeping has come by; its run is dropped, not written down."""
    run = await full_run(h)
    await h.train(run, 1, 3)
    await h.weight(await h.step(run, 2))
    await h.daemon.finish_session(h.session, "success", None)
    other = await full_run(h)
    assert messages.DropRun(run) in h.worker.calls
    assert not any(isinstance(op, messages.Save) for op in h.worker.calls)
    await h.train(other, 1, 4)
    assert await h.weight(await h.step(other, 2)) == expected_weight(4)


def test_f6_the_place_and_the_run_outlive_a_kill(tmp_path: Path) -> None:
    """After kill -9: the same run is replayed and still has the place."""

    async def main() -> None:
        h = await Harness(tmp_path).start()
        run = await full_run(h)
        await h.train(run, 1, 3)
        await h.weight(await h.step(run, 2))
        session = h.session
        await h.kill()
        await h.start()
        refused = await create(h, await h.daemon.create_session(NewSession("0.38.0"), None), 0)
        assert f"so does run {run}" in (refused.error or "")
        await h.train(run, 3, 4)
        assert await h.weight(await h.step(run, 4)) == expected_weight(3, 4)
        assert handle(h, run).run.spec == FullSpec()
        assert handle(h, run).run.session_id == session
        await h.daemon.stop()

    asyncio.run(main())


@scenario
async def test_c3_kinds_do_not_mix(h: Harness) -> None:
    """C3: an adapter's checkpoint into a full run and the reverse fail in words."""
    lora = await h.open_run()
    await h.result(await h.save(lora, 1, "adapter"))
    session = h.session
    run = await full_run(h)
    await h.result(await h.save(run, 1, "whole"))
    wrong = await h.result(await h.load(run, 2, f"tinker://{lora}/weights/adapter"))
    assert "holds a LoRA adapter; run" in (wrong.error or "")
    wrong = await h.result(await h.load(lora, 2, f"tinker://{run}/weights/whole"))
    assert (wrong.category, "holds all parameters; run" in (wrong.error or "")) == ("user", True)
    assert session != h.session


@scenario
async def test_a_run_made_from_a_checkpoint_is_replayed_without_a_snapshot(h: Harness) -> None:
    """A whole model is not written down right after a load; a worker's death then replays the load itself."""
    run = await full_run(h)
    await h.train(run, 1, 3)
    await h.weight(await h.step(run, 2))
    await h.result(await h.save(run, 3, "whole"))
    await h.result(await h.submit(run, 4, Op.UNLOAD, Unload()))
    load = {"path": f"tinker://{run}/weights/whole", "optimizer": True}
    body = {"session_id": h.session, "model_seq_id": 1, **load}
    made = await h.daemon.load_run(
        h.session, 1, LoadState(load["path"], True), None, {}, Raw("application/json", json.dumps(body).encode())
    )
    assert (await h.result(made)).error is None
    again = RunId(f"{h.session}:train:1")
    saves = [op for op in h.worker.calls if isinstance(op, messages.Save) and op.run == again]
    assert not saves
    h.worker.kill()
    await asyncio.sleep(0.1)
    await h.train(again, 1, 5)
    assert await h.weight(await h.step(again, 2)) == expected_weight(3, 5)


@scenario
async def test_want_of_memory_fails_a_request_and_not_the_run(h: Harness) -> None:
    """A run that cannot come back for now is not broken: its next request tries again."""
    run = await full_run(h)
    await h.train(run, 1, 3)
    await h.weight(await h.step(run, 2))
    await fall_silent(h, run)
    apply = h.worker._apply
    full = True

    def cramped(op: WorkerOp) -> object:
        if full and isinstance(op, messages.Load):
            raise OutOfMemory("2.9 GiB are needed; 1.0 GiB are free.")
        return apply(op)

    h.worker._apply = cramped  # type: ignore[method-assign, assignment]
    assert "1.0 GiB are free" in ((await h.result(await h.train(run, 3, 4))).error or "")
    assert handle(h, run).run.state is RunState.LIVE
    full = False
    await h.train(run, 4, 5)
    assert await h.weight(await h.step(run, 5)) == expected_weight(3, 5)


@pytest.mark.parametrize(("took", "due"), [(0.0, True), (1000.0, False)])
def test_snapshots_take_a_twentieth_of_the_time_at_most(tmp_path: Path, took: float, due: bool) -> None:
    """A whole model takes long to write down: the pause between two grows with what the last one took."""

    async def main() -> None:
        h = await Harness(tmp_path, snapshot_seconds=0.0).start()
        run = await full_run(h)
        handle(h, run).snapshot_took = took
        await h.train(run, 1, 3)
        await h.weight(await h.step(run, 2))
        await asyncio.sleep(0.2)
        saves = [op for op in h.worker.calls if isinstance(op, messages.Save)]
        assert (len(saves), handle(h, run).snapshot_seq) == ((1, 2) if due else (0, 0))
        await h.daemon.stop()

    asyncio.run(main())
