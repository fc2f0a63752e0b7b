"""Lets a burst of requests in bit by bit, so that whatever else the event loop has to do comes in between.

Five hundred calls that arrive at once take the loop half a second or more, in whatever order; but a heartbeat takes
several rounds of the loop (accept, read, commit, answer), and if each round began with all of the burst, it would wait
that long several times over. So only a few requests begin in each round. They lose nothing by it: all wait for the same
loop anyway.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

_AT_A_TIME = 16  # about 10 ms of work


class Turnstile:
    """Requests for the paths in `express` do not queue."""

    def __init__(self, app: ASGIApp, express: Collection[str] = ()) -> None:
        self._app = app
        self._express = frozenset(express)
        self._entered = 0  # in this round of the loop
        self._queue: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._express:
            await self._enter()
        await self._app(scope, receive, send)

    async def _enter(self) -> None:
        if self._entered == 0:
            asyncio.get_running_loop().call_soon(self._next_round)
        if self._entered < _AT_A_TIME and not self._queue:
            self._entered += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        await turn

    def _next_round(self) -> None:
        self._entered = 0
        while self._queue and self._entered < _AT_A_TIME:
            turn = self._queue.popleft()
            if not turn.done():  # its client may have hung up
                turn.set_result(None)
                self._entered += 1
        if self._entered or self._queue:
            asyncio.get_running_loop().call_soon(self._next_round)
