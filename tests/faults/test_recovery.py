"""What survives: a worker that dies, a daemon that is killed, a session that falls silent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from openrl.checkpoints.commit import CheckpointFolders
from openrl.checkpoints.layout import TEMPORARY
from openrl.types import RequestId, RunId, SamplerId
from openrl.workers import messages
from openrl.workers.messages import WorkerOp
from support.daemons import BASE, Harness, expected_weight
from support.scalar_worker import ScalarWorker


def run_async(test: Awaitable[None]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test, 60)

    asyncio.run(main())


async def killed(
    tmp_path: Path, before: Callable[[Harness, RunId], Awaitable[None]], **limits: Any
) -> tuple[Harness, RunId]:
    """A daemon that did `before`, was killed, and runs again."""
    h = await Harness(tmp_path, **limits).start()
    run = await h.open_run()
    await before(h, run)
    await h.kill()
    await h.start()
    return h, run


def test_a_kill_loses_no_acknowledged_step(tmp_path: Path) -> None:
    """Steps and pending gradients since the start are replayed in order; results of before stay readable."""

    async def test() -> None:
        async def before(h: Harness, run: RunId) -> None:
            await h.train(run, 1, 3)
            await h.step(run, 2)
            await h.train(run, 3, 4)
            await h.train(run, 4, 5)
            await h.result(await h.step(run, 5))
            await h.result(await h.train(run, 6, 6))

        h, run = await killed(tmp_path, before)
        assert h.worker.calls == [], "nothing is replayed before someone needs the run"
        assert await h.weight(await h.step(run, 7)) == expected_weight(3, 9, 6)
        assert await h.weight(await h.step(run, 5)) == expected_weight(3, 9)
        await h.daemon.stop()

    run_async(test())


def test_a_kill_after_a_snapshot_replays_only_what_came_after(tmp_path: Path) -> None:
    async def test() -> None:
        async def before(h: Harness, run: RunId) -> None:
            for seq in (1, 3, 5):
                await h.train(run, seq, seq)
                await h.result(await h.step(run, seq + 1))
            await asyncio.sleep(0.1)
            await h.result(await h.train(run, 7, 7))

        h, run = await killed(tmp_path, before, snapshot_seconds=0.0)
        assert await h.weight(await h.step(run, 8)) == expected_weight(1, 3, 5, 7)
        kinds = [type(op).__name__ for op in h.worker.calls[:3]]
        assert kinds == ["Load", "TrainPass", "OptimStep"]
        await h.daemon.stop()

    run_async(test())


def test_accepted_but_unfinished_requests_go_on_after_a_kill(tmp_path: Path) -> None:
    """Accepted means committed: what was queued at the kill runs after the restart, without the client's help."""

    async def test() -> None:
        async def before(h: Harness, run: RunId) -> None:
            base = await h.daemon.create_sampler(h.session, 3, BASE, None)
            h.worker.hold = asyncio.Event()
            await h.train(run, 1, 3)
            await h.step(run, 2)
            await h.sample(base, 0)

        h, run = await killed(tmp_path, before)
        assert await h.weight(await h.step(run, 2)) == expected_weight(3)
        sample = await h.sample(SamplerId(f"{h.session}:sample:3"), 0)
        assert (await h.result(sample)).error is None
        await h.daemon.stop()

    run_async(test())


def test_a_graceful_stop_writes_the_state_down(tmp_path: Path) -> None:
    """After a stop there is nothing to replay: gradients in hand are part of the snapshot."""

    async def test() -> None:
        h = await Harness(tmp_path).start()
        run = await h.open_run()
        await h.train(run, 1, 3)
        await h.step(run, 2)
        await h.result(await h.train(run, 3, 4))
        await h.daemon.stop()
        await h.start()
        assert await h.weight(await h.step(run, 4)) == expected_weight(3, 4)
        assert [type(op).__name__ for op in h.worker.calls] == ["Load", "OptimStep"]
        await h.daemon.stop()

    run_async(test())


def test_a_worker_that_dies_is_replaced_and_the_request_in_hand_runs_again(tmp_path: Path) -> None:
    async def test() -> None:
        h = Harness(tmp_path)
        await h.start()
        run = await h.open_run()
        await h.train(run, 1, 3)
        await h.result(await h.step(run, 2))
        h.worker.die_on = lambda op: isinstance(op, messages.TrainPass)
        await h.train(run, 3, 4)
        assert await h.weight(await h.step(run, 4)) == expected_weight(3, 4)
        assert len(h.workers) == 2
        await h.daemon.stop()

    run_async(test())


def test_a_request_that_kills_every_worker_fails_and_its_run_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        def deadly(op: WorkerOp) -> bool:
            return isinstance(op, messages.TrainPass) and 99 in op.items[0].payload.data[0].tokens

        def arm(worker: ScalarWorker) -> None:
            worker.die_on = deadly

        h = Harness(tmp_path)
        h.prepare = arm
        await h.start()
        run = await h.open_run()
        await h.train(run, 1, 3)
        await h.step(run, 2)
        doomed = await h.train(run, 3, 99)
        step = await h.step(run, 4)
        done = await h.result(doomed)
        assert done.category == "server"
        assert await h.weight(step) == expected_weight(3, 0)
        await h.daemon.stop()

    run_async(test())


