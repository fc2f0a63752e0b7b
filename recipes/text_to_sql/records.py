"""Turns a row of somebody's data set into an `Item`, or says why it cannot be used.

Rows are mappings with a question, a reference query, and one of: `db_id` (a SQLite file beside the data, as Spider
has it), a context of CREATE TABLE and perhaps INSERT statements (as gretel's and other synthetic sets have it), or a
`table` with header and rows (as WikiSQL has it). Contexts without rows get drawn ones.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openrl_recipes.text_to_sql.item import Item
from openrl_recipes.text_to_sql.sandbox import Database, QueryError, Row, Sandbox, columns, quoted, same_result
from openrl_recipes.text_to_sql.scoring import one_line, tokens

Record = Mapping[str, Any]

# The names that the known sets use, best first. A Spider row has its parsed query as `sql`, a dict: not that one.
QUESTION = ("question", "sql_prompt", "prompt", "utterance")
SQL = ("query", "sql", "answer", "sql_query")
CONTEXT = ("context", "sql_context", "schema", "create_table")
DATABASE = ("db_id", "database_id")

LONGEST_PROMPT = 2000  # characters; a schema of hundreds of columns is no task for a small model
USELESS = "the query fails, or returns nothing or a constant"
VARIANTS = 3  # databases an item, where they can be made
_ATTEMPTS = 12  # row sets drawn to find `VARIANTS` on which the reference returns something
_ROWS = (8, 14)


class LeftOut(Exception):
    """A row that cannot be used; the message is the reason as it is counted."""


def make_item(record: Record, databases: Path | None) -> Item:
    """The item of a row. `databases` holds `<db_id>/<db_id>.sqlite`. Raises `LeftOut`."""
    question, gold = text_of(record, QUESTION), reference(record)
    if not question or not gold:
        raise LeftOut("no question or no query")
    if not gold.upper().startswith("SELECT ") or len(tokens(gold)) < 3:
        raise LeftOut("the query does not begin with SELECT")
    if "'now'" in gold.lower():
        raise LeftOut("the result depends on the day")
    candidates = _databases(record, gold, databases)
    usable = [database for database in candidates if result(database, gold)]
    if candidates[0] not in usable:
        raise LeftOut(USELESS)
    schema = describe(usable[0])
    item = Item(group_of(record), 0, schema, " ".join(question.split()), gold, tuple(usable))
    if len(item.prompt) > LONGEST_PROMPT:
        raise LeftOut("the prompt is too long")
    return item


def text_of(record: Record, names: Sequence[str]) -> str:
    """The first of these columns that holds a text; empty if none does."""
    return next((record[name] for name in names if isinstance(record.get(name), str) and record[name].strip()), "")


def group_of(record: Record) -> str:
    """What tells rows about the same tables: the name of their database, or their context itself."""
    if isinstance(record.get("table"), Mapping):
        return str(record["table"].get("id") or record["table"]["header"])
    return text_of(record, DATABASE) or _statements(text_of(record, CONTEXT))


def reference(record: Record) -> str:
    """The row's query on one line."""
    parsed = record.get("sql")
    if isinstance(parsed, Mapping) and "sel" in parsed and isinstance(record.get("table"), Mapping):
        return wikisql_query(parsed, record["table"]["header"])
    return one_line(text_of(record, SQL))


# ------------------------------------------------------------------------------------------------------------------
# Databases


def _databases(record: Record, gold: str, folder: Path | None) -> list[Database]:
    """What the query may run on, most authentic first."""
    if isinstance(record.get("table"), Mapping):
        return _thinned(wikisql_script(record["table"]))
    if context := text_of(record, CONTEXT):
        return _drawn(context, gold) if _is_drawn(record) else _thinned(context)
    name = text_of(record, DATABASE)
    if not name:
        raise LeftOut("no context, no table and no db_id")
    if folder is None or Path(name).name != name:
        raise LeftOut("no database file for its db_id")
    file = folder / name / f"{name}.sqlite"
    if not file.is_file():
        raise LeftOut("no database file for its db_id")
    return [Database(file=str(file))]


def _is_drawn(record: Record) -> bool:
    """Whether the row brings statements that make tables but no rows."""
    context = text_of(record, CONTEXT)
    return bool(context) and not re.search(r"\binsert\s+into\b", context, re.IGNORECASE)


def _thinned(script: str) -> list[Database]:
    """The rows that the data set gives, and twice the same with a third of them left out, against luck."""
    return [Database(script=script, thin=thin) for thin in range(VARIANTS)]


def _drawn(context: str, gold: str) -> list[Database]:
    """Row sets drawn for tables that come without rows; the values that the query names are among the drawn ones.

    Seeded by the context alone, so that the same row of the data set always makes the same item.
    """
    try:
        tables = columns(Database(script=context))
    except QueryError as error:
        raise LeftOut("the context fails") from error
    rng = random.Random(f"rows/{context}/{gold}")
    script = context.rstrip().removesuffix(";") + ";\n"
    drawn = [Database(script=script + draw_inserts(rng, tables, gold)) for _ in range(_ATTEMPTS)]
    found = [(database, rows) for database in drawn if (rows := result(database, gold))][:VARIANTS]
    if len(found) < VARIANTS or all(same_result(found[0][1], rows, ordered=False) for _, rows in found[1:]):
        raise LeftOut(USELESS)
    return [database for database, _ in found]


