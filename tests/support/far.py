"""Servers in the test's own event loop: a daemon over scalar workers as the far one, and a proxy in front of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from openrl.backends.remote.app import create_remote_app
from openrl.backends.remote.keeper import Keeper
from openrl.backends.remote.link import Link, MakePool
from openrl.backends.remote.token import Token
from openrl.remotes import Remote
from openrl.server.app import create_app
from openrl.settings import RemoteSettings, ServerSettings
from openrl.tokens import TokenSource
from support.daemons import Harness
from support.http import KEY

FAR_KEY = "tml-key-of-the-far-server"
SECRET = b"s" * 32


class Uvicorn(uvicorn.Server):
    """A server on a port of this machine, as a task; signals stay the test's."""

    def __init__(self, app: Starlette, port: int = 0) -> None:
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        super().__init__(config)
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._task: asyncio.Task[None]

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def start(self) -> None:
        self._task = asyncio.create_task(self.serve(sockets=[self._listener]))
        while not self.started:
            await asyncio.sleep(0.005)

    async def end(self) -> None:
        self.should_exit = self.force_exit = True
        for connection in [*self.server_state.connections]:
            transport: asyncio.Transport | None = connection.transport
            if transport is not None:
                transport.abort()
        await self._task
        self._listener.close()


def server_settings(**changes: Any) -> ServerSettings:
    values: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "auth": "key", "max_body_bytes": 64 << 20}
    return ServerSettings(**(values | {"long_poll_seconds": 1.0} | changes))


class FarServer:
    """A daemon over a scalar worker behind a real socket; it can be killed and started again."""

    def __init__(self, data_dir: Path, **server: Any) -> None:
        self.harness = Harness(data_dir)
        self._settings = server_settings(**server)
        self.key = FAR_KEY
        self.port = 0
        self._uvicorn: Uvicorn
        self.app: Starlette

    async def start(self) -> FarServer:
        await self.harness.start()
        self.app = create_app(self.harness.daemon, self._settings, self.key, SECRET)
        self._uvicorn = Uvicorn(self.app, self.port)
        self.port = self._uvicorn.port
        await self._uvicorn.start()
        return self

    async def kill(self) -> None:
        """As kill -9 does: connections break, nothing more is written."""
        await self._uvicorn.end()
        await self.harness.kill()

    @property
    def where(self) -> tuple[str, int]:
        return "127.0.0.1", self.port


class Proxy:
    """The remote backend in front of a URL."""

    def __init__(
        self, url: str, folder: Path, *, source: TokenSource | None = None, pool: MakePool | None = None,
        ping_s: float = 0.3, server: dict[str, Any] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        remote = Remote("far", url, source or TokenSource("none"))
        first = None if source is not None else FAR_KEY
        self.link = Link(remote, lambda: url, Token(remote.token, first), pool=pool, ping_s=ping_s)
        self.keeper = Keeper(self.link, replace(RemoteSettings(), **settings), folder)
        self.settings = server_settings(**(server or {}))
        self.app = create_remote_app(self.link, self.keeper, self.settings, KEY, SECRET)

    async def __aenter__(self) -> Proxy:
        self.link.start()
        self.keeper.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.keeper.stop()
        await self.link.stop()


@asynccontextmanager
async def listening(app: Starlette) -> AsyncGenerator[str]:
    """An app behind a real socket; yields its URL."""
    server = Uvicorn(app)
    await server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.end()
