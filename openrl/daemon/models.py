"""Base models and their workers: started, watched, started again; found by served name or alias."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from openrl.daemon.work import ModelStatus
from openrl.errors import BadRequest, OpenRLError, WorkerDied
from openrl.types import DeviceReport, ModelInfo, ModelSpec
from openrl.workers.messages import News, Progress, Turns
from openrl.workers.protocol import Worker

log = logging.getLogger(__name__)

_MAX_CRASHES = 5  # in a row, without a request ending in between
_RESTART_SECONDS = 1.0  # doubled for each crash in a row


@dataclass(slots=True)
class Model:
    """A base model: its worker while there is one. `usable` is set while requests can go to the worker, or when they
    never will (`failed`)."""

    spec: ModelSpec
    state: str = "preparing"  # preparing | loading | ready | restarting | failed
    detail: str = ""
    info: ModelInfo | None = None
    report: DeviceReport | None = None
    worker: Worker | None = None
    usable: asyncio.Event = field(default_factory=asyncio.Event)
    failed: OpenRLError | None = None
    crashes: int = 0
    restarts: int = 0  # workers that died since the daemon's start

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def open(self) -> bool:
        """Whether work can be sent, or refused for good."""
        return self.failed is not None or (self.usable.is_set() and self.worker is not None and self.worker.alive)

    async def ready_worker(self) -> Worker:
        """The worker, once the model is loaded. Raises the reason when it cannot be."""
        await self.usable.wait()
        if self.failed is not None:
            raise self.failed
        if self.worker is None:
            raise WorkerDied(f"the worker of {self.name} is being restarted.")
        return self.worker


class Listener:
    """Who wants to know of a model's life; all do nothing unless set."""

    def __init__(self) -> None:
        self.progress: Callable[[Model, Progress], None] = lambda _model, _progress: None
        self.ready: Callable[[Model, float], None] = lambda _model, _seconds: None
        self.failed: Callable[[Model], None] = lambda _model: None
        self.turns: Callable[[Model, Turns], None] = lambda _model, _turns: None
        self.usable: Callable[[], None] = lambda: None


class ModelPool:
    """Owns the models and keeps a worker running for each."""

    def __init__(
        self,
        specs: tuple[ModelSpec, ...],
        new_worker: Callable[[ModelSpec], Worker],
        known: Callable[[ModelSpec], ModelInfo | None],
    ) -> None:
        """`known` tells of a model whose files are on disk what its config says, before the weights are loaded."""
        self.models = {spec.name: Model(spec, info=known(spec)) for spec in specs}
        self._names = {name: model for model in self.models.values() for name in (model.name, *model.spec.aliases)}
        self._new_worker = new_worker
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self.listener = Listener()

    def find(self, name: str) -> Model:
        """The model behind a served name or alias. Raises BadRequest with the names that are served."""
        model = self._names.get(name)
        if model is None:
            raise BadRequest(
                f"base model {name!r} is not served here.",
                f"Served: {', '.join(sorted(self._names))}. Start the server with --model or --alias to add one.",
            )
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

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._supervise(model)) for model in self.models.values()]

    async def close(self, seconds: float = 10.0) -> None:
        """End all workers, each after the operation it has in hand; one that takes over `seconds` is killed."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        workers = [(model.worker, model.usable.is_set()) for model in self.models.values()]
        # A worker that still opens its model has nothing in hand that anyone waits for.
        await asyncio.gather(
            *(worker.close(seconds if opened else 0.0) for worker, opened in workers if worker is not None)
        )

    async def _supervise(self, model: Model) -> None:
        """Open the model, and again when its worker dies, until it cannot be opened or keeps dying."""
        while model.failed is None:
            model.worker = self._new_worker(model.spec)
            try:
                await self._open(model, model.worker)
                await model.worker.ended()
                error: OpenRLError = WorkerDied(f"the worker of {model.name} died.")
            except WorkerDied as died:
                error = died
            except OpenRLError as unusable:
                self._give_up(model, unusable)
                return
            await self._after_death(model, error)

    async def _open(self, model: Model, worker: Worker) -> None:
        started = time.monotonic()

        def on_news(news: News) -> None:
            if isinstance(news, Turns):
                self.listener.turns(model, news)
                return
            model.state = "loading" if news.stage == "loading" else "preparing"
            model.detail = news.stage
            self.listener.progress(model, news)

        model.info, model.report = await worker.start(on_news)
        model.state, model.detail = "ready", ""
        model.usable.set()
        self.listener.ready(model, time.monotonic() - started)
        self.listener.usable()

    async def _after_death(self, model: Model, error: OpenRLError) -> None:
        model.usable.clear()  # first, and before any await: whoever had a call in hand must not see the dead worker
        model.worker = None
        model.crashes += 1
        model.restarts += 1
        log.error("worker of %s died (%d in a row): %s", model.name, model.crashes, error)
        if model.crashes >= _MAX_CRASHES:
            self._give_up(model, error)
            return
        model.state, model.detail = "restarting", str(error)
        await asyncio.sleep(_RESTART_SECONDS * 2 ** (model.crashes - 1))

    def _give_up(self, model: Model, error: OpenRLError) -> None:
        model.worker = None
        model.failed = error
        model.state, model.detail = "failed", str(error)
        model.usable.set()
        self.listener.failed(model)
        self.listener.usable()