def test_a_silent_session_leaves_the_device_and_comes_back(tmp_path: Path) -> None:
    async def test() -> None:
        h = await Harness(tmp_path, session_timeout=0.0).start()
        run = await h.open_run()
        await h.train(run, 1, 3)
        await h.result(await h.step(run, 2))
        await asyncio.sleep(0.05)
        await h.daemon._housekeeping.once()
        assert run not in h.worker.runs
        assert await h.weight(await h.step(run, 3)) == expected_weight(3, 0)
        await h.daemon.heartbeat(h.session)
        await h.daemon.stop()

    run_async(test())


def test_refused_numbers_stay_used_after_a_kill(tmp_path: Path) -> None:
    async def test() -> None:
        async def before(h: Harness, run: RunId) -> None:
            await h.result(await h.train(run, 1, 5000))
            await h.result(await h.train(run, 3, 5000))

        h, run = await killed(tmp_path, before)
        await h.train(run, 2, 3)
        assert await h.weight(await h.step(run, 4)) == expected_weight(3)
        await h.daemon.stop()

    run_async(test())


def test_a_model_that_cannot_be_served_fails_its_requests(tmp_path: Path) -> None:
    from openrl.errors import ModelError

    async def test() -> None:
        h = await Harness(tmp_path).start()
        run = await h.open_run()
        await h.daemon.stop()

        def broken(worker: ScalarWorker) -> None:
            worker.fail_start = ModelError("does not fit: needs 9 GiB, has 8 GiB")

        h.prepare = broken
        await h.start()
        done = await h.result(await h.train(run, 1, 3))
        assert "does not fit" in (done.error or "")
        assert h.daemon.status()["models"][0]["state"] == "failed"
        await h.daemon.stop()

    run_async(test())


def test_c7_rows_and_folders_agree_after_a_crash_between_them(tmp_path: Path) -> None:
    """C7: a folder without a row is found again; a row without a folder is forgotten; torn folders are removed."""

    async def test() -> None:
        h = await Harness(tmp_path).start()
        run = await h.open_run()
        await h.train(run, 1, 3)
        await h.step(run, 2)
        for seq, name in ((3, "kept"), (4, "rowless"), (5, "folderless")):
            await h.result(await h.save(run, seq, name))
        await h.daemon.stop()
        root = tmp_path / "checkpoints" / run / "weights"
        torn = root / f"{TEMPORARY}torn--00000000"
        torn.mkdir()
        h.daemon._db.__init__(tmp_path / "openrl.sqlite")  # type: ignore[misc]
        h.daemon._db.submit(lambda c: c.execute("DELETE FROM checkpoints WHERE name = 'rowless'").rowcount).result()
        h.daemon._db.close()
        (gone,) = root.glob("folderless--*")
        CheckpointFolders(tmp_path / "checkpoints").remove(str(gone.relative_to(tmp_path / "checkpoints")))
        await h.start()
        assert not torn.exists()
        for name in ("kept", "rowless"):
            assert (await h.daemon.checkpoint(f"tinker://{run}/weights/{name}")).name == name
        with pytest.raises(Exception, match="does not exist"):
            await h.daemon.checkpoint(f"tinker://{run}/weights/folderless")
        await h.daemon.stop()

    run_async(test())


def test_c7_a_crash_during_a_save_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    async def test() -> None:
        async def before(h: Harness, run: RunId) -> None:
            await h.result(await h.train(run, 1, 3))
            h.worker.die_on = lambda op: isinstance(op, messages.Save)
            await h.save(run, 2, "half")
            while not any(isinstance(op, messages.Save) for op in h.worker.calls):
                await asyncio.sleep(0.01)

        h, run = await killed(tmp_path, before)
        done = await h.result(await h.save(run, 2, "half"))
        assert json.loads(done.body)["path"] == f"tinker://{run}/weights/half"
        assert len(list((tmp_path / "checkpoints" / run / "weights").iterdir())) == 1
        await h.daemon.stop()

    run_async(test())


def test_a_stored_request_that_cannot_be_read_again_fails_and_holds_nobody_up(tmp_path: Path) -> None:
    """O5: a body that this version cannot decode uses its number up at the restart; the next request runs."""

    async def test() -> None:
        async def before(h: Harness, run: RunId) -> None:
            h.worker.hold = asyncio.Event()
            await h.train(run, 1, 3)
            spoil = f"UPDATE requests SET payload = x'7b' WHERE id = '{run}:1'"
            await h.daemon._db.run(lambda c: c.execute(spoil).rowcount)

        h, run = await killed(tmp_path, before)
        assert (await h.result(RequestId(f"{run}:1"))).category == "user"
        assert await h.weight(await h.step(run, 2)) == expected_weight(0)
        await h.daemon.stop()

    run_async(test())
