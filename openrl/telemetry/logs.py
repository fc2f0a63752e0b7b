"""Logging: one line an event, JSON lines in a folder, warnings on the terminal; never token content, never keys.

`logging` is set up once a process, by the command line (the daemon) or the worker's entry. What an event belongs to
comes from context: `with bound(request_id=..., run=..., op=...)` marks all lines logged inside.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_FILE_BYTES, _FILES = 10 << 20, 5
_KEY = re.compile(r"tml-[A-Za-z0-9_-]{8,}")
_context: ContextVar[Mapping[str, str]] = ContextVar("log_context", default={})  # noqa: B039  # never changed in place


def setup(
    folder: Path | None, level: str = "info", name: str = "daemon", terminal: logging.Handler | None = None
) -> None:
    """Send all logging to `<folder>/<name>.jsonl` (10 MB, five kept) from `level` on, and warnings to the terminal.

    `terminal` replaces the plain handler on stderr. `name` differs for each process, since two must not turn over the
    same file. Calling it again replaces what the last call set up.
    """
    shown = terminal or _plain()
    shown.setLevel(logging.WARNING)
    handlers = [shown]
    if folder is not None:
        handlers.append(_file(folder / f"{name}.jsonl", level))
    for handler in handlers:
        handler.addFilter(_scrub)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(min(handler.level for handler in handlers))


@contextmanager
def bound(**fields: str) -> Generator[None]:
    """Mark every line logged inside, in this task or thread, with the fields (`request_id`, `run`, `op`)."""
    token = _context.set({**_context.get(), **fields})
    try:
        yield
    finally:
        _context.reset(token)


class Scrubbing(logging.Formatter):
    """Takes keys out of exceptions too (messages are scrubbed before they reach a formatter)."""

    def formatException(self, ei: Any) -> str:
        return scrubbed(super().formatException(ei))


class JsonLines(Scrubbing):
    """A record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_context.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def scrubbed(text: str) -> str:
    """The text with API keys taken out."""
    return _KEY.sub("tml-***", text)


def _plain() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(Scrubbing("%(levelname)s %(name)s: %(message)s"))
    return handler


def _file(path: Path, level: str) -> logging.Handler:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=_FILE_BYTES, backupCount=_FILES, encoding="utf-8")
    handler.setFormatter(JsonLines())
    handler.setLevel(level.upper())
    return handler


def _scrub(record: logging.LogRecord) -> bool:
    """Take keys out of the finished message, so that no handler sees them."""
    record.msg, record.args = scrubbed(record.getMessage()), None
    return True
