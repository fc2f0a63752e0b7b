"""The connections below the HTTP client: asyncio's own, with each request in one piece.

The client writes a request's head and body one after the other; sent so, a small call costs two system calls here and
wakes the other server twice. Here writes are held until the client begins to read, or have become many.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable
from typing import Any

import httpcore

_HELD = 64 << 10  # bytes of writes that are held at most
_UNREAD = 1 << 20  # bytes that may arrive before they are read


class _Pipe(asyncio.Protocol):
    """What arrives, until it is read; and whether more may be sent."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.arrived = bytearray()
        self.ended = False  # nothing more will arrive
        self.error: Exception | None = None
        self._paused = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.arrived += data
        if len(self.arrived) > _UNREAD and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        _wake(self._reader)

    def eof_received(self) -> bool:
        self.ended = True
        _wake(self._reader)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended, self.error = True, exc
        _wake(self._reader)
        _wake(self._writer)

    def pause_writing(self) -> None:
        self._writer = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        _wake(self._writer)
        self._writer = None

    def take(self, most: int) -> bytes:
        """What has arrived, at most so many bytes of it."""
        taken = bytes(self.arrived[:most])
        del self.arrived[:most]
        if self._paused and len(self.arrived) < _UNREAD // 2:
            self._paused = False
            self.transport.resume_reading()
        return taken

    async def until_readable(self) -> None:
        if not self.arrived and not self.ended:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    async def until_writable(self) -> None:
        if self._writer is not None and not self.ended:
            await self._writer


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


class Stream(httpcore.AsyncNetworkStream):
    """One connection."""

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe
        self._held = bytearray()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self._flush()
        try:
            async with asyncio.timeout(timeout):
                await self._pipe.until_readable()
        except TimeoutError:
            raise httpcore.ReadTimeout(f"silent for {timeout:g} s") from None
        if not self._pipe.arrived and self._pipe.error is not None:
            raise httpcore.ReadError(str(self._pipe.error)) from self._pipe.error
        return self._pipe.take(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if not buffer:
            return
        if self._pipe.transport.is_closing():
            raise httpcore.WriteError("the connection is closed")
        if len(self._held) + len(buffer) <= _HELD:
            self._held += buffer
            return
        self._flush()
        self._pipe.transport.write(buffer)
        try:
            async with asyncio.timeout(timeout):
                await self._pipe.until_writable()
        except TimeoutError:
            raise httpcore.WriteTimeout(f"nothing taken for {timeout:g} s") from None

    async def aclose(self) -> None:
        self._pipe.transport.abort()  # whatever is unsent belongs to a request that nobody waits for

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> Stream:
        pipe = self._pipe
        self._flush()
        try:
            async with asyncio.timeout(timeout):
                loop = asyncio.get_running_loop()
                upgraded = await loop.start_tls(pipe.transport, pipe, ssl_context, server_hostname=server_hostname)
        except TimeoutError:
            raise httpcore.ConnectTimeout("no TLS handshake") from None
        except (OSError, ssl.SSLError) as error:
            pipe.transport.abort()
            raise httpcore.ConnectError(str(error)) from error
        if upgraded is None:
            raise httpcore.ConnectError("the connection ended in the TLS handshake")
        pipe.transport = upgraded
        return self

    def get_extra_info(self, info: str) -> Any:
        """`is_readable`: whether an idle connection is of no use any more, which is all that can be read from it."""
        match info:
            case "is_readable":
                return bool(self._pipe.arrived) or self._pipe.ended or self._pipe.transport.is_closing()
            case "ssl_object" | "socket":
                return self._pipe.transport.get_extra_info(info)
            case "client_addr":
                return self._pipe.transport.get_extra_info("sockname")
            case "server_addr":
                return self._pipe.transport.get_extra_info("peername")
            case _:
                return None

    def _flush(self) -> None:
        if self._held:
            self._pipe.transport.write(bytes(self._held))
            self._held.clear()


class Streams(httpcore.AsyncNetworkBackend):
    """Makes connections for the client's pool."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> Stream:
        try:
            async with asyncio.timeout(timeout):
                _, pipe = await asyncio.get_running_loop().create_connection(
                    _Pipe, host, port, happy_eyeballs_delay=0.25
                )
        except TimeoutError:
            raise httpcore.ConnectTimeout(f"no connection to {host}:{port} within {timeout:g} s") from None
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        connected: socket.socket = pipe.transport.get_extra_info("socket")
        for option in socket_options or ():
            connected.setsockopt(*option)
        return Stream(pipe)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
