"""Runs one untrusted SQL query on a small SQLite database that it can only read.

The text comes from a language model and is hostile until shown otherwise. First line of defence, here: an authorizer
that lets SELECT and some harmless functions through, SQLite's own limits on lengths and depth, 50 ms of work, 1,000
rows, a megabyte of text. The second line is a process of its own with limits of the operating system (`worker.py`).
"""

from __future__ import annotations

import math
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

Row = tuple[str | int | float | bytes | None, ...]

DEADLINE_SECONDS = 0.05
BUILD_SECONDS = 1.0  # for the statements of a data set that fill a database
MAX_ROWS = 1000
MAX_SQL = 2000  # characters of a query
MAX_TEXT = 1_000_000  # characters in one result

# What a query may do. Everything else (ATTACH, PRAGMA, INSERT, load_extension, ...) is refused while it is compiled.
_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_AGGREGATES = ("avg", "count", "max", "min", "sum", "total", "rank", "dense_rank", "row_number")
_TEXT = ("instr", "length", "like", "lower", "upper", "ltrim", "rtrim", "trim", "substr", "substring")
_SCALARS = ("abs", "round", "sign", "coalesce", "ifnull", "nullif", "iif", "typeof", "date", "strftime")
_FUNCTIONS = frozenset((*_AGGREGATES, *_TEXT, *_SCALARS))

# What the statements of a data set may do besides: make tables and fill them.
_BUILD_ACTIONS = _ACTIONS | {
    sqlite3.SQLITE_CREATE_TABLE,
    sqlite3.SQLITE_CREATE_INDEX,
    sqlite3.SQLITE_INSERT,
    sqlite3.SQLITE_UPDATE,  # CREATE TABLE updates sqlite_master
    sqlite3.SQLITE_DELETE,
    sqlite3.SQLITE_REINDEX,
    sqlite3.SQLITE_TRANSACTION,
}

# One value can hold 10 kB, and a query MAX_SQL characters of up to 4 bytes: enough for any answer here, and too little
# to fill a memory.
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4 * MAX_SQL,
    sqlite3.SQLITE_LIMIT_COLUMN: 32,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 40,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 5,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
}
_BUILD_LIMITS = {sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000, sqlite3.SQLITE_LIMIT_ATTACHED: 0}


_BEGINNING = re.compile(r"(?>\s+|--[^\n]*|/\*.*?\*/)*+(?:SELECT|WITH|VALUES)\b", re.IGNORECASE | re.DOTALL)


class QueryError(Exception):
    """A query that SQLite or the sandbox refused: bad syntax, forbidden, too slow or too large."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table to make: its CREATE TABLE statement and its rows."""

    name: str
    create: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Database:
    """What queries run on: `tables`, or a `script` of CREATE TABLE and INSERT statements, or an SQLite `file`.

    `thin` = 1 or 2 leaves out a third of the script's rows, another third each: the same schema with other contents.
    """

    tables: tuple[Table, ...] = ()
    script: str = ""
    file: str = ""
    thin: int = 0


class Sandbox:
    """An open database, locked against everything but reading, so that it can serve one query after another.

    Raises `QueryError` where the database cannot be made or opened.
    """

    def __init__(self, database: Database) -> None:
        try:
            self._connection = _open(database)
            _lock_down(self._connection)
        except _REFUSALS as error:
            raise QueryError(f"no database: {error}") from error

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def run(self, sql: str) -> list[Row]:
        """The rows of one query. Raises `QueryError`, also for text that holds no query or more than one.

        SQLite itself runs an empty text, or one of comments alone, in silence, and it explains a query if asked.
        """
        if not is_query(sql):
            raise QueryError("there is no query")
        try:
            with _deadline(self._connection, DEADLINE_SECONDS):
                return _fetch(self._connection, sql)
        except _REFUSALS as error:
            raise QueryError(str(error) or type(error).__name__) from error


def is_query(sql: str) -> bool:
    """Whether the text is of a legal length and begins as a query does, after comments."""
    return len(sql) <= MAX_SQL and _BEGINNING.match(sql) is not None


def run_query(database: Database, sql: str) -> list[Row]:
    """Open `database`, run one query, close. Raises `QueryError`."""
    with Sandbox(database) as sandbox:
        return sandbox.run(sql)


def columns(database: Database) -> dict[str, list[tuple[str, str]]]:
    """The tables of a database with the name and declared type of each column. Raises `QueryError`."""
    try:
        connection = _open(database)
        try:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid").fetchall()
            names = [str(name) for (name,) in tables if not str(name).startswith("sqlite_")]
            return {name: [(c[1], c[2]) for c in _table_info(connection, name)] for name in names}
        finally:
            connection.close()
    except _REFUSALS as error:
        raise QueryError(f"no database: {error}") from error


def _table_info(connection: sqlite3.Connection, name: str) -> list[Any]:
    return connection.execute(f"PRAGMA table_info({quoted(name)})").fetchall()


