"""Futures: a request is accepted once it is committed, recognised when it is sent again, and waited for on an event."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable

from openrl.daemon import absent
from openrl.daemon.work import Finished, Pending, Raw
from openrl.errors import OpenRLError
from openrl.store import requests
from openrl.store.db import Database
from openrl.store.records import RequestState, StoredRequest
from openrl.types import Op, RequestId

Effect = Callable[[sqlite3.Connection], None]


def request_id(scope: str, seq: int) -> RequestId:
    """Made from what identifies a request, so that a retry lands on the same row."""
    return RequestId(f"{scope}:{seq}")


class Futures:
    """Owns which requests are pending and who waits for them; results themselves are in the store."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._pending: dict[RequestId, asyncio.Future[Finished]] = {}
        self._stopping = asyncio.Event()
        self.describe: Callable[[RequestId], Pending] = lambda _: Pending("active", "")
        self.ended: Callable[[RequestId], None] = lambda _: None  # told after each end is committed

    async def accept(
        self, scope: str, seq: int, op: Op, raw: Raw, refused: OpenRLError | None = None, effect: Effect | None = None
    ) -> bool:
        """Commit a request, or recognise it; True if it is new. One that is `refused` is stored as failed.

        `effect` is written in the same transaction, for new requests only.
        """
        request = _accepted(scope, seq, op, raw, refused)

        def write(db: sqlite3.Connection) -> bool:
            new = requests.insert(db, request)
            if new and effect is not None:
                effect(db)
            return new

        new = await self._db.run(write)
        if new and refused is None:
            self.restore(request.id)
        return new

    async def settle(self, scope: str, seq: int, op: Op, raw: Raw, result: tuple[str, bytes], effect: Effect) -> None:
        """Commit a request that needs no worker together with its result and `effect`, or recognise it."""
        request = _accepted(scope, seq, op, raw, None)
        result_type, body = result

        def write(db: sqlite3.Connection) -> None:
            if requests.insert(db, request):
                effect(db)
                at = request.accepted_at
                requests.finish(
                    db,
                    request.id,
                    result_type=result_type,
                    result=body,
                    dispatched_at=at,
                    started_at=at,
                    done_at=at,
                    keep_payload=False,
                )

        await self._db.run(write)

    def restore(self, request: RequestId) -> None:
        """Register a committed request as pending, also after a restart."""
        self._pending[request] = asyncio.get_running_loop().create_future()

    async def finish(
        self,
        request: RequestId,
        content_type: str,
        body: bytes,
        *,
        started_at: float,
        dispatched_at: float | None = None,
        keep_payload: bool = False,
        effect: Effect | None = None,
    ) -> None:
        """Commit a result together with what else it changes, then wake whoever waits."""

        def write(db: sqlite3.Connection) -> None:
            requests.finish(
                db,
                request,
                result_type=content_type,
                result=body,
                dispatched_at=started_at if dispatched_at is None else dispatched_at,
                started_at=started_at,
                done_at=max(time.time(), started_at),
                keep_payload=keep_payload,
            )
            if effect is not None:
                effect(db)

        await self._db.run(write)
        self._resolve(request, Finished(content_type, body))

    async def fail(
        self,
        request: RequestId,
        error: OpenRLError,
        *,
        dispatched_at: float | None = None,
        started_at: float | None = None,
        keep_payload: bool = False,
        effect: Effect | None = None,
    ) -> None:
        """Commit a failure, then wake whoever waits. Without times it never reached a worker."""

        def write(db: sqlite3.Connection) -> None:
            requests.fail(
                db,
                request,
                error=str(error),
                category=error.category,
                dispatched_at=dispatched_at or None,
                started_at=started_at or None,
                done_at=time.time(),
                keep_payload=keep_payload,
            )
            if effect is not None:
                effect(db)

        await self._db.run(write)
        self._resolve(request, Finished("application/json", b"", str(error), error.category))

    async def wait(self, request: RequestId, timeout: float) -> Finished | Pending:
        """The request's end, or `Pending` after `timeout` seconds. Raises Gone for an unknown or expired id."""
        future = self._pending.get(request)
        if future is not None:
            stopping = asyncio.ensure_future(self._stopping.wait())
            try:
                await asyncio.wait({future, stopping}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
            return future.result() if future.done() else self.describe(request)
        stored = await self._db.run(lambda db: requests.get(db, request))
        return _finished(request, stored)

    def is_pending(self, request: RequestId) -> bool:
        return request in self._pending

    def stop(self) -> None:
        """Let everyone who waits go at once; they will ask again."""
        self._stopping.set()

    def _resolve(self, request: RequestId, finished: Finished) -> None:
        future = self._pending.pop(request, None)
        if future is not None and not future.done():
            future.set_result(finished)
        self.ended(request)


def _accepted(scope: str, seq: int, op: Op, raw: Raw, refused: OpenRLError | None) -> StoredRequest:
    now = time.time()
    return StoredRequest(
        id=request_id(scope, seq),
        scope=scope,
        seq=seq,
        op=op,
        state=RequestState.QUEUED if refused is None else RequestState.FAILED,
        content_type=raw.content_type,
        payload=raw.body if refused is None else b"",
        result_type=None,
        result=None,
        error=None if refused is None else str(refused),
        category=None if refused is None else refused.category,
        accepted_at=now,
        done_at=None if refused is None else now,
    )


def _finished(request: RequestId, stored: StoredRequest | None) -> Finished:
    if stored is not None and stored.state is RequestState.FAILED:
        return Finished("application/json", b"", stored.error or "unknown error", stored.category or "server")
    if stored is None or stored.result is None or stored.result_type is None:
        raise absent.request(request)
    return Finished(stored.result_type, stored.result)
