"""A session's requests as a trace in Chrome's JSON format, which Perfetto (ui.perfetto.dev) opens.

Each run and sampler is a process. A request is a nested async event in it: the whole from acceptance to its end, and
inside it what it waited for. A run's requests never overlap on the device, so they also make one plain track there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from openrl.codec import encode_json
from openrl.store.records import RequestState, RequestTimes
from openrl.types import Op

_DEVICE_TRACK = 1


def session_trace(session: str, requests: Iterable[RequestTimes], now: float) -> bytes:
    """The trace file. `now` ends requests that have not ended; times are microseconds since the epoch."""
    requests = list(requests)
    processes = {scope: number for number, scope in enumerate(dict.fromkeys(r.scope for r in requests), 1)}
    events: list[dict[str, Any]] = []
    for scope, number in processes.items():
        events.append(_name("process_name", number, 0, scope))
        events.append(_name("thread_name", number, _DEVICE_TRACK, "on the device"))
    for request in requests:
        events += _request(request, processes[request.scope], now)
    return encode_json(
        {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"session_id": session, "made_by": "openrl", "requests": len(requests)},
        }
    )


def _request(request: RequestTimes, process: int, now: float) -> Iterator[dict[str, Any]]:
    end = request.done_at or now
    dispatched = request.dispatched_at
    started = request.started_at
    spans = [(str(request.op), request.accepted_at, end), ("queued", request.accepted_at, dispatched or end)]
    if dispatched is not None:
        spans.append(("dispatched", dispatched, started or end))
    if started is not None:
        spans.append(("running", started, end))
    args = _args(request)
    whole, *stages = spans
    yield _async("b", request, process, whole[0], whole[1], args)
    for name, begin, stop in stages:
        yield _async("b", request, process, name, begin)
        yield _async("e", request, process, name, stop)
    yield _async("e", request, process, whole[0], whole[2])
    if started is not None and request.op is not Op.SAMPLE:
        yield _slice(request, process, started, end, args)


def _args(request: RequestTimes) -> dict[str, Any]:
    args: dict[str, Any] = {
        "request_id": request.id,
        "seq_id": request.seq,
        "state": str(request.state),
        "accepted_at": request.accepted_at,
        "dispatched_at": request.dispatched_at,
        "started_at": request.started_at,
        "done_at": request.done_at,
    }
    if request.state is RequestState.FAILED:
        args["error"] = request.error
    return args


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _async(
    phase: str, request: RequestTimes, process: int, name: str, at: float, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "ph": phase,
        "cat": "request",
        "id": request.id,
        "name": name,
        "pid": process,
        "tid": 0,
        "ts": _micro(at),
        "args": args or {},
    }


def _slice(request: RequestTimes, process: int, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    start = _micro(begin)
    return {
        "ph": "X",
        "cat": "device",
        "name": str(request.op),
        "pid": process,
        "tid": _DEVICE_TRACK,
        "ts": start,
        "dur": _micro(end) - start,
        "args": args,
    }


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)
