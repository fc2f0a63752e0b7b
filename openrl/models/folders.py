"""Folders of the model store: where things lie, and how they appear whole or not at all.

<data dir>/models/<key>/         a ready Hugging Face folder with a manifest
<data dir>/models/gguf/<file>    the GGUF file of an embedded model, kept so that it can be converted anew offline
<data dir>/models/.lock-<key>    held while the folder of that key is made
<data dir>/models/.tmp-<key>     being made; whatever a killed process left there is removed at the next try
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from openrl.durable import flush
from openrl.models.progress import Progress, Report

TEMPORARY = ".tmp-"
_LOCK = ".lock-"


def models_dir(data_dir: Path) -> Path:
    return data_dir / "models"


def gguf_dir(data_dir: Path) -> Path:
    return models_dir(data_dir) / "gguf"


@contextmanager
def locked(folder: Path, key: str, report: Report) -> Generator[None]:
    """Hold the lock of `key` in `folder`, so that two processes do not make the same thing at once.

    The kernel frees the lock when its holder ends, however it ends. Waiting is reported once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{_LOCK}{key}").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(Progress("waiting for another openrl that prepares the same model", 0, None))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def workspace(target: Path) -> Generator[Path]:
    """An empty temporary folder beside `target` (a file or a folder), removed at the end unless it was renamed.

    The caller holds the lock of `target`: what lies there from before is the leftover of a killed process.
    """
    folder = target.with_name(TEMPORARY + target.name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(path: Path, target: Path) -> None:
    """Flush a finished file or folder and rename it to `target`. An older folder at `target` is replaced."""
    for part in [*sorted(path.rglob("*")), path]:
        flush(part)
    if target.is_dir():
        remove(target)
    path.rename(target)
    flush(target.parent)


def remove(target: Path) -> None:
    """Remove a folder: renamed first, so that a crash half-way leaves a leftover and never a torn folder."""
    doomed = target.with_name(f"{TEMPORARY}{target.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    target.rename(doomed)
    shutil.rmtree(doomed)


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder (what links point at included)."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
