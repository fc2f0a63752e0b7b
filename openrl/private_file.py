"""Files that only their owner can read, always whole: made once, even when two processes start at once, or replaced."""

from __future__ import annotations

import os
from pathlib import Path

from openrl.durable import flush


def make_once(path: Path, content: str) -> None:
    """Write `content` to `path` unless that exists, readable by its owner only."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(content)
    try:
        os.link(draft, path)  # of two processes one wins, and none reads half a file
    except FileExistsError:
        return
    finally:
        draft.unlink()


def write(path: Path, content: str) -> None:
    """Put `content` into `path`, in place of what is there, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(content)
    flush(draft)
    draft.replace(path)
