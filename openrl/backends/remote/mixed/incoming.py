"""A request that is looked at before it is known who gets it: what was read of it is there to be read again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from urllib.parse import quote

from starlette.types import Message, Receive, Scope

from openrl.errors import OpenRLError

T = TypeVar("T")


class Incoming:
    """`receive` gives what was read here, then goes on. An error in reading is kept for whoever gets to that place."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read: list[Message] = []
        self._error: OpenRLError | None = None
        self._whole = False
        self._next = 0

    async def until(self, found: Callable[[bytes], T | None], most: int) -> T | None:
        """Read until `found` makes something of the beginning, or `most` bytes or all of it are here."""
        size = 0
        while not self._whole and self._error is None and size <= most:
            await self._read_on()
            content = self.so_far()
            size = len(content)
            if (value := found(content)) is not None:
                return value
        return None

    async def all(self) -> bytes:
        """The whole body, or what came before an error."""
        while not self._whole and self._error is None:
            await self._read_on()
        return self.so_far()

    def so_far(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self._read)

    async def receive(self) -> Message:
        if self._next < len(self._read):
            self._next += 1
            return self._read[self._next - 1]
        if self._error is not None:
            raise self._error
        return await self._receive()

    def replace(self, content: bytes) -> None:
        """Another whole body in the place of the one that was read."""
        self._read = [{"type": "http.request", "body": content, "more_body": False}]

    def replace_beginning(self, old: bytes, new: bytes) -> None:
        """Another beginning in the place of the first bytes read, which are `old`."""
        content = self.so_far()
        assert content.startswith(old)
        self._read = [{"type": "http.request", "body": new + content[len(old) :], "more_body": not self._whole}]

    async def _read_on(self) -> None:
        try:
            message = await self._receive()
        except OpenRLError as error:
            self._error = error
            return
        self._read.append(message)
        self._whole = message["type"] != "http.request" or not message.get("more_body", False)


def with_header(scope: Scope, name: bytes, value: str | None) -> Scope:
    """The scope of a request with another value of a header, or without it."""
    headers: list[tuple[bytes, bytes]] = [header for header in scope["headers"] if header[0] != name]
    return {**scope, "headers": headers if value is None else [*headers, (name, value.encode("latin-1"))]}


def moved(scope: Scope, path: str) -> Scope:
    """The scope of a request that goes to another path."""
    return {**scope, "path": path, "raw_path": quote(path, safe="/:").encode()}


async def nothing() -> Message:
    """The `receive` of a request without a body."""
    return {"type": "http.request", "body": b"", "more_body": False}


def header(scope: Scope, name: bytes) -> str:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return next((value.decode("latin-1") for key, value in headers if key == name), "")
