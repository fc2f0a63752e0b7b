"""A remote that answers as a test says, in the place of a socket, with a proxy in front of it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpcore
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
    return httpcore.ConnectError("connection refused")


def lost() -> Exception:
    """The request got there, the answer did not get back."""
    return httpcore.ReadError("connection reset")


@dataclass
class FakeRemote:
    """`answers` are given in turn, the last one again and again; `calls` is what came, without signs of life."""

    answers: list[Answer | Handler] = field(default_factory=list)
    calls: list[httpx.Request] = field(default_factory=list)
    alive: bool = True
    boot: str = "first"

    async def handle_async_request(self, request: httpcore.Request) -> httpcore.Response:
        assert isinstance(request.stream, AsyncIterable)
        content = b"".join([part async for part in request.stream])
        given: Answer = httpx.Response(200, json={"status": "ok"})
        if not request.url.target.endswith(b"/healthz"):
            self.calls.append(_seen(request, content))
            given = await self._next()
        if not self.alive:
            given = unreachable()
        if isinstance(given, Exception):
            raise given
        boot = [(b"x-openrl-boot", self.boot.encode())] if self.boot else []
        assert isinstance(given.stream, httpx.ByteStream)
        raw = b"".join(given.stream)  # not decoded, as `content` would be
        return httpcore.Response(given.status_code, headers=[*given.headers.raw, *boot], content=raw)

    async def _next(self) -> Answer:
        given = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(given, httpx.Response | Exception):
            return given
        answered = given(self.calls[-1])
        return answered if isinstance(answered, httpx.Response | Exception) else await answered

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


def _seen(request: httpcore.Request, content: bytes) -> httpx.Request:
    """A request in the form that tests look at."""
    url = request.url
    netloc = dict(request.headers)[b"host"].decode()
    whole = httpx.URL(f"{url.scheme.decode()}://{netloc}").copy_with(raw_path=url.target)
    return httpx.Request(request.method.decode(), whole, headers=request.headers, content=content)


@asynccontextmanager
async def near(
    folder: Path, *answers: Answer | Handler, source: TokenSource | None = None, boot: str = "first", **settings: Any
) -> AsyncGenerator[Near]:
    """A proxy before a remote that gives these answers."""
    remote = FakeRemote([*answers], boot=boot)
    settings = {"patience": 5.0} | settings
    server = settings.pop("server", {"long_poll_seconds": 0.3})
    proxy = Proxy(
        URL, folder, source=source, pool=lambda keep: remote, ping_s=0.05, server=server, **settings
    )  # fmt: skip
    async with proxy:
        yield Near(proxy, remote)
