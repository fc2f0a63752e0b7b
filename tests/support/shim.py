"""A stretch of network that misbehaves on demand: a TCP relay between a client and a server of the same event loop."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

Target = Callable[[], tuple[str, int]]

_CHUNK = 16 << 10


class Shim:
    """Everything goes through as it is, until one of its attributes says otherwise."""

    def __init__(self, target: Target, seed: int = 1) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        self.port = 0
        self.delay = 0.0  # seconds, one way, for each piece
        self.reset_rate = 0.0  # share of pieces in whose place the connection is reset
        self.refuse = False  # new connections are reset at once
        self.up: list[int] = []  # after so many more bytes towards the server, the connection is cut; once for each
        self.down: list[int] = []  # the same towards the client
        self.cuts = 0
        self.connections = 0

    def hole(self, black: bool) -> None:
        """A black hole: connections stay, and are made, but nothing gets through until it is over."""
        if black:
            self._open.clear()
        else:
            self._open.set()

    def cut_all(self) -> None:
        for writer in [*self._writers]:
            writer.transport.abort()
        self.cuts += len(self._writers)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._relay(reader, writer))
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)

    async def end(self) -> None:
        self.cut_all()
        relays = [*self._relays]
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.refuse:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target())
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        self._writers.update(pair)
        try:
            await asyncio.gather(
                self._pump(reader, far_writer, pair, self.up), self._pump(far_reader, writer, pair, self.down)
            )
        finally:
            self._writers.difference_update(pair)
            for end in pair:
                end.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
        cut_after: list[int],
    ) -> None:
        try:
            while data := await reader.read(_CHUNK):
                await self._open.wait()
                if self.delay:
                    await asyncio.sleep(self.delay)
                if self.reset_rate and self._random.random() < self.reset_rate:
                    self._cut(pair)
                    return
                if cut_after:
                    cut_after[0] -= len(data)
                    if cut_after[0] <= 0:
                        cut_after.pop(0)
                        writer.write(data[: len(data) // 2])
                        self._cut(pair)
                        return
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        for end in pair:
            end.close()

    def _cut(self, pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self.cuts += 1
        for end in pair:
            end.transport.abort()


@asynccontextmanager
async def shim(target: Target) -> AsyncGenerator[Shim]:
    """A shim that listens on a free port of this machine."""
    relay = Shim(target)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(relay.accept, sock=listener)
    relay.port = listener.getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        await relay.end()
