"""Liveness and readiness: what they say is so, and they say it to anyone."""

from __future__ import annotations

import asyncio
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from openrl.errors import ModelError
from support.daemons import BASE, Harness
from support.scalar_worker import ScalarWorker
from support.wired import Wired, over_http

FOUR_MIB = "4m"


async def readiness(w: Wired) -> tuple[int, list[str], dict[str, str]]:
    answer = await w.get("readyz")
    body = answer.json()
    assert (answer.status_code == 200) == (body["status"] == "ready") == (not body["reasons"])
    assert ("retry-after" in answer.headers) == (answer.status_code == 503)
    return answer.status_code, body["reasons"], body["models"]


@over_http()
async def test_ready_while_a_model_serves(w: Wired) -> None:
    assert await readiness(w) == (200, [], {BASE: "ready", "alias/scalar": "ready"})


@over_http()
async def test_neither_needs_a_key_nor_tells_more_than_states(w: Wired) -> None:
    w._http.headers = {}
    assert (await w.get("healthz")).json() == {"status": "ok"}
    assert set((await w.get("readyz")).json()) == {"status", "reasons", "models"}
    assert (await w.get("status")).status_code == 401


@over_http()
async def test_a_dead_worker_shows_at_once_and_the_next_one_too(w: Wired) -> None:
    w.h.worker.kill()
    status, reasons, models = await readiness(w)
    assert (status, reasons, models[BASE]) == (503, ["no model is ready"], "restarting")
    assert (await w.get("healthz")).status_code == 200
    while len(w.h.workers) < 2 or not w.h.worker.alive:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
    assert (await readiness(w))[0] == 200


def test_a_model_that_cannot_be_served_is_told_without_its_reason(tmp_path: Path) -> None:
    async def main() -> None:
        h = Harness(tmp_path)

        def broken(worker: ScalarWorker) -> None:
            worker.fail_start = ModelError("/secret/path holds no model")

        h.prepare = broken
        await h.start()
        answer = await Wired(h).get("readyz")
        assert answer.status_code == 503
        assert answer.json()["models"][BASE] == "failed"
        assert "secret" not in answer.text
        await h.daemon.stop()

    asyncio.run(main())


@over_http()
async def test_not_ready_from_the_signal_on(w: Wired) -> None:
    w.h.daemon.refuse_work()
    assert (await readiness(w))[:2] == (503, ["stopping"])
    answer = await w.post("create_session", {"sdk_version": "0.38.0"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")


@over_http()
async def test_a_store_that_cannot_write_is_noticed_without_any_work(w: Wired) -> None:
    await w.h.daemon._db.run(lambda db: db.execute("PRAGMA query_only = ON"))
    assert (await readiness(w))[:2] == (503, ["the store cannot write"])
    w.h.daemon.health._store_at -= 10  # as if its last answer were old
    await asyncio.sleep(0)
    w.h.daemon._db._connection.execute("PRAGMA query_only = OFF")
    assert (await readiness(w))[0] == 200


@over_http()
async def test_many_who_ask_cost_the_store_one_write(w: Wired) -> None:
    commits: list[float] = []
    w.h.daemon._db.on_commit = commits.append
    await asyncio.gather(*(readiness(w) for _ in range(20)))
    await asyncio.gather(*(readiness(w) for _ in range(20)))
    assert len(commits) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a small disk")
def test_a_full_disk_is_not_ready_and_a_freed_one_is(tmp_path: Path) -> None:
    """The real thing: a disk of 4 MiB, filled to the last byte."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={FOUR_MIB}", "t", tmp_path], check=False).returncode:
        pytest.skip("this machine does not let root mount")
    try:
        asyncio.run(_fill_and_free(tmp_path))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


async def _fill_and_free(disk: Path) -> None:
    h = await Harness(disk / "data").start()
    w = Wired(h)
    assert (await readiness(w))[0] == 200
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    h.daemon.health._store_at -= 10
    assert (await readiness(w))[:2] == (503, ["the store cannot write"])
    assert (await w.get("healthz")).status_code == 200
    filler.unlink()
    h.daemon.health._store_at -= 10
    assert (await readiness(w))[0] == 200
    await h.daemon.stop()
