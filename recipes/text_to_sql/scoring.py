"""Execution match: is a query right? Run it beside the reference on three databases and compare what comes back.

One small table lets wrong queries through by luck, so an answer must agree on three independently drawn ones. The
text comes from a language model and is hostile until shown otherwise: each query runs on its own in-memory SQLite
connection that can only read, for 50 ms at most.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Sequence

Row = tuple[str | int | float | None, ...]

DEADLINE_SECONDS = 0.05
MAX_ROWS = 1000

# What a query may do. Everything else (ATTACH, PRAGMA, INSERT, load_extension, ...) is refused while it is compiled.
_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_AGGREGATES = ("avg", "count", "max", "min", "sum", "total", "rank", "dense_rank", "row_number")
_TEXT = ("instr", "length", "like", "lower", "upper", "ltrim", "rtrim", "trim", "substr", "substring")
_SCALARS = ("abs", "round", "sign", "coalesce", "ifnull", "nullif", "iif", "typeof")
_FUNCTIONS = frozenset((*_AGGREGATES, *_TEXT, *_SCALARS))

# One value can hold 10 kB, and a query 2,000 characters: enough for any answer here, too little to fill a memory.
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 2_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 32,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 40,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 5,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
}


class QueryError(Exception):
    """A query that SQLite or the sandbox refused: bad syntax, forbidden, too slow or too large."""


def run_query(create: str, rows: Sequence[Row], sql: str) -> list[Row]:
    """Run one untrusted query on a fresh database made by `create` and filled with `rows`.

    Raises `QueryError`, also for text that holds no query or more than one: SQLite itself runs nothing in silence.
    """
    if not sql.strip(" \t\r\n;"):
        raise QueryError("there is no query")
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        _fill(connection, create, rows)
        _lock_down(connection)
        return _fetch(connection, sql)
    except (sqlite3.Error, sqlite3.Warning, UnicodeError, ValueError) as error:
        raise QueryError(str(error)) from error
    finally:
        connection.close()


def _fill(connection: sqlite3.Connection, create: str, rows: Sequence[Row]) -> None:
    table = create.removeprefix("CREATE TABLE ").split("(", 1)[0]
    connection.execute(create)
    connection.execute("BEGIN")
    connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
    connection.execute("COMMIT")


def _lock_down(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    for limit, value in _LIMITS.items():
        connection.setlimit(limit, value)
    connection.set_authorizer(_authorize)


def _authorize(action: int, first: str | None, second: str | None, database: str | None, source: str | None) -> int:
    if action in _ACTIONS or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _fetch(connection: sqlite3.Connection, sql: str) -> list[Row]:
    deadline = time.monotonic() + DEADLINE_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 1000)
    cursor = connection.execute(sql)
    rows = cursor.fetchmany(MAX_ROWS + 1)
    if len(rows) > MAX_ROWS:
        raise QueryError(f"more than {MAX_ROWS} rows")
    return rows


def same_result(wanted: Sequence[Row], got: Sequence[Row], *, ordered: bool) -> bool:
    """Whether two results hold the same rows, in any order unless `ordered`. Two empty results are *not* the same."""
    if not wanted or not got:
        return False
    left, right = [_normal(row) for row in wanted], [_normal(row) for row in got]
    return left == right if ordered else Counter(left) == Counter(right)


def _normal(row: Row) -> Row:
    """Numbers rounded, so that 2, 2.0 and 1.9999999999 (another order of summing) are one value."""
    return tuple(round(float(value), 6) if isinstance(value, (int, float)) else value for value in row)


def execution_match(create: str, databases: Sequence[Sequence[Row]], gold: str, answer: str) -> bool:
    """Whether `answer` gives the result of `gold` on every one of `databases`; any error is a plain no."""
    ordered = "ORDER BY" in gold.upper()
    try:
        return bool(databases) and all(
            same_result(run_query(create, rows, gold), run_query(create, rows, answer), ordered=ordered)
            for rows in databases
        )
    except QueryError:
        return False


def answer_query(completion: str) -> str:
    """The query in a completion of a prompt that ends in `SELECT`: its first line, put behind that word.

    A completion without a word in it has no query, so it gives an empty string rather than a bare `SELECT`.
    """
    line = completion.split("\n", 1)[0].strip()
    return f"SELECT {line}" if line else ""
