"""The requests that are kept, and the room they take: in memory up to a limit, then in files up to another.

Which of them must stay: first of all those that the remote has not answered yet. One that it has accepted is kept as an
insurance only, should the remote come back without it (a power cut may take its last moments): so it can be given up
when room gets short, and those whose results the client has already before those that it still waits for.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from openrl.backends.remote.body import Body
from openrl.backends.remote.calls import Call, Family, Key
from openrl.backends.remote.link import Reply
from openrl.errors import Busy, NotReady, OpenRLError

log = logging.getLogger(__name__)

DELIVERED_S = 60.0  # how long a request is kept once the client has its result: what a power cut may take is younger
ACCEPTED_S = 3600.0  # and one whose result nobody asks for


@dataclass(slots=True, eq=False)
class Kept:
    """A call on its way, or accepted. `answer` is set once."""

    key: Key
    call: Call
    body: Body
    answer: asyncio.Future[Reply]
    since: float = field(default_factory=time.monotonic)  # when it first came
    sent: bool = False  # the remote may have had all of it
    reason: str = ""  # why it has not been answered yet
    promise: str = ""  # the remote's id for it, once accepted; what the client asks for
    known_as: str = ""  # the same, unless the remote has taken it anew under another
    accepted_at: float = 0.0
    delivered_at: float = 0.0
    resent_in: str | None = None  # the remote's life in which it was last sent again
    charged: int = 0  # bytes of memory that are counted for it
    stored: int = 0  # bytes in a file

    @property
    def accepted(self) -> bool:
        return bool(self.promise)


class Shelf:
    """All kept requests, by key and by the remote's id."""

    def __init__(self, folder: Path, memory: int, disk: int) -> None:
        self._folder = folder
        self._limits = (memory, disk)
        self._by_key: dict[Key, Kept] = {}
        self._by_promise: dict[str, Kept] = {}
        self._delivered: OrderedDict[Key, Kept] = OrderedDict()
        self._files = 0
        self._spilling = asyncio.Lock()
        self.memory = 0
        self.disk = 0
        shutil.rmtree(folder, ignore_errors=True)  # an earlier proxy's: its clients have sent them again, or given up

    def __len__(self) -> int:
        """How many are on their way, or accepted and their results not yet delivered."""
        return len(self._by_key) - len(self._delivered)

    @property
    def needed_bytes(self) -> int:
        """Of those that the length counts."""
        return sum(kept.body.size for kept in self._by_key.values() if not kept.delivered_at)

    def get(self, key: Key) -> Kept | None:
        return self._by_key.get(key)

    def promised(self, request_id: str) -> Kept | None:
        return self._by_promise.get(request_id)

    def waiting(self) -> list[Kept]:
        return [kept for kept in self._by_key.values() if not kept.accepted]

    def accepted(self) -> list[Kept]:
        """All that the remote has accepted, in the order of their numbers."""
        found = [kept for kept in self._by_key.values() if kept.accepted]
        return sorted(found, key=lambda kept: (kept.key.scope, str(kept.key.number).zfill(20)))

    # -- coming and going --

    async def add(self, key: Key, call: Call, body: Body) -> Kept:
        """Raises Busy (a sample) or NotReady if there is no room for it."""
        size = body.final_size or 0
        await self._make_room(size, key.family)
        kept = Kept(key, call, body, asyncio.get_running_loop().create_future())
        self._by_key[key] = kept
        self._charge(kept, size)
        return kept

    def accept(self, kept: Kept, promise: str) -> None:
        kept.promise = kept.known_as = promise
        kept.accepted_at = time.monotonic()
        self._by_promise[promise] = kept

    def is_whole(self, kept: Kept) -> None:
        """Count a body whose size was not announced."""
        if self._by_key.get(kept.key) is kept:
            self._charge(kept, kept.body.in_memory)

    def deliver(self, kept: Kept) -> None:
        """Its result is with the client."""
        if not kept.delivered_at and self._by_key.get(kept.key) is kept:
            kept.delivered_at = time.monotonic()
            self._delivered[kept.key] = kept

    def forget(self, kept: Kept) -> None:
        if self._by_key.get(kept.key) is kept:
            del self._by_key[kept.key]
        self._delivered.pop(kept.key, None)
        if self._by_promise.get(kept.promise) is kept:
            del self._by_promise[kept.promise]
        self._charge(kept, 0)
        self.disk -= kept.stored
        kept.stored = 0
        kept.body.drop()

    def forget_old(self) -> None:
        now = time.monotonic()
        delivered = [kept for kept in self._delivered.values() if now - kept.delivered_at > DELIVERED_S]
        stale = [k for k in self._by_key.values() if k.accepted and now - k.accepted_at > ACCEPTED_S]
        for kept in (*delivered, *stale):
            self.forget(kept)

    def clear(self) -> None:
        for kept in [*self._by_key.values()]:
            self.forget(kept)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- room --

    async def _make_room(self, size: int, family: Family) -> None:
        if self._fits(size):
            return
        for kept in [*self._delivered.values()]:
            self.forget(kept)
            if self._fits(size):
                return
        async with self._spilling:
            await self._spill(size)
        if not self._fits(size) and self.memory:
            raise _full(family, self._limits)

    def _fits(self, size: int) -> bool:
        return self.memory + size <= self._limits[0]

    async def _spill(self, size: int) -> None:
        """Bodies into files until `size` bytes fit; accepted ones first."""
        everything = [kept for kept in self._by_key.values() if kept.charged and kept.body.whole]
        for kept in sorted(everything, key=lambda kept: not kept.accepted):
            if self._fits(size):
                return
            if not kept.body.whole or self._by_key.get(kept.key) is not kept:
                continue  # while we waited it was answered, and is gone
            if self.disk + kept.body.size <= self._limits[1] or self._drop_stored(kept.body.size):
                await self._to_file(kept)
            elif kept.accepted:
                self.forget(kept)

    async def _to_file(self, kept: Kept) -> None:
        self._files += 1
        kept.stored = kept.body.size
        self.disk += kept.stored
        try:
            await kept.body.spill(self._folder / f"{self._files:08d}")
        except OSError as error:
            log.error("a request cannot be kept in a file: %s", error)
            self.disk -= kept.stored
            kept.stored = 0
            return
        if self._by_key.get(kept.key) is kept:
            self._charge(kept, 0)
        else:
            kept.body.drop()  # it was answered meanwhile: the file is nobody's

    def _drop_stored(self, size: int) -> bool:
        """Give accepted requests up, oldest first, until a file of `size` bytes fits."""
        for kept in [kept for kept in self._by_key.values() if kept.stored and kept.accepted]:
            if self.disk + size <= self._limits[1]:
                break
            log.warning("the room for kept requests is full: %s is no longer kept", kept.promise)
            self.forget(kept)
        return self.disk + size <= self._limits[1]

    def _charge(self, kept: Kept, size: int) -> None:
        self.memory += size - kept.charged
        kept.charged = size


def _full(family: Family, limits: Iterable[int]) -> OpenRLError:
    held = " and ".join(f"{limit >> 20} MiB" for limit in limits)
    message = f"the requests that are kept for the remote fill their room ({held} in memory and on disk)."
    return (Busy if family is Family.SAMPLE else NotReady)(message, "It takes more once the remote answers.")
