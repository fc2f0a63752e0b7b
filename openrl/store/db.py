"""The store thread: owns the connection, runs queued jobs, and commits all that are waiting in one transaction."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from openrl.store.migrations import migrate

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], T]

_MAX_GROUP = 256  # jobs in one transaction: bounds how long the first of them waits


@dataclass(slots=True)
class _Queued:
    """A job and who waits for it: on `loop`, or, where that is None, in some thread."""

    job: Job[Any]
    future: Future[Any] | asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop | None = None


@dataclass(slots=True)
class _Outcome:
    future: Future[Any] | asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop | None
    value: Any = None
    error: Exception | None = None

    def deliver(self) -> None:
        if self.future.cancelled():
            return
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)


class Database:
    """A SQLite file in WAL mode. A job is a function of the connection; it sees its own writes and those before it.

    `synchronous=NORMAL`: a commit survives a crash of the process, not necessarily a loss of power.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.execute("PRAGMA foreign_keys=ON")
        self._connection.create_function("casefold", 1, str.casefold, deterministic=True)
        migrate(self._connection)
        self.on_commit: Callable[[float], None] = lambda _seconds: None  # told of each transaction, on the store thread
        self._jobs: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="openrl-store", daemon=True)
        self._thread.start()

    async def run(self, job: Job[T]) -> T:
        """Run a job on the store thread; returns once its transaction is committed. The job's exception is raised here,
        and what it had written is rolled back, without disturbing others in the same commit."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Queued(job, future, loop))
        # Shielded: a caller that gives up (a client that hangs up) must not cancel a write half-way through.
        return await asyncio.shield(future)

    def submit(self, job: Job[T]) -> Future[T]:
        """As `run`, for callers outside the event loop."""
        future: Future[T] = Future()
        self._jobs.put(_Queued(job, future))
        return future

    def close(self) -> None:
        """Finish what is queued, then close the file."""
        self._jobs.put(None)
        self._thread.join()
        self._connection.close()

    def _work(self) -> None:
        while (first := self._jobs.get()) is not None:
            group = [first]
            stop = False
            while len(group) < _MAX_GROUP:
                try:
                    more = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    stop = True
                    break
                group.append(more)
            self._commit(group)
            if stop:
                return

    def _commit(self, group: list[_Queued]) -> None:
        connection, started = self._connection, time.perf_counter()
        try:
            connection.execute("BEGIN IMMEDIATE")
            outcomes = [_attempt(connection, queued) for queued in group]
            connection.execute("COMMIT")
        except sqlite3.Error as error:  # a full disk, say: nothing of the group is durable, so everyone must hear it
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            outcomes = [_Outcome(queued.future, queued.loop, error=error) for queued in group]
        self.on_commit(time.perf_counter() - started)
        _hand_out(outcomes)


def _hand_out(outcomes: list[_Outcome]) -> None:
    """Tell those who wait: those on one loop by a single call, since each wakes the loop by a write to a socket."""
    loops = {outcome.loop for outcome in outcomes}
    for loop in loops:
        mine = [outcome for outcome in outcomes if outcome.loop is loop]
        if loop is None:
            _deliver(mine)
            continue
        try:
            loop.call_soon_threadsafe(_deliver, mine)
        except RuntimeError:  # the loop is closed: nobody waits any more
            continue


def _deliver(outcomes: list[_Outcome]) -> None:
    for outcome in outcomes:
        outcome.deliver()


def _attempt(connection: sqlite3.Connection, queued: _Queued) -> _Outcome:
    connection.execute("SAVEPOINT job")
    try:
        value = queued.job(connection)
    except Exception as error:  # noqa: BLE001 - the job's own error, handed to whoever queued it
        connection.execute("ROLLBACK TO job")
        return _Outcome(queued.future, queued.loop, error=error)
    finally:
        connection.execute("RELEASE job")
    return _Outcome(queued.future, queued.loop, value=value)
