"""Pictures of the daemon for people: the status page's data, and what each model's device did lately."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from openrl.daemon.device_lanes import DeviceLanes, Use, as_json
from openrl.daemon.models import Model, ModelPool
from openrl.daemon.runs import RunHandle, Runs
from openrl.daemon.samplers import Sampling
from openrl.daemon.scheduler import Scheduler
from openrl.daemon.sessions import Sessions
from openrl.daemon.shares import Entitlements
from openrl.daemon.work import ModelStatus
from openrl.errors import NotFound
from openrl.store.records import RunState
from openrl.types import SessionId
from openrl.version import VERSION
from openrl.workers.messages import Kind, Turns

_WINDOW_SECONDS = 60.0  # over which shares of a device are shown
_GONE = frozenset({RunState.CLOSED, RunState.BROKEN})


class Status:
    """Looks at all parts when asked; owns the record of what the devices did."""

    def __init__(
        self,
        pool: ModelPool,
        sessions: Sessions,
        runs: Runs,
        scheduler: Scheduler,
        sampling: Sampling,
        entitlements: Entitlements,
    ) -> None:
        self._started_at = time.time()
        self._pool = pool
        self._sessions = sessions
        self._runs = runs
        self._scheduler = scheduler
        self._sampling = sampling
        self._entitlements = entitlements
        self._lanes = DeviceLanes()

    def note(self, model: Model, turns: Turns) -> None:
        """A worker's report of what its device did."""
        self._lanes.add(model.name, turns.spans)
        for request in turns.begun:
            self._sampling.counts.begin(request)

    def picture(self) -> dict[str, Any]:
        """A JSON-ready picture of the server."""
        since = time.time() - _WINDOW_SECONDS
        live = [handle for handle in self._runs.all() if handle.run.state not in _GONE]
        uses = {name: self._lanes.use(name, since) for name in self._pool.models}
        return {
            "version": VERSION,
            "uptime_s": round(time.time() - self._started_at, 1),
            "models": [self._model(status, uses) for status in self._pool.statuses()],
            "sessions": self._session_list(live, list(uses.values())),
            "runs": [_run(handle) for handle in live],
            "queue": {"train": sum(len(handle.queue) for handle in live), "sample": self._sampling.inflight},
        }

    def device_lanes(self, since: float) -> dict[str, Any]:
        """What each model's device did after `since` (seconds since the epoch), as far as it is remembered."""
        spans = {name: [as_json(span) for span in self._lanes.spans(name, since)] for name in self._pool.models}
        return {"now": time.time(), "models": spans}

    def _model(self, status: ModelStatus, uses: dict[str, Use]) -> dict[str, Any]:
        model = self._pool.find(status.name)
        report = model.report
        return {
            "name": status.name,
            "alias_of": status.alias_of,
            "state": status.state,
            "detail": status.detail,
            "backend": report.backend if report else None,
            "device": report.device if report else None,
            "dtype": report.dtype if report else None,
            "quantize": report.quantize if report and report.quantize != "none" else None,
            "threads": (model.threads or report.threads) if report else None,
            "listed": model.listed,
            "memory_bytes": self._pool.held(model),
            "needed_bytes": self._pool.need(model),
            "last_used_at": model.last_used,
            "sampler": asdict(model.sampler) if model.sampler else None,
            "busy": _busy(uses[model.name], self._started_at),
            "now": self._now(model),
        }

    def _now(self, model: Model) -> dict[str, Any]:
        """What the device has in hand: training, sampling, both by turns, or nothing."""
        training = self._scheduler.lane(model.name).underway
        sampling = self._sampling.counts.at(model.name)
        lanes = [kind for kind, found in ((Kind.TRAIN, training), (Kind.SAMPLE, sampling)) if found]
        sessions = {session for batch in training for session in batch.batch.underway.sessions}.union(sampling)
        return {
            "lane": "+".join(lanes) or "idle",
            "runs": [member.run for batch in training for member in batch.batch.members],
            "samples": sum(held.count for held in sampling.values()),
            "sessions": sorted(sessions),
            "seconds": round(max((time.monotonic() - batch.since for batch in training), default=0.0), 3),
        }

    def _session_list(self, live: list[RunHandle], uses: list[Use]) -> list[dict[str, Any]]:
        """The sessions that have work, or had the device in the last minute; who had most of it first."""
        seconds: dict[SessionId, dict[Kind, float]] = {}
        for use in uses:
            for session, kinds in use.sessions.items():
                mine = seconds.setdefault(session, dict.fromkeys(Kind, 0.0))
                for kind, amount in kinds.items():
                    mine[kind] += amount
        samples = self._sampling.counts.sessions()
        whole = sum(use.seconds for use in uses)
        found = {*seconds, *samples, *(handle.run.session_id for handle in live)}
        pictures = [
            self._session(session, seconds.get(session, dict.fromkeys(Kind, 0.0)), whole, live) for session in found
        ]
        return sorted(pictures, key=lambda picture: (-picture["share"], picture["id"]))

    def _session(
        self, session: SessionId, seconds: dict[Kind, float], whole: float, live: list[RunHandle]
    ) -> dict[str, Any]:
        mine = [handle for handle in live if handle.run.session_id == session]
        held = [found[session] for name in self._pool.models if session in (found := self._sampling.counts.at(name))]
        return {
            "id": session,
            "project": self._project(session),
            "weight": self._entitlements.weight(session),
            "share": round(sum(seconds.values()) / whole, 4) if whole else 0.0,
            "seconds": {str(kind): round(amount, 3) for kind, amount in seconds.items()},
            "runs": len(mine),
            "train_queued": sum(len(handle.queue) for handle in mine),
            "samples_queued": sum(len(one.waiting) for one in held),
            "samples_drawn": sum(len(one.drawn) for one in held),
        }

    def _project(self, session: SessionId) -> str | None:
        try:
            return self._sessions.get(session).project_id
        except NotFound:  # not a session of ours: the worker names whoever an id begins with
            return None


def _busy(use: Use, started_at: float) -> float:
    """The share of the last minute, or of the time since the start, in which the device worked."""
    return round(min(1.0, use.seconds / max(1.0, min(_WINDOW_SECONDS, time.time() - started_at))), 4)


def _run(handle: RunHandle) -> dict[str, Any]:
    return {
        "id": handle.id,
        "base_model": handle.run.base_model,
        "state": str(handle.run.state),
        "rank": handle.run.spec.rank,
        "next_seq": handle.queue.next_seq,
        "queued": len(handle.queue),
        "on_device": handle.worker is not None,
        "last_request_at": handle.run.last_request_at,
    }
