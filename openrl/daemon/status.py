"""Pictures of the daemon for people: the status page's data, and why a request is not done yet."""

from __future__ import annotations

import time
from typing import Any

from openrl.daemon.models import Model, ModelPool
from openrl.daemon.runs import RunHandle, Runs
from openrl.daemon.samplers import Samplers
from openrl.daemon.work import ModelStatus, Pending
from openrl.errors import OpenRLError
from openrl.store.records import RunState
from openrl.types import RequestId, RunId, SamplerId
from openrl.version import VERSION


def describe(request: RequestId, runs: Runs, samplers: Samplers, pool: ModelPool) -> Pending:
    """Why a request is not done yet, in the wire's queue states."""
    scope = request.rpartition(":")[0]
    if RunId(scope) in runs:
        base_model = runs.get(RunId(scope)).run.base_model
    elif SamplerId(scope) in samplers:
        base_model = samplers.get(SamplerId(scope)).base_model
    else:
        return Pending("active", "")
    try:
        model = pool.find(base_model)
    except OpenRLError as error:
        return Pending("paused_capacity", str(error))
    if model.state == "ready":
        return Pending("active", "")
    return Pending("paused_capacity", f"model {model.name} is {model.state}: {model.detail}")


def picture(started_at: float, pool: ModelPool, runs: Runs, sampling: int) -> dict[str, Any]:
    """A JSON-ready picture of the server."""
    live = [handle for handle in runs.all() if handle.run.state not in (RunState.CLOSED, RunState.BROKEN)]
    return {
        "version": VERSION,
        "uptime_s": round(time.time() - started_at, 1),
        "models": [_model(status, pool.find(status.name)) for status in pool.statuses()],
        "runs": [_run(handle) for handle in live],
        "queue": {"train": sum(len(handle.queue) for handle in live), "sample": sampling},
    }


def _model(status: ModelStatus, model: Model) -> dict[str, Any]:
    report = model.report
    return {
        "name": status.name,
        "alias_of": status.alias_of,
        "state": status.state,
        "detail": status.detail,
        "backend": report.backend if report else None,
        "device": report.device if report else None,
        "dtype": report.dtype if report else None,
        "threads": report.threads if report else None,
    }


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
