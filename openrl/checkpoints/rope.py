"""Bytes that lie in pieces, in memory and in files, and are read as if they were one file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class FilePart:
    """`size` bytes of a file from `offset` on."""

    path: Path
    offset: int
    size: int


Part = bytes | FilePart


def whole(path: Path) -> FilePart:
    return FilePart(path, 0, path.stat().st_size)


def size_of(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part.size


@dataclass(frozen=True, slots=True)
class Rope:
    """Pieces in order."""

    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(map(size_of, self.parts))

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes [start, stop), in blocks of at most 1 MiB."""
        at = 0
        for part in self.parts:
            low, high = max(start - at, 0), min(stop - at, size_of(part))
            if low < high:
                yield from _slice(part, low, high)
            at += size_of(part)


def _slice(part: Part, low: int, high: int) -> Iterator[bytes]:
    if isinstance(part, bytes):
        yield part[low:high]
        return
    with part.path.open("rb") as file:
        file.seek(part.offset + low)
        left = high - low
        while left:
            block = file.read(min(left, _BLOCK))
            if not block:
                raise OSError(f"{part.path} is shorter than it was")
            left -= len(block)
            yield block
