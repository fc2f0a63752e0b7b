"""A request's bytes as they arrive: passed on while they come, and kept so that they can be sent again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

_READ_BYTES = 1 << 20  # of a file, at a time


class Broken(Exception):
    """The client went away, or sent too much, before its body was whole: it must not be passed on as if it were."""


class Body:
    """Bytes that come in once and can be read any number of times, from the start, also while they still come.

    In memory until `spill` puts a whole one into a file. Belongs to one event loop.
    """

    def __init__(self, content: bytes | None = None, announced: int | None = None) -> None:
        """`content`: all of it, if it is here already; else `announced` is the size that it will have, if known."""
        self._parts: list[bytes] = [] if content is None else [content]
        self._grown = asyncio.Event()
        self._file: Path | None = None
        self._broken = False
        self.whole = content is not None
        self.size = len(content or b"")
        self._announced = announced

    async def fill(self, stream: AsyncIterator[bytes]) -> None:
        """Take all of a stream. Raises what the stream raises; whoever reads then gets `Broken`."""
        try:
            async for part in stream:
                if part:
                    self.add(part)
            self.end()
        except BaseException:
            self.break_off()
            raise

    def add(self, part: bytes) -> None:
        self._parts.append(part)
        self.size += len(part)
        self._grown.set()

    def end(self) -> None:
        """All of it is here."""
        self.whole = True
        self._grown.set()

    def break_off(self) -> None:
        """No more of it will come."""
        self._broken = True
        self._grown.set()

    @property
    def final_size(self) -> int | None:
        """How large it is or will be, if that is known."""
        return self.size if self.whole else self._announced

    @property
    def in_memory(self) -> int:
        return 0 if self._file is not None else self.size

    @property
    def on_disk(self) -> int:
        return 0 if self._file is None else self.size

    def head(self, size: int) -> bytes:
        """The first bytes that are here, at most `size` of them. Only of a body in memory."""
        taken: list[bytes] = []
        for part in self._parts:
            taken.append(part)
            size -= len(part)
            if size <= 0:
                break
        joined = b"".join(taken)
        return joined[: len(joined) + size] if size < 0 else joined

    async def content(self) -> bytes:
        """All of a whole body."""
        return b"".join([part async for part in self.read()])

    async def read(self) -> AsyncGenerator[bytes]:
        """From the first byte to the last, waiting for what is still to come. Raises Broken."""
        at, index = 0, 0
        while True:
            if self._broken:
                raise Broken
            if self._file is not None:
                async for part in _from_file(self._file, at):
                    yield part
                return
            if index < len(self._parts):
                part = b"".join(self._parts[index:])  # in one piece: each costs a turn through the client
                index = len(self._parts)
                at += len(part)
                yield part
            elif self.whole:
                return
            else:
                self._grown.clear()
                await self._grown.wait()

    async def spill(self, path: Path) -> None:
        """Move a whole body into a file. Whoever reads it goes on where they are. Raises OSError."""
        assert self.whole
        if self._file is None:
            await asyncio.to_thread(_write, path, list(self._parts))
            self._file, self._parts = path, []

    def drop(self) -> None:
        """Free the bytes: nobody will read them again."""
        self._parts = []
        self.size = 0
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None
        self._broken = True


class Passing:
    """Bytes that are passed on as they come and not kept: for uploads, whose client begins again by itself."""

    def __init__(self, stream: AsyncIterator[bytes], size: int | None) -> None:
        self._stream = stream
        self.final_size = size

    async def read(self) -> AsyncGenerator[bytes]:
        async for part in self._stream:
            if part:
                yield part


def _write(path: Path, parts: list[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.writelines(parts)


async def _from_file(path: Path, at: int) -> AsyncGenerator[bytes]:
    with path.open("rb") as file:
        file.seek(at)
        while part := await asyncio.to_thread(file.read, _READ_BYTES):
            yield part
