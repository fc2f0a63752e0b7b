"""The daemon's figures for a Prometheus scraper: read when asked for, save for what can only be timed as it happens.

Token and device sums come from the ledger in the store, so they outlive a restart and agree with the bills.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from openrl.daemon.health import Health, state
from openrl.daemon.models import ModelPool
from openrl.daemon.runs import Runs
from openrl.daemon.samplers import Samplers, Sampling
from openrl.store import totals
from openrl.store.db import Database
from openrl.store.usage import HOUR, Kind
from openrl.version import VERSION
from openrl.workers.protocol import Process

_COMMIT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_TOKENS = (Kind.PREFILL, Kind.SAMPLE, Kind.TRAIN)
_SECONDS = {Kind.TRAIN_SECONDS: "train", Kind.SAMPLE_SECONDS: "sample"}

_Amounts = dict[tuple[str, Kind], float]


@dataclass(frozen=True, slots=True)
class _Machine:
    """What the operating system was asked. `resident`: bytes by served model; "" is the daemon itself."""

    disk_free: int
    disk_size: int
    resident: Mapping[str, int]


class Metrics:
    """Reads the other parts; owns the sums of past hours and the histogram of commits."""

    def __init__(
        self,
        db: Database,
        pool: ModelPool,
        runs: Runs,
        samplers: Samplers,
        sampling: Sampling,
        health: Health,
        data_dir: Path,
    ) -> None:
        self._db = db
        self._pool = pool
        self._runs = runs
        self._samplers = samplers
        self._sampling = sampling
        self._health = health
        self._data_dir = data_dir
        self._started_at = time.time()
        self._past: _Amounts = {}  # sums of the hours before `_past_end`, which do not change any more
        self._past_end = 0.0
        self._registry = CollectorRegistry()
        commits = Histogram(
            "openrl_store_commit_seconds",
            "Time of one transaction of the store, which may serve several calls.",
            buckets=_COMMIT_BUCKETS,
            registry=self._registry,
        )
        db.on_commit = commits.observe

    async def read(self) -> list[Metric]:
        """All figures as they are now."""
        ready = not (await self._health.readiness()).reasons
        used = await self._used()
        stock = await self._db.run(totals.stock)
        machine = await asyncio.to_thread(self._ask_machine, self._pids())
        return [
            _gauge("openrl_build_info", "The running version.", {(VERSION,): 1}, ("version",)),
            _gauge("openrl_start_time_seconds", "When the daemon started, since the epoch.", {(): self._started_at}),
            _gauge("openrl_ready", "1 while work is taken and can be done.", {(): float(ready)}),
            *self._work(),
            *_metered(used),
            *_stored(stock),
            *_machine(machine),
            *self._registry.collect(),
        ]

    def _work(self) -> Iterator[Metric]:
        """Models, runs, samplers, queues."""
        models = self._pool.models.values()
        handles = self._runs.all()
        yield _gauge(
            "openrl_model_state", "1 for the state that a model is in.", {(m.name, state(m)): 1 for m in models}, _STATE
        )
        needed = {(m.name,): self._pool.need(m) for m in models}
        yield _gauge("openrl_model_needed_bytes", "Memory that a base model takes once it is loaded.", needed, _MODEL)
        used = {(m.name,): m.last_used for m in models if m.last_used is not None}
        yield _gauge("openrl_model_last_used_seconds", "When a base model last worked, since the epoch.", used, _MODEL)
        loads = {(m.name,): m.loads for m in models}
        yield _counter("openrl_model_loads", "Times that a base model was loaded.", loads, _MODEL)
        restarts = {(m.name,): m.restarts for m in models}
        yield _counter("openrl_worker_restarts", "Workers that died and were started again.", restarts, _MODEL)
        states = Counter(str(handle.run.state) for handle in handles)
        yield _gauge("openrl_runs", "Training runs by state.", {(s,): n for s, n in states.items()}, ("state",))
        on_device = Counter(handle.run.base_model for handle in handles if handle.worker is not None)
        held = {(m.name,): sum(on_device[name] for name in (m.name, *m.spec.aliases)) for m in models}
        yield _gauge("openrl_runs_on_device", "Runs whose weights are on the device.", held, _MODEL)
        yield _gauge("openrl_samplers", "Samplers that can be drawn from.", {(): len(self._samplers)})
        depth = {("train",): sum(len(handle.queue) for handle in handles), ("sample",): self._sampling.inflight}
        yield _gauge("openrl_queue_depth", "Accepted requests that have not ended.", depth, ("kind",))

    async def _used(self) -> _Amounts:
        """Amounts since ever. Hours that are over are summed once: the table grows with sessions and time."""
        end = time.time() // HOUR * HOUR - HOUR  # an hour's margin, for a clock that is set back a little
        if end > self._past_end:
            start, self._past_end = self._past_end, end
            self._past = _add(self._past, await self._db.run(lambda db: totals.used(db, start, end)))
        start = self._past_end
        return _add(self._past, await self._db.run(lambda db: totals.used(db, start, math.inf)))

    def _pids(self) -> dict[str, int]:
        workers = [(model.name, model.worker) for model in self._pool.models.values()]
        return {name: w.pid for name, w in workers if isinstance(w, Process) and w.pid is not None}

    def _ask_machine(self, pids: Mapping[str, int]) -> _Machine:
        disk = shutil.disk_usage(self._data_dir)
        resident = {"": psutil.Process().memory_info().rss}
        for name, pid in pids.items():
            try:
                resident[name] = psutil.Process(pid).memory_info().rss
            except psutil.Error:  # it ended a moment ago
                continue
        return _Machine(disk.free, disk.total, resident)


_MODEL = ("model",)
_STATE = ("model", "state")
_BY_MODEL = ("model", "kind")


def _metered(used: _Amounts) -> Iterator[Metric]:
    tokens = {(model, str(kind)): amount for (model, kind), amount in used.items() if kind in _TOKENS}
    yield _counter("openrl_tokens", "Tokens of finished work: train, sample (drawn), prefill.", tokens, _BY_MODEL)
    seconds = {(model, _SECONDS[kind]): amount for (model, kind), amount in used.items() if kind in _SECONDS}
    yield _counter("openrl_device_seconds", "Seconds of the device that finished work took.", seconds, _BY_MODEL)
    written = {(model,): amount for (model, kind), amount in used.items() if kind is Kind.CHECKPOINT}
    yield _counter("openrl_checkpoints_written", "Checkpoints that were saved.", written, _MODEL)


def _stored(stock: list[totals.Stock]) -> Iterator[Metric]:
    counts = {(entry.base_model,): entry.count for entry in stock}
    yield _gauge("openrl_checkpoints", "Checkpoints on disk.", counts, _MODEL)
    sizes = {(entry.base_model,): entry.size_bytes for entry in stock}
    yield _gauge("openrl_checkpoint_bytes", "Bytes of the checkpoints on disk.", sizes, _MODEL)


def _machine(machine: _Machine) -> Iterator[Metric]:
    yield _gauge("openrl_disk_free_bytes", "Room left where the data folder is.", {(): machine.disk_free})
    yield _gauge("openrl_disk_size_bytes", "Size of the disk that the data folder is on.", {(): machine.disk_size})
    resident = {("worker" if model else "daemon", model): size for model, size in machine.resident.items()}
    yield _gauge("openrl_resident_bytes", "Resident memory of a process.", resident, ("process", "model"))


def _gauge(
    name: str, text: str, values: Mapping[tuple[str, ...], float], labels: tuple[str, ...] = ()
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _counter(
    name: str, text: str, values: Mapping[tuple[str, ...], float], labels: tuple[str, ...]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _add(left: _Amounts, right: _Amounts) -> _Amounts:
    return {key: left.get(key, 0.0) + right.get(key, 0.0) for key in {**left, **right}}
