"""Base models by served name or alias, and their workers: opened, watched, opened again, ended.

Which of them are to be in memory is decided elsewhere (`residency`, `residents`); the pool does it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from openrl.daemon.memory import Memory
from openrl.daemon.residency import Phase
from openrl.daemon.work import ModelStatus
from openrl.errors import BadRequest, ModelError, NoRoom, OpenRLError, WorkerDied
from openrl.types import DeviceReport, ModelInfo, ModelSpec, SamplerReport
from openrl.workers.messages import News, Progress, SamplerNews, Turns
from openrl.workers.protocol import Threaded, Worker

log = logging.getLogger(__name__)

_MAX_CRASHES = 5  # in a row, without a request ending in between
_RESTART_SECONDS = 1.0  # doubled for each crash in a row
_FETCHES = 2  # models whose files are fetched or converted at a time
_FORGIVE_SECONDS = 30.0  # after which a model that was not listed may be tried again
_CLOSE_SECONDS = 10.0
_NO_ROOM_SECONDS = 5.0  # until a model is tried again for which there was no memory
_NEWS_SECONDS = 1.0  # without work, after which it is news that a model has some

_PHASES = {"ready": Phase.AWAKE, "suspending": Phase.LEAVING, "loading": Phase.OPENING, "restarting": Phase.OPENING}


@dataclass(slots=True)
class Model:
    """A base model: its worker while there is one. `usable` is set while work can go to the worker, or when it never
    will (`failed`). Work that is with the worker, or is about to be, has claimed it."""

    spec: ModelSpec
    listed: bool = True  # named at the start, not admitted by a pattern
    state: str = "asleep"  # preparing | asleep | waiting | loading | ready | suspending | restarting | failed
    at_start: bool | None = None  # whether it is loaded before anyone asks for it; None: not decided yet
    detail: str = ""
    info: ModelInfo | None = None
    report: DeviceReport | None = None
    sampler: SamplerReport | None = None  # of one that works in a process of its own
    worker: Worker | None = None
    usable: asyncio.Event = field(default_factory=asyncio.Event)
    failed: OpenRLError | None = None
    failed_at: float = 0.0
    crashes: int = 0
    restarts: int = 0  # workers that died since the daemon's start
    loads: int = 0
    claims: int = 0
    wanted_since: float | None = None  # while work waits for a model without a worker
    awake_since: float = 0.0  # as `used_at`, seconds of the monotonic clock
    used_at: float = 0.0
    last_used: float | None = None  # seconds since the epoch
    began_at: float | None = None  # of preparing and loading it
    load_seconds: float = 0.0
    threads: int = 0  # CPU threads that its worker was told to use; 0: none
    noticed: Callable[[], None] = lambda: None  # told when work has to wait for the model, and when it works again

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def open(self) -> bool:
        """Whether work can be sent, or refused for good."""
        return self.failed is not None or (self.usable.is_set() and self.worker is not None and self.worker.alive)

    @property
    def phase(self) -> Phase:
        return _PHASES.get(self.state, Phase.ASLEEP)

    @property
    def serving(self) -> bool:
        """Whether work for it will be done, if after a wait for memory; not so before a first load at the start."""
        if self.state in ("ready", "suspending"):
            return True
        return self.state not in ("failed", "restarting") and (self.loads > 0 or self.at_start is False)

    async def ready_worker(self, *, claimed: bool = False) -> Worker:
        """The worker, once the model is loaded. Raises the reason when it cannot be.

        Work that has claimed the model already is not stopped by its being put to sleep, which waits for that work.
        """
        while not self.usable.is_set() and not (claimed and self.state == "suspending" and self.worker is not None):
            self.noticed()
            await self.usable.wait()
        if self.failed is not None:
            raise self.failed
        if self.worker is None:
            raise WorkerDied(f"the worker of {self.name} is being restarted.")
        return self.worker

    def claim(self) -> None:
        """Some work goes to the worker; before any wait after `ready_worker` or `open`. To be released."""
        if time.monotonic() - self.used_at > _NEWS_SECONDS:
            self.noticed()
        self.claims += 1
        self._used()

    def release(self) -> None:
        """That work has ended."""
        self.claims -= 1
        self._used()

    def _used(self) -> None:
        self.used_at, self.last_used = time.monotonic(), time.time()


class Listener:
    """Who wants to know of a model's life; all do nothing unless set."""

    def __init__(self) -> None:
        self.progress: Callable[[Model, Progress], None] = lambda _model, _progress: None
        self.ready: Callable[[Model, float], None] = lambda _model, _seconds: None
        self.failed: Callable[[Model], None] = lambda _model: None
        self.postponed: Callable[[Model], None] = lambda _model: None  # loaded when it is used, not at the start
        self.admitted: Callable[[ModelSpec], None] = lambda _spec: None
        self.turns: Callable[[Model, Turns], None] = lambda _model, _turns: None
        self.usable: Callable[[], None] = lambda: None
        self.changed: Callable[[], None] = lambda: None  # something that decides which models are in memory


