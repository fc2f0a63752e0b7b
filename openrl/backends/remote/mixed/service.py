"""A daemon of this machine together with the remotes that the rules name: started, stopped and wired as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from openrl import remotes
from openrl.backends.remote.forward import Forwarder
from openrl.backends.remote.headers import FILES
from openrl.backends.remote.link import Link
from openrl.backends.remote.mixed.book import Book
from openrl.backends.remote.mixed.switch import Switch
from openrl.backends.remote.service import RemoteService
from openrl.errors import NotFound
from openrl.keys.ring import Keyring
from openrl.server.access import OPEN, GuardedRoute
from openrl.settings import Settings


class _Daemon(Protocol):
    """What is needed of the daemon of this machine."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def refuse_work(self) -> None: ...

    async def wind_down(self, seconds: float) -> None: ...


class MixedService:
    """`daemon`, and a service for each remote in the rule table. Reads their keys at once, so that what is wrong with
    one is said at the start. Raises SettingsError."""

    def __init__(self, daemon: _Daemon, settings: Settings, ring: Keyring) -> None:
        """`ring` tells which keys are this server's own."""
        self._daemon = daemon
        self._routes = dict(settings.remote.routes)
        named = [remotes.find(name) for name in dict.fromkeys(self._routes.values())]
        self._services = [
            RemoteService(remote, settings.remote, settings.data_dir, remote.token.read()) for remote in named
        ]
        self._forwarders = {
            service.link.name: Forwarder(
                service.link, service.keeper, settings.server, lambda key: bool(ring.open(key))
            )
            for service in self._services
        }
        self._book = Book(settings.data_dir / "remote" / "book.jsonl")

    # -- in the app --

    @property
    def middleware(self) -> Middleware:
        """Sends requests to their places; the innermost of the app."""
        return Middleware(Switch, forwarders=self._forwarders, routes=self._routes, book=self._book)

    @property
    def route(self) -> GuardedRoute:
        """For signed URLs of the remotes, which look at the signature themselves."""
        return GuardedRoute(FILES + "{name}/signed/{rest:path}", self._file, methods=["GET"], needs=OPEN)

    async def _file(self, request: Request) -> Response:
        forward = self._forwarders.get(request.path_params["name"])
        if forward is None:
            raise NotFound(f"no remote {request.path_params['name']!r} is in the rules of this server.")
        return await forward.answer(request)

    @property
    def links(self) -> list[Link]:
        return [service.link for service in self._services]

    # -- life --

    @asynccontextmanager
    async def reached(self) -> AsyncGenerator[None]:
        """Has all tunnels for the time of the block. Raises NotReady for a cluster that cannot be reached."""
        async with AsyncExitStack() as tunnels:
            for service in self._services:
                await tunnels.enter_async_context(service.reached())
            yield

    async def start(self) -> None:
        for service in self._services:
            await service.start()
        await self._daemon.start()

    def refuse_work(self) -> None:
        self._daemon.refuse_work()
        for service in self._services:
            service.refuse_work()

    async def wind_down(self, seconds: float) -> None:
        await self._daemon.wind_down(seconds)

    async def stop(self) -> None:
        await self._daemon.stop()
        await asyncio.gather(*[service.stop() for service in self._services])
