"""The remote backend over real sockets that break: nothing acknowledged is lost, nothing runs twice.

The far server's model is one number that depends on every request and on their order (`support/scalar_worker`), so the
number at the end is the undisturbed twin's only if each ran exactly once and in turn.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from openrl.tokens import TokenSource
from support.daemons import expected_weight
from support.far import FarServer, Proxy, listening
from support.persistent import Persistent, training
from support.shim import Shim, shim

# How long a black hole lasts: 60 s where somebody asks for it, since the ordinary suite must not take so long.
HOLE_SECONDS = float(os.environ.get("LONG_OUTAGE_SECONDS", "2"))


class Stage:
    """A far server, the network to it, a proxy, and a client of the proxy."""

    def __init__(self, far: FarServer, net: Shim, proxy: Proxy, client: Persistent) -> None:
        self.far, self.net, self.proxy, self.client = far, net, proxy, client

    async def train(self, steps: int, padding: int = 0, disturb: Callable[[int], Awaitable[None]] | None = None) -> int:
        """Steps of two passes and an update each, several under way at a time; returns the weight at the end."""
        run = await self.client.open_run()
        results: list[asyncio.Task[dict[str, object]]] = []
        seq = 0
        for step in range(steps):
            if disturb is not None:
                await disturb(step)
            for tokens in ([step + 100], [step + 200, 1]):
                seq += 1
                request = await self.client.promise("forward_backward", training(run, seq, tokens, padding))
                results.append(asyncio.create_task(self.client.result(request)))
            seq += 1
            request = await self.client.promise("optim_step", {"model_id": run, "seq_id": seq, "adam_params": {}})
            results.append(asyncio.create_task(self.client.result(request)))
        ended = [await result for result in results]
        assert not [end for end in ended if "error" in end]
        metrics = ended[-1]["metrics"]
        assert isinstance(metrics, dict)
        return int(metrics["weight:sum"])

    @staticmethod
    def undisturbed(steps: int) -> int:
        return expected_weight(*[(step + 100) + (step + 200) + 1 for step in range(steps)])


@asynccontextmanager
async def stage(folder: Path, *, source: TokenSource | None = None, **settings: float) -> AsyncGenerator[Stage]:
    far = await FarServer(folder / "far").start()
    async with shim(lambda: far.where) as net:
        proxy = Proxy(f"http://127.0.0.1:{net.port}", folder / "proxy", source=source, **settings)
        async with proxy, listening(proxy.app) as url, Persistent(url, patience=30 + 2 * HOLE_SECONDS) as client:
            yield Stage(far, net, proxy, client)
    await far.kill()


def test_cut_in_mid_body(tmp_path: Path) -> None:
    """Bodies are streamed; each cut falls into another part of one."""

    async def check() -> None:
        async with stage(tmp_path) as s:
            s.net.up = [150_000, 400_000, 900_000, 1_000_000]
            assert await s.train(4, padding=600_000) == s.undisturbed(4)
            assert s.net.cuts == 4

    asyncio.run(check())


def test_cut_in_answers_and_long_polls(tmp_path: Path) -> None:
    """An acceptance that was lost on its way back must not make a second request of it (4.7)."""

    async def check() -> None:
        async with stage(tmp_path) as s:
            s.net.down = [200 * n for n in range(2, 14)]
            assert await s.train(8) == s.undisturbed(8)
            assert s.net.cuts >= 8

    asyncio.run(check())


def test_a_long_poll_survives_a_cut(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as s:
            run = await s.client.open_run()
            s.far.harness.worker.hold = asyncio.Event()
            request = await s.client.promise("forward_backward", training(run, 1, [5]))
            polling = asyncio.create_task(s.client.result(request))
            for _ in range(5):
                await asyncio.sleep(0.1)
                s.net.cut_all()
            s.far.harness.worker.hold.set()
            assert "error" not in await polling

    asyncio.run(check())


def test_black_hole(tmp_path: Path) -> None:
    """Connections stay open and nothing gets through: a Wi-Fi change, a laptop that sleeps."""

    async def check() -> None:
        async with stage(tmp_path) as s:

            async def disturb(step: int) -> None:
                if step == 3:
                    s.net.hole(True)
                    asyncio.get_running_loop().call_later(HOLE_SECONDS, s.net.hole, False)

            assert await s.train(6, disturb=disturb) == s.undisturbed(6)
            state = s.proxy.link.state
            assert state.connected
            assert "no sign of life" in state.error
            assert any("the remote has been unreachable for" in reason for reason in s.client.reasons)

    asyncio.run(check())


def test_the_far_server_is_killed_and_started_again(tmp_path: Path) -> None:
    """Twice, with requests queued, running and answered."""

    async def check() -> None:
        async with stage(tmp_path) as s:

            async def disturb(step: int) -> None:
                if step in (3, 6):
                    await s.far.kill()
                    await asyncio.sleep(0.3)
                    await s.far.start()

            assert await s.train(9, disturb=disturb) == s.undisturbed(9)

    asyncio.run(check())


def test_the_far_server_is_away_while_requests_come(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as s:

            async def disturb(step: int) -> None:
                if step == 2:
                    await s.far.kill()
                    restarts.append(asyncio.create_task(later()))

            async def later() -> None:
                await asyncio.sleep(1.5)
                await s.far.start()

            restarts: list[asyncio.Task[None]] = []
            assert await s.train(5, disturb=disturb) == s.undisturbed(5)

    asyncio.run(check())


def test_latency_and_loss(tmp_path: Path) -> None:
    """50 ms, and one piece in a hundred takes its connection with it."""

    async def check() -> None:
        async with stage(tmp_path, source=None) as s:
            s.net.delay, s.net.reset_rate = 0.025, 0.01
            assert await s.train(12, padding=60_000) == s.undisturbed(12)

    asyncio.run(check())


def test_a_heavy_storm(tmp_path: Path) -> None:
    """A tenth of all pieces, in both directions."""

    async def check() -> None:
        async with stage(tmp_path) as s:
            s.net.reset_rate = 0.1
            assert await s.train(20) == s.undisturbed(20)
            assert s.net.cuts > 10

    asyncio.run(check())


def test_a_token_is_revoked_under_load(tmp_path: Path) -> None:
    """Everyone hears at once what is wrong and what to do, and training requests hear it as futures that fail: a 401
    would hang a client that sends chunks in parallel (T1)."""

    async def check() -> None:
        key = tmp_path / "key"
        key.write_text("tml-key-of-the-far-server\n")
        async with stage(tmp_path, source=TokenSource("file", str(key))) as s:
            run = await s.client.open_run()
            s.far.harness.worker.hold = asyncio.Event()
            request = await s.client.promise("forward_backward", training(run, 1, [5]))
            s.far.harness.daemon.keys.ring.set_machine("tml-quite-another-key")
            started = time.monotonic()
            late = await s.client.promise("forward_backward", training(run, 2, [6]))
            failed = await s.client.result(late)
            assert "refuses the key that this server has for it" in str(failed["error"])
            assert failed["category"] == "user"
            polled = await s.client.once("retrieve_future", {"request_id": request})
            assert polled.status_code == 401
            assert "openrl remote login far" in polled.json()["detail"]
            assert time.monotonic() - started < 5

            # With the new key in its place everything goes on, and the refused number does not hold up the run (O5).
            key.write_text("tml-quite-another-key\n")
            s.proxy.link.token.reread_s = 0
            s.far.harness.worker.hold.set()
            assert "error" not in await s.client.result(request)
            step = await s.client.promise("optim_step", {"model_id": run, "seq_id": 3, "adam_params": {}})
            done = await s.client.result(step)
            assert done["metrics"] == {"weight:sum": expected_weight(5)}

    asyncio.run(check())


def test_a_rotated_token_goes_unnoticed(tmp_path: Path) -> None:
    async def check() -> None:
        key = tmp_path / "key"
        key.write_text("tml-key-of-the-far-server\n")
        async with stage(tmp_path, source=TokenSource("file", str(key))) as s:

            async def disturb(step: int) -> None:
                if step == 2:
                    key.write_text("tml-the-key-after-it\n")
                    s.far.harness.daemon.keys.ring.set_machine("tml-the-key-after-it")

            assert await s.train(4, disturb=disturb) == s.undisturbed(4)

    asyncio.run(check())


def test_the_far_server_comes_back_without_what_it_had_accepted(tmp_path: Path) -> None:
    """As after a power cut: its store is as it was a moment ago."""

    async def check() -> None:
        async with stage(tmp_path) as s:
            run = await s.client.open_run()
            first = await s.client.promise("forward_backward", training(run, 1, [5]))
            assert "error" not in await s.client.result(first)
            await s.far.kill()
            store = {p.name: p.read_bytes() for p in (tmp_path / "far").glob("openrl.sqlite*")}
            await s.far.start()
            lost = [await s.client.promise("forward_backward", training(run, 2, [7]))]
            lost.append(await s.client.promise("optim_step", {"model_id": run, "seq_id": 3, "adam_params": {}}))
            assert "error" not in await s.client.result(lost[0])  # delivered, and yet it will be gone
            await s.far.kill()
            for path in (tmp_path / "far").glob("openrl.sqlite*"):
                path.unlink()
            for name, content in store.items():
                (tmp_path / "far" / name).write_bytes(content)
            await s.far.start()
            done = await s.client.result(lost[1])
            assert done["metrics"] == {"weight:sum": expected_weight(12)}

    asyncio.run(check())


def test_a_client_that_goes_takes_its_poll_with_it(tmp_path: Path) -> None:
    async def check() -> None:
        async with stage(tmp_path) as s:
            run = await s.client.open_run()
            s.far.harness.worker.hold = asyncio.Event()
            request = await s.client.promise("forward_backward", training(run, 1, [5]))
            with pytest.raises(httpx.ReadTimeout):
                await s.client._client.post("retrieve_future", json={"request_id": request}, timeout=0.3)
            await asyncio.sleep(0.2)
            assert not s.proxy.link.under_way
            s.far.harness.worker.hold.set()

    asyncio.run(check())
