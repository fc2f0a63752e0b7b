"""A remote that answers as a test says, in the place of a socket, with a proxy in front of it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from openrl.tokens import TokenSource
from support.far import Proxy
from support.http import Http

URL = "https://far.example/tenant-a"
Answer = httpx.Response | Exception
Handler = Callable[[httpx.Request], "Answer | Awaitable[Answer]"]


def ok(body: object, **headers: str) -> httpx.Response:
    return answer(200, body, **headers)


def answer(status: int, body: object, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, json=body, headers=named)


def unreachable() -> Exception:
    return httpx.ConnectError("connection refused")


def lost() -> Exception:
    """The request got there, the answer did not get back."""
    return httpx.ReadError("connection reset")


@dataclass
class FakeRemote(httpx.AsyncBaseTransport):
    """`answers` are given in turn, the last one again and again; `calls` is what came, without signs of life."""

    answers: list[Answer | Handler] = field(default_factory=list)
    calls: list[httpx.Request] = field(default_factory=list)
    alive: bool = True
    boot: str = "first"

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/healthz"):
            await request.aread()
            return self._sign_of_life()
        await request.aread()
        self.calls.append(request)
        if not self.alive:
            raise unreachable()
        given = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(given) and not isinstance(given, httpx.Response):
            given = given(request)
            if not isinstance(given, httpx.Response | Exception):
                given = await given
        if isinstance(given, Exception):
            raise given
        assert isinstance(given.stream, httpx.ByteStream)
        raw = httpx.ByteStream(b"".join(given.stream))  # not decoded, as `content` would be
        copy = httpx.Response(given.status_code, headers=given.headers, stream=raw)
        if self.boot:
            copy.headers["x-openrl-boot"] = self.boot
        return copy

    def _sign_of_life(self) -> httpx.Response:
        if not self.alive:
            raise unreachable()
        return httpx.Response(200, json={"status": "ok"}, headers={"x-openrl-boot": self.boot} if self.boot else {})

    def bodies(self) -> list[Any]:
        return [json.loads(call.content) for call in self.calls]

    async def aclose(self) -> None:
        return None


class Near(Http):
    """The proxy as its clients see it."""

    def __init__(self, proxy: Proxy, remote: FakeRemote) -> None:
        super().__init__(proxy.app)
        self.proxy = proxy
        self.remote = remote

    async def send(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        sent = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        return await self.acall("POST", path, content=content, headers=sent)

    async def poll(self, request_id: str) -> httpx.Response:
        return await self.send("retrieve_future", {"request_id": request_id})


@asynccontextmanager
async def near(
    folder: Path, *answers: Answer | Handler, source: TokenSource | None = None, boot: str = "first", **settings: Any
) -> AsyncGenerator[Near]:
    """A proxy before a remote that gives these answers."""
    remote = FakeRemote([*answers], boot=boot)
    settings = {"patience": 5.0} | settings
    server = settings.pop("server", {"long_poll_seconds": 0.3})
    proxy = Proxy(
        URL, folder, source=source, transport=lambda keep: remote, ping_s=0.05, server=server, **settings
    )  # fmt: skip
    async with proxy:
        yield Near(proxy, remote)