def draw_inserts(rng: random.Random, tables: Mapping[str, Sequence[tuple[str, str]]], gold: str) -> str:
    """INSERT statements of 8 to 14 rows a table. Rows that break a constraint of the table are left out by SQLite."""
    words = [token[1:-1].replace("''", "'") for token in tokens(gold) if token[0] in "'\""]
    numbers = [int(token) for token in tokens(gold) if token.isascii() and token.isdigit() and len(token) < 10]
    statements: list[str] = []
    for table, typed in tables.items():
        for i in range(1, rng.randint(*_ROWS) + 1):
            row = [_value(rng, i, name, kind, words, numbers) for name, kind in typed]
            values = ", ".join(_literal(value) for value in row)
            statements.append(f"INSERT OR IGNORE INTO {quoted(table)} VALUES ({values});")
    return "\n".join(statements)


def _value(rng: random.Random, i: int, name: str, kind: str, words: list[str], numbers: list[int]) -> str | int | float:
    if affinity(kind) == "TEXT":
        own = [f"{name} {k}" for k in range(1, 6)]
        return rng.choice(words) if words and rng.random() < 0.5 else rng.choice(own)
    if name.lower() == "id":
        return i
    if name.lower().endswith("id"):
        return rng.randint(1, _ROWS[0])
    value = rng.choice(numbers) + rng.randint(-1, 1) if numbers and rng.random() < 0.5 else rng.randint(1, 40)
    return value + rng.choice((0.25, 0.5)) if affinity(kind) == "REAL" and rng.random() < 0.5 else value


def _literal(value: str | int | float) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def result(database: Database, gold: str) -> list[Row]:
    """The rows that the query gives there; none if it fails or gives a lone zero or NULLs, as wrong ones do too."""
    try:
        with Sandbox(database) as sandbox:
            rows = sandbox.run(gold)
    except QueryError:
        return []
    return rows if rows != [(0,)] and any(value is not None for row in rows for value in row) else []


# ------------------------------------------------------------------------------------------------------------------
# Schemas


def describe(database: Database) -> str:
    """The tables as the prompt shows them: `Table books(id INT, title TEXT)`, a line each."""
    return "\n".join(
        f"Table {_name(table)}({', '.join(f'{_name(column)} {affinity(kind)}' for column, kind in typed)})"
        for table, typed in columns(database).items()
    )


def affinity(kind: str) -> str:
    """INT, REAL or TEXT for a declared type, by SQLite's own rules (https://sqlite.org/datatype3.html, 3.1)."""
    upper = kind.upper()
    if "INT" in upper or "BOOL" in upper:
        return "INT"
    if any(part in upper for part in ("REAL", "FLOA", "DOUB", "NUM", "DEC", "MONEY")):
        return "REAL"
    return "TEXT"


def _name(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else quoted(name)


def _statements(context: str) -> str:
    """A context without its rows: two contexts with the same tables are one group."""
    return " ".join(re.split(r"\binsert\s+into\b", context, maxsplit=1, flags=re.IGNORECASE)[0].split())


# ------------------------------------------------------------------------------------------------------------------
# WikiSQL: one table a question, and the query as a tree

_AGGREGATES = ("", "MAX", "MIN", "COUNT", "SUM", "AVG")
_OPERATORS = ("=", ">", "<")


def wikisql_script(table: Record) -> str:
    """The statements that make WikiSQL's `table` under the name `data`."""
    kinds = table.get("types") or ["text"] * len(table["header"])
    header = [quoted(str(name)) for name in table["header"]]
    typed = ", ".join(
        f"{name} {'REAL' if kind == 'real' else 'TEXT'}" for name, kind in zip(header, kinds, strict=True)
    )
    rows = [
        ", ".join(_literal(value) if isinstance(value, str) else str(value) for value in row) for row in table["rows"]
    ]
    return f"CREATE TABLE data({typed});\n" + "\n".join(f"INSERT INTO data VALUES ({row});" for row in rows)


def wikisql_query(parsed: Record, header: Sequence[Any]) -> str:
    """The query of WikiSQL's tree: column, aggregate, and conditions joined by AND. WikiSQL compares without case."""
    column, aggregate = quoted(str(header[parsed["sel"]])), _AGGREGATES[parsed["agg"]]
    conditions = [
        f"{quoted(str(header[at]))} {_OPERATORS[operator]} {_literal(value)}"
        + (" COLLATE NOCASE" if isinstance(value, str) else "")
        for at, operator, value in _conditions(parsed["conds"])
    ]
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"SELECT {f'{aggregate}({column})' if aggregate else column} FROM data{where}"


def _conditions(conditions: Any) -> list[tuple[int, int, str | float]]:
    """Rows of (column, operator, value), or the hub's copy of them as three lists."""
    if isinstance(conditions, Mapping):
        names = ("column_index", "operator_index", "condition")
        return list(zip(*(conditions[name] for name in names), strict=True))
    return [(at, operator, value) for at, operator, value in conditions]
