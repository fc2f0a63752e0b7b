"""A daemon that is killed while one of its base models is asleep, or on its way there: nothing accepted is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from openrl.types import RunId
from openrl.workers import messages
from openrl.workers.messages import OpResult, Stopwatch, WorkerOp
from support.several import A, B, CountingThreads, Several


class Stuck(CountingThreads):
    """Never ends an operation of the kind `on`."""

    on: type[object] | None = None

    async def call(self, op: WorkerOp, watch: Stopwatch | None = None) -> OpResult:
        if self.on is not None and isinstance(op, self.on):
            self.calls.append(op)
            await asyncio.Event().wait()
        return await super().call(op, watch)

    async def close(self, seconds: float) -> None:
        if self.on is Stuck and seconds:
            await asyncio.Event().wait()
        await super().close(seconds)


async def _with_a_pending_gradient(h: Several) -> RunId:
    """A run with two steps behind it and a gradient that is not applied yet."""
    (run,) = await h.open_on(A)
    for gradient in (3, 4):
        await h.result(await h.push(run, gradient))
    await h.result(await h.train(run, 5, 5))
    h.next_seq[run] += 1
    return run


async def _goes_on(h: Several, run: RunId) -> None:
    h.gradients[run].append(5)
    assert await h.weight(await h.step(run, 6)) == h.expected(run)
    assert await h.weight(await h.step(run, 4)) == h.expected(run, 2), "results of before stay readable"


def test_a_kill_while_a_model_is_asleep(tmp_path: Path) -> None:
    async def main() -> None:
        h = await Several(tmp_path, A, B, room=1).start()
        run = await _with_a_pending_gradient(h)
        other = await h.open_run(2, base_model=B)
        assert h.states() == {A: "asleep", B: "ready"}
        queued = await h.step(run, 6)
        h.gradients[run].append(5)
        await h.kill()
        await h.start()
        assert await h.weight(queued) == h.expected(run), "it was accepted, so it runs without the client's help"
        await h.train(other, 1, 1)
        assert await h.weight(await h.step(other, 2)) == 3
        await h.daemon.stop()

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("stage", [messages.Save, messages.DropRun, Stuck], ids=["snapshot", "drop", "close"])
def test_a_kill_while_a_model_is_being_put_to_sleep(tmp_path: Path, stage: type[object]) -> None:
    async def main() -> None:
        h = Several(tmp_path, A, B, room=1)
        h.kind = Stuck
        await h.start()
        run = await _with_a_pending_gradient(h)
        h.by_model[A][0].on = stage
        opening = asyncio.create_task(h.open_run(2, base_model=B))
        async with asyncio.timeout(60):
            while h.states()[A] != "suspending" or (stage is not Stuck and not isinstance(h.worker.calls[-1], stage)):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        opening.cancel()
        h.by_model[A][0].on = None
        await h.kill()
        await h.start()
        await _goes_on(h, run)
        await h.daemon.stop()

    asyncio.run(asyncio.wait_for(main(), 120))