def quoted(name: str) -> str:
    """A name as SQL writes it where it may hold anything."""
    return '"' + name.replace('"', '""') + '"'


# ------------------------------------------------------------------------------------------------------------------
# Making the database

# Python's module has no one class for all that it refuses: bad encodings and NULs are ValueErrors, for instance.
_REFUSALS = (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError, OverflowError)


def _open(database: Database) -> sqlite3.Connection:
    """The filled database, not locked yet. A file is opened read-only and must not change meanwhile."""
    uri = f"{Path(database.file).absolute().as_uri()}?mode=ro&immutable=1" if database.file else ":memory:"
    with ExitStack() as undo:
        connection = sqlite3.connect(uri, uri=bool(database.file), isolation_level=None, check_same_thread=False)
        undo.callback(connection.close)
        if database.file:  # real data sets hold texts in other encodings
            connection.text_factory = lambda text: text.decode(errors="replace")
            connection.execute("PRAGMA cache_size = -500")  # kB; a worker keeps many files open
        _fill(connection, database)
        undo.pop_all()
        return connection


def _fill(connection: sqlite3.Connection, database: Database) -> None:
    if database.tables:
        _make_tables(connection, database.tables)
    if database.script:
        _run_script(connection, database.script)
    if database.thin:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            connection.execute(f"DELETE FROM {quoted(str(name))} WHERE rowid % 3 = ?", (database.thin % 3,))


def _make_tables(connection: sqlite3.Connection, tables: Sequence[Table]) -> None:
    connection.execute("BEGIN")
    for table in tables:
        connection.execute(table.create)
        if table.rows:
            values = ", ".join("?" * len(table.rows[0]))
            connection.executemany(f"INSERT INTO {table.name} VALUES ({values})", table.rows)
    connection.execute("COMMIT")


def _run_script(connection: sqlite3.Connection, script: str) -> None:
    """The script comes from a data set, so it too is held to what it needs: tables and rows, for a second at most."""
    for limit, value in _BUILD_LIMITS.items():
        connection.setlimit(limit, value)
    connection.set_authorizer(_authorize_build)
    with _deadline(connection, BUILD_SECONDS):
        connection.executescript(script)
    connection.set_authorizer(None)


def _lock_down(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA temp_store = MEMORY")  # sorting a large result writes no file
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    for limit, value in _LIMITS.items():
        connection.setlimit(limit, value)
    connection.set_authorizer(_authorize)


def _authorize(action: int, first: str | None, second: str | None, database: str | None, source: str | None) -> int:
    if action == sqlite3.SQLITE_READ and (first or "").lower().startswith("sqlite_"):
        return sqlite3.SQLITE_DENY  # the schema is in the prompt; nobody needs SQLite's own tables
    if action in _ACTIONS or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _authorize_build(
    action: int, first: str | None, second: str | None, database: str | None, source: str | None
) -> int:
    if action in _BUILD_ACTIONS or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


# ------------------------------------------------------------------------------------------------------------------
# Running the query


class _deadline:
    """Interrupts what a connection does after `seconds` of this thread's CPU time.

    CPU time, not the clock: on a machine busy with training, the clock would punish right answers at random. What
    waits instead of working is ended from outside, by `judge.py`.
    """

    def __init__(self, connection: sqlite3.Connection, seconds: float) -> None:
        self._connection, self._seconds = connection, seconds

    def __enter__(self) -> None:
        end = time.thread_time() + self._seconds
        self._connection.set_progress_handler(lambda: time.thread_time() > end, 1000)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.set_progress_handler(None, 0)


def _fetch(connection: sqlite3.Connection, sql: str) -> list[Row]:
    cursor = connection.execute(sql)
    if cursor.description is None:
        raise QueryError("there is no query")
    rows: list[Row] = []
    text = 0
    for row in cursor:
        rows.append(row)
        text += sum(len(value) for value in row if isinstance(value, (str, bytes)))
        if len(rows) > MAX_ROWS or text > MAX_TEXT:
            cursor.close()
            raise QueryError(f"more than {MAX_ROWS} rows or {MAX_TEXT} characters")
    return rows


# ------------------------------------------------------------------------------------------------------------------
# Comparing results


def same_result(wanted: Sequence[Row], got: Sequence[Row], *, ordered: bool) -> bool:
    """Whether two results hold the same rows, in any order unless `ordered`. Two empty results are *not* the same."""
    if not wanted or len(wanted) != len(got):
        return False
    left, right = [normal(row) for row in wanted], [normal(row) for row in got]
    return left == right if ordered else Counter(left) == Counter(right)


def normal(row: Row) -> Row:
    """Numbers rounded, so that 2, 2.0 and 1.9999999999 (another order of summing) are one value."""
    return tuple(_number(value) if isinstance(value, (int, float)) else value for value in row)


def _number(value: float) -> float:
    return round(float(value), 6) + 0.0 if math.isfinite(value) else value
