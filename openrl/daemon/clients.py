"""What the clients of one sampler ask for beside samples: numbers of their own, news of what ended, and cancelling.

Several clients (clones) may share a sampler, each with its own range of request numbers. News is read from the store,
where every end of a sample has a number that only grows; so it survives a restart and can be asked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from openrl.daemon.samplers import Samplers, Sampling
from openrl.errors import NotReady
from openrl.store import completions
from openrl.store.db import Database
from openrl.store.records import Completion
from openrl.types import RequestId, SamplerId, SessionId, session_of

_MAX_NEWS = 1000  # completions in one answer; the rest comes with the next

_Clone = tuple[str, int]  # a sampler's id and the clone's number


class Clients:
    """Answers `NotReady` (503) until `open` and after `stop`: a poller takes any other refusal as final (T41)."""

    def __init__(self, db: Database, samplers: Samplers, sampling: Sampling) -> None:
        self._db = db
        self._samplers = samplers
        self._sampling = sampling
        self.noticed: Callable[[SessionId], None] = lambda session: None
        self._listeners: dict[_Clone, set[asyncio.Event]] = {}
        self._serving = False

    def open(self) -> None:
        """All samplers of an earlier daemon are known again."""
        self._serving = True

    def stop(self) -> None:
        """Let everyone who waits go at once; they will ask again."""
        self._serving = False
        for events in self._listeners.values():
            for event in events:
                event.set()

    async def join(self, sampler: SamplerId) -> int:
        """A number for one more clone, never given out before. Raises NotFound, NotReady."""
        self._check(sampler)
        return await self._db.run(lambda db: completions.next_clone(db, sampler))

    async def cancel(self, request: RequestId) -> None:
        """Stop a sample; anything that is none, or has ended, is left alone."""
        await self._sampling.cancel(request)

    async def retrieved(self, sampler: SamplerId, requests: Sequence[RequestId]) -> None:
        """The client has these results, so that their bytes can go. Raises NotFound, NotReady."""
        self._check(sampler)
        if requests:
            await self._db.run(lambda db: completions.forget_results(db, sampler, requests))

    async def completions(self, sampler: SamplerId, clone: int, after: int, timeout: float) -> list[Completion]:
        """What of one clone ended after completion `after`; waits up to `timeout` seconds for something to end.

        Raises NotFound, NotReady.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        self.noticed(session_of(sampler))
        with self._listening((sampler, clone)) as news:
            while True:
                self._check(sampler)
                news.clear()  # before reading: what ends meanwhile is seen in the next round
                found = await self._db.run(lambda db: completions.after(db, sampler, clone, after, _MAX_NEWS))
                if found or not await _wait(news, deadline):
                    return found

    def _check(self, sampler: SamplerId) -> None:
        if not self._serving:
            raise NotReady("the server is starting or stopping.", "Ask again in a second.")
        self._samplers.get(sampler)

    @contextmanager
    def _listening(self, clone: _Clone) -> Generator[asyncio.Event]:
        event = asyncio.Event()
        listeners = self._listeners.setdefault(clone, set())
        listeners.add(event)
        try:
            yield event
        finally:
            listeners.discard(event)
            if not listeners and self._listeners.get(clone) is listeners:
                del self._listeners[clone]

    def tell(self, request: RequestId) -> None:
        """A request of whatever kind has ended, and its end is committed."""
        scope, _, seq = request.rpartition(":")
        for event in self._listeners.get((scope, int(seq) // completions.CLONE_SPAN), ()):
            event.set()


async def _wait(news: asyncio.Event, deadline: float) -> bool:
    """Whether there is news before the deadline."""
    try:
        async with asyncio.timeout_at(deadline):
            await news.wait()
    except TimeoutError:
        return False
    return True
