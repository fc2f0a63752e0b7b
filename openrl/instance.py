"""One program at a time owns a data folder: a server for its life, or a command that changes the store.

The owner holds a lock on `<data_dir>/server.lock`, which the kernel frees when it ends, however it ends. A server
writes its address into the file, so that commands find it whatever its port.
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from openrl.errors import NotReady

_FILE = "server.lock"


class InUse(NotReady):
    """Another program owns the data folder; `url` is where it listens, empty if it does not (yet)."""

    def __init__(self, data_dir: Path, url: str) -> None:
        who = f"the server at {url}." if url else "another openrl command, or by a server that is starting."
        hint = "Use that server, stop it, or take another --data-dir." if url else "Try again in a moment."
        super().__init__(f"the data folder {data_dir} is in use by {who}", hint)
        self.url = url


class Owner:
    """The right to change a data folder."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def announce(self, url: str) -> None:
        """Commands that need the owner find it at `url`."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(url)
        self._file.flush()


@contextmanager
def owning(data_dir: Path) -> Generator[Owner]:
    """Own a data folder for the time of the block. Raises InUse if another program does."""
    data_dir.mkdir(parents=True, exist_ok=True)
    path = data_dir / _FILE
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(data_dir, path.read_text().strip()) from None
        owner = Owner(file)
        owner.announce("")  # what a killed server left
        try:
            yield owner
        finally:
            owner.announce("")


def running_at(data_dir: Path) -> str | None:
    """Where the server of a data folder listens, None if none does; a killed one may have left its address."""
    try:
        return (data_dir / _FILE).read_text().strip() or None
    except OSError:
        return None
