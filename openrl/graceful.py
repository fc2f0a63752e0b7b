"""A web server that ends in order: SIGTERM or Ctrl-C stops new work at once, answers go on while the service winds
down, and the process is gone within its grace period, whatever hangs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import uvicorn

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 1  # for answers under way, once the service has wound down


class Service(Protocol):
    """What is served."""

    def refuse_work(self) -> None:
        """Take no new work from now on."""
        ...

    async def wind_down(self, seconds: float) -> None:
        """End what is under way, in about `seconds` at most; calls are still answered."""
        ...


class GracefulServer(uvicorn.Server):
    """uvicorn with our own signals. A second signal leaves at once.

    uvicorn by itself stops listening first. Clients would then see refused connections instead of a 503 that says when
    to come back, and could not fetch the results of what still ends.
    """

    def __init__(self, config: uvicorn.Config, service: Service, grace: float, on_stop: Callable[[], None]) -> None:
        """`grace`: seconds from the signal to the end of the process. `on_stop` is told of the signal, in the loop."""
        config.timeout_graceful_shutdown = _CLOSE_SECONDS
        super().__init__(config)
        self._service = service
        self._grace = grace
        self._on_stop = on_stop
        self._loop = asyncio.get_running_loop()
        self._started = asyncio.Event()
        self._winding: asyncio.Task[None] | None = None
        self._signalled = False

    def service_started(self) -> None:
        """The service runs: from now on it can be wound down."""
        self._started.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's signal handler: all it may do is to tell the loop."""
        if self._signalled:
            log.warning("second signal: leaving at once")
            os._exit(130)  # the worker processes die with us
        self._signalled = True
        _leave_after(self._grace)
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._on_stop()
        self._service.refuse_work()
        self._winding = asyncio.create_task(self._wind_down())

    async def _wind_down(self) -> None:
        try:
            await self._started.wait()
            await self._service.wind_down(max(self._grace / 2, self._grace - 2 * _CLOSE_SECONDS))
        finally:
            self.should_exit = True


def _leave_after(seconds: float) -> None:
    """Hold the process to its grace period, even if a thread hangs on a dead disk: what is committed stays so."""

    def leave() -> None:
        log.error("the grace period of %g s is over; what was not written down is replayed at the next start", seconds)
        os._exit(0)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
