"""Latencies with a full store beside those with one that holds a page: 1,000 checkpoints and 5,000 finished requests
against 20 and 20, so that both write pages of the same length.

Both daemons stand side by side and are called in turn, so that whatever else the machine does hits both. Run as a
script (`python tests/scale/test_full_store.py`, with `tests` on the path) it prints the table for
`docs/performance.md`.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from support.daemons import Harness
from support.wired import Wired

RUNS, CHECKPOINTS, REQUESTS = 10, 1000, 5000
PAGE = 20
CALLS = 200
LIMIT = 1.5  # times the latency with one page in the store
NOISE_MS = 0.2

Measured = dict[str, tuple[float, float]]  # p50 in milliseconds, with one page and full


class Caller:
    """One daemon over HTTP, with a run of its own that goes on from `seq`."""

    def __init__(self, wired: Wired) -> None:
        self.wired = wired
        self.run = ""
        self.seq = 0
        self.last = ""

    async def open(self, number: int) -> None:
        self.run = await self.wired.open_run(number)
        await self.submit()
        await self.poll()

    async def submit(self) -> None:
        self.seq += 1
        self.last = await self.wired.step(self.run, self.seq)

    async def poll(self) -> None:
        assert (await self.wired.result(self.last)).status_code == 200

    async def get(self, path: str) -> None:
        assert (await self.wired.get(path)).status_code == 200


OPERATIONS: dict[str, Callable[[Caller], Awaitable[None]]] = {
    "submit (`optim_step`)": Caller.submit,
    "poll (`retrieve_future`)": Caller.poll,
    "list checkpoints, a page of 20": lambda caller: caller.get("checkpoints?limit=20"),
    "list training runs, a page of 20": lambda caller: caller.get("training_runs?limit=20"),
    "list one run's checkpoints": lambda caller: caller.get(f"training_runs/{caller.run}/checkpoints"),
    "list sessions, a page of 20": lambda caller: caller.get("sessions?limit=20"),
}


async def fill(wired: Wired, checkpoints: int, requests: int) -> None:
    """Spread evenly over the runs; saves are requests too."""
    for number in range(RUNS):
        run = await wired.open_run(number)
        last = ""
        for seq in range(1, requests // RUNS + 1):
            if seq <= checkpoints // RUNS:
                last = await wired.promise("save_weights", {"model_id": run, "seq_id": seq, "path": f"c{seq}"})
            else:
                last = await wired.step(run, seq)
        await wired.result(last)


async def measure(page: Caller, full: Caller) -> Measured:
    measured: Measured = {}
    for name, operation in OPERATIONS.items():
        times: tuple[list[float], list[float]] = [], []
        for _ in range(CALLS):
            for caller, spent in zip((page, full), times, strict=True):
                started = time.perf_counter()
                await operation(caller)
                spent.append(1000 * (time.perf_counter() - started))
                await caller.poll()  # nothing of this call may run on into the next
        measured[name] = statistics.median(times[0]), statistics.median(times[1])
    return measured


async def compare(folder: Path) -> Measured:
    harnesses = [await Harness(folder / name).start() for name in ("page", "full")]
    try:
        page, full = (Caller(Wired(harness, long_poll_seconds=5.0)) for harness in harnesses)
        await fill(page.wired, PAGE, PAGE)
        await fill(full.wired, CHECKPOINTS, REQUESTS)
        for caller in (page, full):
            await caller.open(RUNS)
        return await measure(page, full)
    finally:
        for harness in harnesses:
            await harness.daemon.stop()


@pytest.mark.timeout(600)
def test_a_full_store_is_as_quick_as_one_page(tmp_path: Path) -> None:
    for name, (page, full) in asyncio.run(compare(tmp_path)).items():
        assert full <= LIMIT * page + NOISE_MS, f"{name}: {full:.2f} ms against {page:.2f} ms"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(compare(Path(folder)))
    print(f"| call | one page in the store | {CHECKPOINTS:,} checkpoints, {REQUESTS:,} requests | ratio |")
    print("|---|---|---|---|")
    for name, (page, full) in measured.items():
        print(f"| {name} | {page:.2f} ms | {full:.2f} ms | {full / page:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
