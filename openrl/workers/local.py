"""A worker as a child process of the daemon, over a socket pair.

Isolation decides for a process: running out of memory or a native abort takes the worker and not the daemon, and
ending a process is the sure way to give memory back. Two threads move bytes, so that the event loop never blocks.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

from openrl.backends.base import SampleJob
from openrl.errors import OpenRLError, WorkerDied
from openrl.types import DeviceReport, ModelInfo, RequestId, SampleOutput
from openrl.workers.messages import (
    AddSample,
    Call,
    CancelSample,
    FromWorker,
    News,
    OpResult,
    Prepared,
    Progress,
    Ready,
    Returned,
    Sampled,
    SamplerNews,
    Stop,
    Stopwatch,
    ToWorker,
    Turns,
    Unusable,
    UseThreads,
    WorkerOp,
    WorkerSpec,
)


class LocalWorker:
    """The daemon's end of a worker process; lives on the event loop, except for the two pumps."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._calls: dict[int, asyncio.Future[OpResult]] = {}
        self._samples: dict[RequestId, asyncio.Future[SampleOutput]] = {}
        self._watches: dict[int | RequestId, Stopwatch] = {}
        self._next_call = 0
        self._outbox: queue.SimpleQueue[ToWorker | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._gone = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._gone.is_set()

    @property
    def pid(self) -> int | None:
        """The process id, for `/metrics` and for tests that kill it."""
        return self._process.pid if self._process is not None else None

    async def start(self, on_news: Callable[[News], None]) -> tuple[ModelInfo, DeviceReport]:
        ready = await self._launch(on_news)
        assert isinstance(ready, Ready)
        return ready.info, ready.report

    async def fetch(self, on_news: Callable[[News], None]) -> None:
        """Instead of `start`: only have the model's files fetched and converted. Raises ModelError."""
        self._spec = replace(self._spec, load=False)
        try:
            await self._launch(on_news)
        finally:
            await self.close(0.0)

    def use_threads(self, threads: int) -> None:
        self._spec = replace(self._spec, threads=threads)
        if self.alive:
            self._outbox.put(UseThreads(threads))

    async def _launch(self, on_news: Callable[[News], None]) -> Ready | Prepared:
        """Start the process and wait until it says that it has opened its model, or prepared it."""
        self._loop = asyncio.get_running_loop()
        self._on_news = on_news
        self._opened: asyncio.Future[Ready | Prepared] = self._loop.create_future()
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "openrl.workers.main", str(fd)],
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        connection = Connection(ours.detach())
        threading.Thread(target=self._pump_in, args=(connection,), daemon=True, name="worker-in").start()
        threading.Thread(target=self._pump_out, args=(connection,), daemon=True, name="worker-out").start()
        self._outbox.put(self._spec)
        return await self._opened

    async def call(self, op: WorkerOp, watch: Stopwatch | None = None) -> OpResult:
        self._check_alive()
        self._next_call += 1
        number, future = self._next_call, self._loop.create_future()
        self._calls[number] = future
        self._watches[number] = watch or Stopwatch()
        self._outbox.put(Call(number, op))
        return await future

    async def sample(self, job: SampleJob, watch: Stopwatch | None = None) -> SampleOutput:
        self._check_alive()
        future: asyncio.Future[SampleOutput] = self._loop.create_future()
        self._samples[job.request] = future
        self._watches[job.request] = watch or Stopwatch()
        self._outbox.put(AddSample(job))
        try:
            return await future
        except asyncio.CancelledError:
            self.cancel(job.request)
            raise

    def cancel(self, request: RequestId) -> None:
        self._watches.pop(request, None)
        if self._samples.pop(request, None) is not None and self.alive:
            self._outbox.put(CancelSample(request))

    async def ended(self) -> None:
        await self._gone.wait()

    async def close(self, seconds: float) -> None:
        if self._process is None:
            return
        self._outbox.put(Stop())
        self._outbox.put(None)
        try:
            await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _check_alive(self) -> None:
        if not self.alive:
            raise WorkerDied("the worker process is not running.")

    # -- pumps: each in a thread of its own --

    def _pump_out(self, connection: Connection) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                connection.send(message)
            except OSError:  # the process is gone; the other pump notices and tells
                return

    def _pump_in(self, connection: Connection) -> None:
        while True:
            try:
                message: FromWorker = connection.recv()
            except (EOFError, OSError):
                break
            self._post(self._take, message)
        assert self._process is not None
        code = self._process.wait()
        self._post(self._end, code)

    def _post(self, function: Callable[..., None], argument: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)

    # -- on the event loop --

    def _take(self, message: FromWorker) -> None:
        match message:
            case Progress() | Turns() | SamplerNews():
                self._on_news(message)
            case Ready() | Prepared():
                self._opened.set_result(message)
            case Unusable(error):
                self._opened.set_exception(error)
            case Returned(number, result, watch):
                self._stop_watch(number, watch)
                _settle(self._calls.pop(number, None), result)
            case Sampled(request, result, watch):
                self._stop_watch(request, watch)
                _settle(self._samples.pop(request, None), result)

    def _stop_watch(self, key: int | RequestId, watch: Stopwatch) -> None:
        ours = self._watches.pop(key, None)
        if ours is not None:
            ours.set(watch)

    def _end(self, code: int) -> None:
        self._gone.set()
        self._outbox.put(None)
        error = WorkerDied(f"the worker process ended with exit code {code}.", _advice(code))
        waiting = [*self._calls.values(), *self._samples.values(), self._opened]
        self._calls.clear()
        self._samples.clear()
        self._watches.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)


def _settle(future: asyncio.Future[OpResult] | asyncio.Future[SampleOutput] | None, result: object) -> None:
    """Pass a result on; nobody waits any more for one that was cancelled."""
    if future is None or future.done():
        return
    if isinstance(result, OpenRLError):
        future.set_exception(result)
    else:
        future.set_result(result)  # type: ignore[arg-type]  # the worker answers each message with its own type


def _advice(code: int) -> str:
    if code == -9:
        return "It was killed, most likely for lack of memory: use a smaller model, batch or context."
    return "The server's output above says why."