class Allowed(Protocol):
    """Base models that clients may name though they are not listed."""

    @property
    def patterns(self) -> tuple[str, ...]: ...

    def known(self) -> tuple[ModelSpec, ...]:
        """Those that need no looking for: on this machine, or built in."""
        ...

    def find(self, name: str) -> ModelSpec | None:
        """The model that a client means; None if it may not be served. Reads the disk."""
        ...


async def _fetched(_spec: ModelSpec, _on_progress: Callable[[Progress], None]) -> None:
    """There is nothing to fetch."""


class ModelPool:
    """Owns the models and their workers."""

    def __init__(
        self,
        specs: tuple[ModelSpec, ...],
        new_worker: Callable[[ModelSpec], Worker],
        known: Callable[[ModelSpec], ModelInfo | None],
        fetch: Callable[[ModelSpec, Callable[[Progress], None]], Coroutine[Any, Any, None]] = _fetched,
        allowed: Allowed | None = None,
        memory: Memory | None = None,
    ) -> None:
        """`known` tells of a model whose files are on disk what its config says, before the weights are loaded;
        `fetch` sees to it that they are. Both raise ModelError."""
        self.models: dict[str, Model] = {}
        self._names: dict[str, Model] = {}
        self._new_worker = new_worker
        self._known = known
        self._fetch = fetch
        self.allowed = allowed
        self.memory = memory or Memory()
        self._fetching = asyncio.Semaphore(_FETCHES)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.listener = Listener()
        for spec in specs:
            self._add(Model(spec, info=known(spec)))
        for spec in () if allowed is None else allowed.known():
            try:
                self._add_allowed(spec, known(spec))
            except ModelError as error:
                log.info("%s matches a pattern and cannot be served: %s", spec.name, error)

    # -- names --

    def find(self, name: str) -> Model:
        """The model behind a served name or alias. Raises BadRequest with the names that are served."""
        model = self._names.get(name)
        if model is None:
            hint = f"Served: {', '.join(sorted(self._names)) or 'none by name'}"
            if self.allowed is not None:
                hint += f"; and what is on the hub, built in or in the server's store of {_listing(self.allowed)}"
            raise BadRequest(
                f"base model {name!r} is not served here.",
                f"{hint}. Start the server with --model, --alias or --allow-models to add one.",
            )
        return model

    async def admit(self, name: str) -> Model:
        """As `find`, for a client that is about to use a model: one that may be served is from now on.

        Its files are fetched if they are not here; it is loaded once there is work for it.
        """
        await self.look_up(name)
        model = self.find(name)
        if model.failed is not None and not model.listed and time.monotonic() - model.failed_at > _FORGIVE_SECONDS:
            model.failed, model.state, model.detail = None, "asleep", ""
            model.usable.clear()
        if model.info is None and model.state == "asleep":
            self.prepare(model)
        return model

    def serves(self, name: str) -> bool:
        """Whether there is a model behind a name."""
        return name in self._names

    def statuses(self) -> list[ModelStatus]:
        """An entry for each served name; an alias has one of its own."""
        return [
            ModelStatus(
                name=name,
                alias_of=None if name == model.name else model.name,
                state=model.state,
                detail=model.detail,
                info=model.info,
                tokenizer_id=name,
            )
            for name, model in self._names.items()
        ]

    def _add(self, model: Model) -> None:
        self.models[model.name] = model
        for name in (model.name, *model.spec.aliases):
            self._names.setdefault(name, model)
        model.noticed = lambda: self.listener.changed()

    def _add_allowed(self, spec: ModelSpec, info: ModelInfo | None) -> None:
        if spec.name not in self._names:
            self._add(Model(spec, listed=False, at_start=False, info=info))
            self.listener.admitted(spec)

    async def look_up(self, name: str) -> None:
        """Serve the model that a client names, if it may be. Raises BadRequest if its files are no such model."""
        if name in self._names or self.allowed is None:
            return
        spec = await asyncio.to_thread(self.allowed.find, name)
        if spec is None:
            return
        try:
            self._add_allowed(spec, await asyncio.to_thread(self._known, spec))
        except ModelError as error:
            raise BadRequest(f"base model {name!r} cannot be served: {error}") from error
        log.info("base model %s is admitted", spec.name)

    def need(self, model: Model) -> int:
        """Bytes that a model takes once it is loaded; 0 while its size is not known."""
        return self.memory.need(model.info)

    def held(self, model: Model) -> int:
        """Bytes that a model's worker has now."""
        return self.memory.held(model.worker, model.report)

    # -- workers --

    def prepare(self, model: Model) -> None:
        """Have a model's files fetched and converted, in the background; it is `asleep` once they are here."""
        model.state, model.detail = "preparing", ""
        self._tasks[model.name] = asyncio.create_task(self._prepare(model))

    def load(self, model: Model) -> None:
        """Give a model a worker, and another one whenever that dies."""
        model.state, model.wanted_since = "loading", None
        self._tasks[model.name] = asyncio.create_task(self._supervise(model))

    def leave(self, model: Model) -> None:
        """From now on no new work goes to a model; what has claimed it goes on."""
        model.usable.clear()
        model.state, model.detail = "suspending", "its last requests end and its runs are written down"
        self._tasks[model.name].cancel()

    async def unload(self, model: Model) -> None:
        """End the worker of a model that is leaving."""
        worker = model.worker
        if worker is not None:
            await worker.close(_CLOSE_SECONDS)
        model.worker, model.state, model.detail, model.wanted_since = None, "asleep", "", None
        self.listener.changed()

    def fail(self, model: Model, error: OpenRLError) -> None:
        """A model cannot be served: whoever waits for it hears why."""
        model.worker = None
        model.failed, model.failed_at = error, time.monotonic()
        model.state, model.detail = "failed", str(error)
        model.usable.set()
        self.listener.failed(model)
        self.listener.usable()

    def use_threads(self, model: Model, threads: int) -> None:
        """Tell a model's worker how many CPU threads it may use."""
        model.threads = threads
        if isinstance(model.worker, Threaded):
            model.worker.use_threads(threads)

    async def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """End all workers, each after the operation it has in hand; one that takes over `seconds` is killed."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        workers = [(model.worker, model.phase is not Phase.OPENING) for model in self.models.values()]
        # A worker that still opens its model has nothing in hand that anyone waits for.
        await asyncio.gather(
            *(worker.close(seconds if opened else 0.0) for worker, opened in workers if worker is not None)
        )

    async def _prepare(self, model: Model) -> None:
        model.began_at = time.monotonic()
        try:
            async with self._fetching:
                await self._fetch(model.spec, lambda progress: self._progress(model, progress))
            model.info = await asyncio.to_thread(self._known, model.spec)
            if model.info is None:
                raise ModelError(f"{model.name} is not whole after it was prepared.", "Is the disk full?")
        except OpenRLError as error:
            self.fail(model, error)
            return
        model.state, model.detail = "asleep", ""
        self.listener.changed()

    async def _supervise(self, model: Model) -> None:
        """Open the model, and again when its worker dies, until it cannot be opened or keeps dying."""
        while model.failed is None:
            model.state, model.detail = "loading", ""
            model.worker = self._new_worker(model.spec)
            if model.threads:
                self.use_threads(model, model.threads)
            try:
                await self._open(model, model.worker)
                await model.worker.ended()
                error: OpenRLError = WorkerDied(f"the worker of {model.name} died.")
            except WorkerDied as died:
                error = died
            except NoRoom as short:  # another program was quicker; work that was accepted before is not to fail for it
                if model.loads:
                    await self._put_off(model, short)
                else:
                    self.fail(model, short)
                return
            except OpenRLError as unusable:
                self.fail(model, unusable)
                return
            await self._after_death(model, error)

    async def _put_off(self, model: Model, error: OpenRLError) -> None:
        """Leave a model asleep that there was no room for, and look again in a while."""
        model.worker, model.state, model.detail = None, "restarting", str(error)
        await asyncio.sleep(_NO_ROOM_SECONDS)
        model.state = "asleep"
        self.listener.changed()

    async def _open(self, model: Model, worker: Worker) -> None:
        started = time.monotonic()
        model.began_at = model.began_at or started
        model.sampler = None

        def on_news(news: News) -> None:
            match news:
                case Turns():
                    self.listener.turns(model, news)
                case SamplerNews(report):
                    model.sampler = report
                case Progress():
                    self._progress(model, news)

        model.info, model.report = await worker.start(on_news)
        now = time.monotonic()
        model.state, model.detail = "ready", ""
        model.awake_since, model.load_seconds, model.loads = now, now - started, model.loads + 1
        model.used_at = now
        model.usable.set()
        self.memory.note(model.report, sum(self.held(other) for other in self.models.values() if other is not model))
        self.listener.ready(model, now - model.began_at)
        model.began_at = None
        self.listener.usable()
        self.listener.changed()

    def _progress(self, model: Model, progress: Progress) -> None:
        model.detail = progress.stage
        self.listener.progress(model, progress)

    async def _after_death(self, model: Model, error: OpenRLError) -> None:
        model.usable.clear()  # first, and before any await: whoever had a call in hand must not see the dead worker
        model.worker = None
        model.crashes += 1
        model.restarts += 1
        log.error("worker of %s died (%d in a row): %s", model.name, model.crashes, error)
        if model.crashes >= _MAX_CRASHES:
            self.fail(model, error)
            return
        model.state, model.detail = "restarting", str(error)
        await asyncio.sleep(_RESTART_SECONDS * 2 ** (model.crashes - 1))


def _listing(allowed: Allowed) -> str:
    return ", ".join(allowed.patterns)
