"""Daemons of several base models over scalar workers, with memory for some of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from openrl.daemon.memory import Memory
from openrl.daemon.models import Model, ModelPool
from openrl.daemon.work import Finished, NewSession
from openrl.errors import ModelError
from openrl.types import ModelInfo, ModelSpec, RequestId, RunId
from openrl.workers.messages import Progress
from support.daemons import Harness, expected_weight
from support.scalar_worker import INFO, ScalarWorker

A, B, C = "test/a", "test/b", "test/c"


class CountingThreads(ScalarWorker):
    """`told` are the numbers of threads it was told to use."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.told: list[int] = []

    def use_threads(self, threads: int) -> None:
        self.told.append(threads)


class AllowedHere:
    """Patterns, as a list of names. Those `on_disk` are known; the others have to be fetched."""

    patterns = ("org/*",)

    def __init__(self, *names: str, on_disk: Sequence[str] = ()) -> None:
        self._names = names
        self._on_disk = on_disk

    def known(self) -> tuple[ModelSpec, ...]:
        return tuple(ModelSpec(name, name) for name in self._on_disk)

    def find(self, name: str) -> ModelSpec | None:
        return ModelSpec(name, f"hub:{name}") if name in self._names else None


class Several(Harness):
    """Models that need a byte each, of `room` that there are. Each run's steps are remembered, so that the weight which
    a step must leave is known: order, repetition and loss of any request would show in it."""

    def __init__(self, data_dir: Path, *models: str, room: int, turn: float = 0.05, idle: float = 0.0) -> None:
        super().__init__(data_dir)
        limits = replace(self.settings.engine, model_turn_seconds=turn, model_idle_seconds=idle)
        self.settings = replace(self.settings, models=tuple(ModelSpec(name, name) for name in models), engine=limits)
        self.room = room
        self.kind = CountingThreads
        self.allowed: AllowedHere | None = None
        self.absent: set[str] = set()  # models whose files are not on disk yet
        self.fetched: list[str] = []
        self.fetching: Callable[[str], ModelError | None] = lambda _: None
        self.by_model: dict[str, list[Any]] = {}
        self.gradients: dict[RunId, list[int]] = {}
        self.next_seq: dict[RunId, int] = {}

    async def start(self) -> Several:
        await self._start(
            ModelPool(self.settings.models, self._new_worker, self._known, self._fetch, self.allowed, self._memory())
        )
        return self

    def _memory(self) -> Memory:
        def check(name: str, info: ModelInfo, room: int) -> None:
            if info.parameters > room:
                raise ModelError(f"{name} needs {info.parameters} bytes of {room}.")

        return Memory(needed=lambda info: info.parameters, available=lambda: self.room, check=check)

    def _new_worker(self, spec: ModelSpec) -> ScalarWorker:
        worker = self.kind()
        self.prepare(worker)
        self.workers.append(worker)
        self.by_model.setdefault(spec.name, []).append(worker)
        return worker

    def _known(self, spec: ModelSpec) -> ModelInfo | None:
        return None if spec.name in self.absent else INFO

    async def _fetch(self, spec: ModelSpec, on_news: Callable[[Progress], None]) -> None:
        self.fetched.append(spec.name)
        if (error := self.fetching(spec.name)) is not None:
            raise error
        self.absent.discard(spec.name)

    async def result(self, request: RequestId) -> Finished:
        """With a patience for machines on which much else goes on."""
        done = await self.daemon.wait(request, 60)
        assert isinstance(done, Finished), f"{request} is still {done}"
        return done

    def model(self, name: str) -> Model:
        return self.pool.models[name]

    def states(self) -> dict[str, str]:
        return {name: model.state for name, model in self.pool.models.items()}

    async def open_on(self, *models: str) -> list[RunId]:
        """A session with a run on each of these."""
        self.session = await self.daemon.create_session(NewSession("0.38.0"), None)
        runs = [await self.open_run(number, base_model=name) for number, name in enumerate(models, 1)]
        for run in runs:
            self.gradients[run], self.next_seq[run] = [], 1
        return runs

    async def push(self, run: RunId, gradient: int) -> RequestId:
        """Submit a pass and a step, without a wait; the step's request."""
        seq = self.next_seq[run]
        self.next_seq[run] += 2
        self.gradients[run].append(gradient)
        await self.train(run, seq, gradient)
        return await self.step(run, seq + 1)

    def expected(self, run: RunId, steps: int | None = None) -> int:
        """The weight that the run's step number `steps`, or its last one, must leave."""
        return expected_weight(*self.gradients[run][:steps])
