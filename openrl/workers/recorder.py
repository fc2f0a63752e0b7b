"""A record of what the device does, turn by turn, for pictures and for the status page."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from openrl.types import RequestId, SessionId
from openrl.workers.messages import Kind, Span, Turns

_GAP_SECONDS = 0.02  # between turns of one kind, that still count as one stretch
_SPAN_SECONDS = 1.0  # of a span, before a new one is begun
_REPORT_SECONDS = 0.25  # between reports


class Recorder:
    """Collects turns and reports them through `send`, neighbours of one kind as one span."""

    def __init__(self, send: Callable[[Turns], None]) -> None:
        self._send = send
        self._spans: list[Span] = []
        self._begun: list[RequestId] = []
        self._reported_at = time.monotonic()

    def turn(self, kind: Kind, began_at: float, seconds: float, sessions: Mapping[SessionId, float], rows: int) -> None:
        """A turn of the device, and how many of its seconds were for whom."""
        last = self._spans[-1] if self._spans else None
        end = began_at + seconds
        if last is None or last.kind is not kind or began_at - last.end > _GAP_SECONDS or _full(last, end):
            self._spans.append(Span(kind, began_at, end, seconds, seconds, 1, rows, dict(sessions)))
        else:
            last.end, last.seconds, last.turns = end, last.seconds + seconds, last.turns + 1
            last.longest, last.rows = max(last.longest, seconds), max(last.rows, rows)
            for session, share in sessions.items():
                last.sessions[session] = last.sessions.get(session, 0.0) + share

    def begun(self, request: RequestId) -> None:
        """A sample is with the sampler now."""
        self._begun.append(request)

    def report(self, *, idle: bool) -> None:
        """Send what has gathered, if it is time for it. The newest span is kept back while it can grow."""
        now = time.monotonic()
        if not (self._spans or self._begun) or (now - self._reported_at < _REPORT_SECONDS and not idle):
            return
        growing = bool(self._spans) and not idle and not _full(self._spans[-1], self._spans[-1].end)
        kept = self._spans[-1:] if growing else []
        spans = self._spans[: len(self._spans) - len(kept)]
        if spans or self._begun:
            self._send(Turns(tuple(spans), tuple(self._begun)))
        self._spans, self._begun, self._reported_at = kept, [], now


def _full(span: Span, end: float) -> bool:
    return end - span.start > _SPAN_SECONDS
