"""What each model's device did lately: a bounded record, for pictures and for the status page."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from openrl.types import SessionId
from openrl.workers.messages import Kind, Span

_MOST_SPANS = 20_000  # of a model: hours of one kind of work, minutes of turns of a few milliseconds that alternate


@dataclass(slots=True)
class Use:
    """Seconds of a device in a stretch of time, by kind of work and by session."""

    kinds: dict[Kind, float] = field(default_factory=lambda: dict.fromkeys(Kind, 0.0))
    sessions: dict[SessionId, dict[Kind, float]] = field(
        default_factory=lambda: defaultdict[SessionId, dict[Kind, float]](lambda: dict.fromkeys(Kind, 0.0))
    )

    @property
    def seconds(self) -> float:
        return sum(self.kinds.values())


class DeviceLanes:
    """Spans by served model name, oldest first; they never overlap, since a device does one thing at a time."""

    def __init__(self) -> None:
        self._spans: dict[str, deque[Span]] = {}

    def add(self, model: str, spans: tuple[Span, ...]) -> None:
        """Take what a worker reports."""
        self._spans.setdefault(model, deque(maxlen=_MOST_SPANS)).extend(spans)

    def spans(self, model: str, since: float) -> list[Span]:
        """Spans that ended after `since` (seconds since the epoch)."""
        found = list(self._newest(model, since))
        return found[::-1]

    def use(self, model: str, since: float) -> Use:
        """What the device did after `since`; a span that began before counts in part."""
        use = Use()
        for span in self._newest(model, since):
            part = 1.0 if span.start >= since else (span.end - since) / (span.end - span.start)
            use.kinds[span.kind] += part * span.seconds
            for session, seconds in span.sessions.items():
                use.sessions[session][span.kind] += part * seconds
        return use

    def _newest(self, model: str, since: float) -> Iterator[Span]:
        for span in reversed(self._spans.get(model, ())):
            if span.end <= since:
                return
            yield span


def as_json(span: Span) -> dict[str, Any]:
    """A span for the wire."""
    return {
        "kind": str(span.kind),
        "start": span.start,
        "end": span.end,
        "seconds": span.seconds,
        "longest": span.longest,
        "turns": span.turns,
        "rows": span.rows,
        "sessions": {str(session): seconds for session, seconds in span.sessions.items()},
    }
