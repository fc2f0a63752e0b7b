"""Very many samples at once over real HTTP, beside training and heartbeats: none fails, heartbeats stay quick."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

from openrl.server.app import create_app
from support.daemons import BASE, Harness
from support.fake_daemon import server_settings
from support.http import KEY
from support.thread_worker import Speed, ThreadWorker
from support.wired import sample_body, train_body

SAMPLES = 256
OVERTAKEN = 2  # a heartbeat may take so many times what a sample's own calls take; `openrl bench` has seconds


class Client:
    """Calls over connections that are kept, with as little work as possible: it shares the processor."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.seconds: dict[str, list[float]] = defaultdict(list)  # of each call, by path

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        started = time.perf_counter()
        reader, writer = self._free.pop() if self._free else await asyncio.open_connection("127.0.0.1", self._port)
        content = json.dumps(body).encode()
        head = f"POST /api/v1/{path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\ncontent-length: {len(content)}"
        writer.write(f"{head}\r\naccept: application/x-protobuf\r\n\r\n".encode() + content)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = next(int(line[15:]) for line in answer.split(b"\r\n") if line.startswith(b"content-length:"))
        content = await reader.readexactly(length)
        self._free.append((reader, writer))
        self.seconds[path].append(time.perf_counter() - started)
        return int(answer[9:12]), json.loads(content) if b"/json" in answer else content

    async def result(self, request: str) -> Any:
        status, content = 408, None
        while status == 408:
            status, content = await self.post("retrieve_future", {"request_id": request})
        assert status == 200, content
        assert not isinstance(content, dict) or "error" not in content, content
        return content

    async def promise(self, path: str, body: Any) -> str:
        status, content = await self.post(path, body)
        assert status == 200, content
        return content["request_id"]

    def close(self) -> None:
        for _, writer in self._free:
            writer.close()


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncGenerator[Client]:
    """A daemon over the real loop of a worker, behind uvicorn."""
    h = Harness(tmp_path, max_inflight_samples=4096)
    h.kind = lambda: ThreadWorker(Speed(sample_turn=0.02, train_turn=0.05, rows=64))
    await h.start()
    config = uvicorn.Config(
        create_app(h.daemon, server_settings(), KEY), log_level="warning", access_log=False, lifespan="off"
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        client = Client(listener.getsockname()[1])
        try:
            yield client
        finally:
            client.close()
            server.should_exit = True
            await serving
            await h.daemon.stop()


async def train(client: Client, session: str, done: asyncio.Event) -> int:
    """Passes and steps until told to stop; how many."""
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
    run = (await client.result(await client.promise("create_model", body)))["model_id"]
    seq = 1
    while not done.is_set():
        passed = await client.promise("forward_backward", train_body(run, seq, *[1] * 100))
        stepped = await client.promise("optim_step", {"model_id": run, "seq_id": seq + 1, "adam_params": {}})
        await client.result(passed)
        await client.result(stepped)
        seq += 2
    return seq // 2


async def beat(client: Client, session: str, done: asyncio.Event) -> None:
    """Heartbeats, one at a time, until told to stop."""
    while not done.is_set():
        status, _ = await client.post("session_heartbeat", {"session_id": session})
        assert status == 200
        await asyncio.sleep(0.01)


def test_a_flood_of_samples_fails_nobody_and_lets_heartbeats_through(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as client:
            opened = [(await client.post("create_session", {"sdk_version": "0.38.0"}))[1] for _ in range(2)]
            mine, other = (answer["session_id"] for answer in opened)
            body = {"session_id": mine, "sampling_session_seq_id": 0, "base_model": BASE}
            sampler = (await client.post("create_sampling_session", body))[1]["sampling_session_id"]
            done = asyncio.Event()
            training = asyncio.create_task(train(client, other, done))
            beating = asyncio.create_task(beat(client, other, done))

            async def draw(seq: int) -> None:
                sampling = sample_body(sampler, seq, sampling_params={"max_tokens": 1})
                await client.result(await client.promise("asample", sampling))

            await asyncio.gather(*map(draw, range(SAMPLES)))
            done.set()
            assert await training >= 1
            await beating
            # Clients and server share one event loop here, so seconds say how busy the machine is. That heartbeats do
            # not stand behind the samples shows beside the calls of the flood itself, on the same loop.
            beats, submits = (statistics.median(client.seconds[path]) for path in ("session_heartbeat", "asample"))
            assert beats < OVERTAKEN * submits, (beats, submits)

    asyncio.run(main())
