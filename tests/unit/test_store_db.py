"""The store thread: durable when it says so, one caller's error is nobody else's."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from openrl.store.db import Database
from openrl.store.migrations import MIGRATIONS


def test_a_failing_job_is_rolled_back_and_disturbs_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        db = Database(tmp_path / "x.sqlite")
        await db.run(lambda c: c.execute("CREATE TABLE t (v INTEGER)") and None)

        def bad(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO t VALUES (99)")
            raise ValueError("mine")

        def good(value: int) -> object:
            return db.run(lambda c: c.execute("INSERT INTO t VALUES (?)", (value,)).rowcount)

        results = await asyncio.gather(good(1), db.run(bad), good(2), return_exceptions=True)
        assert results[0] == results[2] == 1
        assert isinstance(results[1], ValueError)
        rows = await db.run(lambda c: [row[0] for row in c.execute("SELECT v FROM t ORDER BY v")])
        assert rows == [1, 2]
        db.close()

    asyncio.run(main())


def test_what_was_answered_is_on_disk(tmp_path: Path) -> None:
    """Another connection sees a committed write while the first still runs."""

    async def main() -> None:
        db = Database(tmp_path / "x.sqlite")
        await db.run(lambda c: c.execute("CREATE TABLE t (v INTEGER)") and None)
        await db.run(lambda c: c.execute("INSERT INTO t VALUES (7)").rowcount)
        other = sqlite3.connect(tmp_path / "x.sqlite")
        assert other.execute("SELECT v FROM t").fetchall() == [(7,)]
        other.close()
        db.close()

    asyncio.run(main())


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "x.sqlite")
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    with pytest.raises(RuntimeError, match="newer OpenRL"):
        Database(tmp_path / "x.sqlite")
