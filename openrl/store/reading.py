"""A connection beside the daemon's or without one: for commands that look into a data folder, or own it."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

from openrl.store.migrations import migrate

FILE = "openrl.sqlite"
Connection = sqlite3.Connection  # for those who only pass it on


@contextmanager
def reading(data_dir: Path) -> Generator[Connection]:
    """A view of the store while a server changes it; in WAL mode neither disturbs the other."""
    with closing(sqlite3.connect(f"{(data_dir / FILE).resolve().as_uri()}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        yield connection


@contextmanager
def changing(data_dir: Path) -> Generator[Connection]:
    """The store, made or brought to the newest schema if need be, for whoever owns the data folder."""
    data_dir.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(data_dir / FILE, isolation_level=None)) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA foreign_keys=ON")
        migrate(connection)
        yield connection


@contextmanager
def transaction(connection: Connection) -> Generator[None]:
    """All of the block, or nothing of it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
