"""Background tasks whose failure is never silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

log = logging.getLogger(__name__)


class Tasks:
    """A set of running tasks. One that fails is logged, and `on_failure` is told, so that nobody waits for it."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(
        self, work: Coroutine[None, None, None], on_failure: Callable[[BaseException], None] = lambda _: None
    ) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._running.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._running.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a background task failed", exc_info=error)
                on_failure(error)

        task.add_done_callback(done)
        return task

    def __len__(self) -> int:
        return len(self._running)

    async def drain(self, timeout: float) -> None:
        """Wait until all have ended, at most `timeout` seconds."""
        if self._running:
            await asyncio.wait(set(self._running), timeout=timeout)

    async def cancel(self) -> None:
        """Cancel all and wait until they have ended."""
        running = set(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
