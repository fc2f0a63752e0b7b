"""Sources: small data sets of the known layouts on disk, read for real."""

from __future__ import annotations

import builtins
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from openrl_recipes.text_to_sql.generator import make_items
from openrl_recipes.text_to_sql.item import Item
from openrl_recipes.text_to_sql.records import LeftOut, affinity, make_item, wikisql_query
from openrl_recipes.text_to_sql.sources import Source, SourceError, open_source, split

Row = dict[str, Any]
TABLES = ("cafes", "boats", "lamps", "coats", "bikes", "pens", "cups", "hats", "maps", "keys", "toys", "tins")


def some(items: Iterator[Item], count: int) -> list[Item]:
    return list(islice(items, count))


def context(table: str) -> str:
    rows = ", ".join(f"({i}, '{table} {i}', {10 * i})" for i in range(1, 7))
    return f"CREATE TABLE {table} (id INT, name VARCHAR(20), price INTEGER); INSERT INTO {table} VALUES {rows};"


def gretel(table: str) -> list[Row]:
    """Rows as gretelai/synthetic_text_to_sql names them."""
    questions = [("Which cost over 20?", f"SELECT name\n FROM {table} WHERE price > 20;")]
    questions += [("How much in all?", f"SELECT SUM(price) FROM {table}")]
    return [{"domain": "trade", "sql_prompt": q, "sql": sql, "sql_context": context(table)} for q, sql in questions]


def write_lines(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("\n".join(json.dumps(row) for row in rows))


def check(source: Source) -> tuple[list[Item], list[Item], list[Item]]:
    """What holds for every source: seeded, judged right, and about disjoint tables."""
    train, validation, held_out = some(source.train(0), 12), source.validation(4), source.held_out(4)
    assert some(source.train(0), 12) == train
    assert source.validation(4) == validation
    assert validation
    assert held_out
    domains = [{item.domain for item in part} for part in (train, validation, held_out)]
    assert not domains[0] & domains[1] | domains[0] & domains[2] | domains[1] & domains[2]
    for item in (*train, *validation, *held_out):
        assert item.solved_by(item.gold)
        assert not item.solved_by("SELECT 1")
        assert item.prompt.endswith("\nSQL: SELECT")
        assert item.answer.startswith(" ")
        assert item.answer.count("\n") == 1
    return train, validation, held_out


# ---- generated ----


def test_the_generator_is_the_default_source() -> None:
    source = open_source("generated", 3)
    check(source)
    assert some(source.train(5), 6) == make_items("train", 6, 5)
    assert source.validation(6) == make_items("validation", 6, 3)
    assert source.held_out(6) == make_items("held-out", 6, 3)
    assert source.left_out == {}


@pytest.mark.parametrize("text", ["", "spider", "hub:", "folder:", "generated:x", "http://x"])
def test_an_unknown_source_is_an_error_that_lists_the_known_ones(text: str) -> None:
    with pytest.raises(SourceError, match="generated, hub:DATASET"):
        open_source(text, 0)


# ---- a folder of JSONL with contexts ----


def test_jsonl_with_contexts(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [row for table in TABLES for row in gretel(table)])
    source = open_source(f"folder:{tmp_path}", 0)
    train, _, _ = check(source)
    first = next(item for item in train if "name" in item.gold)
    table = first.gold.split()[3]
    assert first.schema == f"Table {table}(id INT, name TEXT, price INT)"
    assert first.gold == f"SELECT name FROM {table} WHERE price > 20"
    assert len(first.databases) == 3, "the rows given and two thinned sets"
    assert not first.solved_by(f"SELECT name FROM {table} WHERE price > 30")
    assert source.left_out == {}


def test_other_names_and_dev_rows_of_their_own(tmp_path: Path) -> None:
    drawn = [row for table in TABLES for row in gretel(table)]
    rows = [{"question": r["sql_prompt"], "answer": r["sql"], "context": r["sql_context"]} for r in drawn]
    write_lines(tmp_path / "train.jsonl", rows[:-4])
    (tmp_path / "dev.json").write_text(json.dumps(rows[-4:]))
    _, _, held_out = check(open_source(f"folder:{tmp_path}", 0))
    assert {item.gold.split(" FROM ")[1].split()[0] for item in held_out} == {"toys", "tins"}


def test_rows_that_cannot_be_used_are_left_out_and_counted(tmp_path: Path) -> None:
    good = [row for table in TABLES for row in gretel(table)]
    bad = [
        {"question": "?", "sql": "SELECT nme FROM cafes", "context": context("cafes")},
        {"question": "?", "sql": "SELECT name FROM cafes WHERE price > 9000", "context": context("cafes")},
        {"question": "?", "sql": "SELECT COUNT(*) FROM cafes WHERE price > 9000", "context": context("cafes")},
        {"question": "?", "sql": "SELECT name FROM cafes", "context": "CREATE TABLE cafes (((; INSERT INTO cafes"},
        {"question": "?", "sql": "SELECT name FROM cafes; SELECT 1", "context": context("cafes")},
        {"question": "?", "sql": "DELETE FROM cafes", "context": context("cafes")},
        {"question": "", "sql": "SELECT name FROM cafes", "context": context("cafes")},
        {"question": "?", "sql": "SELECT name FROM cafes"},
        {"question": "?", "sql": "SELECT name FROM cafes", "db_id": "../../etc"},
        {"question": "?", "sql": "SELECT date('now') FROM cafes", "context": context("cafes")},
        {"question": "?" * 3000, "sql": "SELECT name FROM cafes", "context": context("cafes")},
    ]
    for row in bad:
        with pytest.raises(LeftOut):
            make_item(row, tmp_path)
    write_lines(tmp_path / "train.jsonl", good + bad)
    source = open_source(f"folder:{tmp_path}", 0)
    some(source.train(0), 60)
    source.validation(60)
    source.held_out(60)
    assert source.left_out == {
        "the query fails, or returns nothing or a constant": 5,
        "the query does not begin with SELECT": 1,
        "no question or no query": 1,
        "no context, no table and no db_id": 1,
        "no database file for its db_id": 1,
        "the result depends on the day": 1,
        "the prompt is too long": 1,
    }


def test_a_source_without_a_usable_row_says_why(tmp_path: Path) -> None:
    rows = [{"question": "?", "sql": "SELECT 1 FROM x", "db_id": f"d{i}"} for i in range(9)]
    write_lines(tmp_path / "train.jsonl", rows)
    with pytest.raises(SourceError, match=r"no train row can be used: no database file for its db_id \(7\)"):
        next(open_source(f"folder:{tmp_path}", 0).train(0))


@pytest.mark.parametrize("text", ["{", "[1, 2]", '{"a": 1}'])
def test_files_that_are_no_rows_are_errors(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(SourceError, match=r"train\.json"):
        open_source(f"folder:{tmp_path}", 0)


def test_a_folder_that_is_empty_or_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no train\*\.json"):
        open_source(f"folder:{tmp_path}", 0)
    with pytest.raises(SourceError, match="no such folder"):
        open_source(f"folder:{tmp_path}/nowhere", 0)


# ---- contexts without rows, as b-mc2/sql-create-context has them ----


def test_contexts_without_rows_get_three_drawn_row_sets() -> None:
    row = {
        "question": "Which heads of Ohio's departments are older than 56?",
        "answer": "SELECT T1.name FROM head AS T1 JOIN department AS T2 ON T1.department_id = T2.department_id "
        'WHERE T2.state = "Ohio\'s" AND T1.age > 56',
        "context": "CREATE TABLE head (department_id VARCHAR, name VARCHAR, age INTEGER); "
        "CREATE TABLE department (department_id VARCHAR, state VARCHAR)",
    }
    row["answer"] = row["answer"].replace('"Ohio\'s"', "'Ohio''s'")
    item = make_item(row, None)
    assert item == make_item(row, None)
    assert item.schema == (
        "Table head(department_id TEXT, name TEXT, age INT)\nTable department(department_id TEXT, state TEXT)"
    )
    assert len({database.script for database in item.databases}) == 3
    assert item.solved_by(item.gold)
    assert not item.solved_by(item.gold.split(" AND ")[0])
    assert not item.solved_by(item.gold.replace("T2.state = 'Ohio''s' AND ", ""))


def test_a_constant_is_no_question() -> None:
    for gold in ("SELECT COUNT(*) FROM t WHERE x > 9e9", "SELECT 7 FROM t LIMIT 1"):
        with pytest.raises(LeftOut, match="constant"):
            make_item({"question": "How many?", "answer": gold, "context": "CREATE TABLE t(x INT)"}, None)


# ---- Spider's layout ----


@pytest.fixture
def spider(tmp_path: Path) -> Path:
    rows: dict[str, list[Row]] = {}
    for table in TABLES:
        file = tmp_path / "database" / f"db_{table}" / f"db_{table}.sqlite"
        file.parent.mkdir(parents=True)
        connection = sqlite3.connect(file)
        connection.executescript(context(table) + 'CREATE TABLE towns(town TEXT, "zip code" NUMERIC);')
        connection.execute(f"INSERT INTO {table} VALUES (99, CAST(x'4a6f73e9' AS TEXT), 5)")  # not UTF-8
        connection.commit()
        connection.close()
        rows[table] = [
            {"db_id": f"db_{table}", "question": r["sql_prompt"], "query": r["sql"], "sql": {"select": []}}
            for r in gretel(table)
        ]
    (tmp_path / "train_spider.json").write_text(json.dumps([row for table in TABLES[:6] for row in rows[table]]))
    (tmp_path / "train_others.json").write_text(json.dumps([row for table in TABLES[6:10] for row in rows[table]]))
    (tmp_path / "dev.json").write_text(json.dumps([row for table in TABLES[10:] for row in rows[table]]))
    (tmp_path / "tables.json").write_text(json.dumps([{"db_id": "x"}]))
    return tmp_path


def test_spider_s_layout(spider: Path) -> None:
    source = open_source(f"folder:{spider}", 0)
    train, validation, held_out = check(source)
    assert {item.domain for item in held_out} == {"db_toys", "db_tins"}
    assert len({item.domain for item in some(source.train(1), 40)} | {item.domain for item in validation}) == 10
    name = train[0].domain.removeprefix("db_")
    assert train[0].schema == f'Table {name}(id INT, name TEXT, price INT)\nTable towns(town TEXT, "zip code" REAL)'
    assert train[0].databases[0].file.endswith(f"{train[0].domain}.sqlite")
    assert source.left_out == {}


def test_a_database_file_is_only_read(spider: Path) -> None:
    item = next(open_source(f"folder:{spider}", 0).train(0))
    file = Path(item.databases[0].file)
    before, mode = file.read_bytes(), file.stat().st_mtime_ns
    for hostile in ("DELETE FROM towns", "WITH x AS (SELECT 1) DELETE FROM towns", f"ATTACH '{file}' AS y"):
        assert not item.solved_by(hostile)
    assert item.solved_by(item.gold)
    assert (file.read_bytes(), file.stat().st_mtime_ns) == (before, mode)
    assert [f.name for f in file.parent.iterdir()] == [file.name]


def test_a_db_id_cannot_lead_out_of_the_folder(spider: Path) -> None:
    shutil.copy(spider / "database" / "db_cafes" / "db_cafes.sqlite", spider / "secret.sqlite")
    (spider / "secret").mkdir()
    row = {"question": "?", "query": "SELECT name FROM cafes", "db_id": "../secret"}
    assert (spider / "database" / "../secret" / "../secret.sqlite").is_file()
    with pytest.raises(LeftOut, match="no database file"):
        make_item(row, spider / "database")


def test_a_file_that_is_no_database_is_left_out(spider: Path) -> None:
    (spider / "database" / "db_cafes" / "db_cafes.sqlite").write_bytes(b"x" * 5000)
    with pytest.raises(LeftOut, match="fails"):
        make_item({"question": "?", "query": "SELECT name FROM cafes", "db_id": "db_cafes"}, spider / "database")


# ---- WikiSQL's layout ----


def wikisql(table: str) -> tuple[Row, Row]:
    header = ["Player", "Goals scored"]
    rows = [["Ann", 3], ["Bob", 9], ["Cy", 4], ["Di", 12], ["Ed", 1]]
    tree = {"sel": 0, "agg": 0, "conds": [[1, 1, 3]]}
    question = {"table_id": table, "question": "Who scored over 3?", "sql": tree, "phase": 1}
    return question, {"id": table, "header": header, "types": ["text", "real"], "rows": rows}


def test_wikisql_s_layout(tmp_path: Path) -> None:
    for part, names in (("train", range(12)), ("dev", range(20, 23))):
        pairs = [wikisql(f"1-{n}") for n in names]
        write_lines(tmp_path / f"{part}.jsonl", [question for question, _ in pairs])
        write_lines(tmp_path / f"{part}.tables.jsonl", [table for _, table in pairs])
    train, _, held_out = check(open_source(f"folder:{tmp_path}", 0))
    assert train[0].gold == 'SELECT "Player" FROM data WHERE "Goals scored" > 3'
    assert train[0].schema == 'Table data(Player TEXT, "Goals scored" REAL)'
    assert train[0].solved_by('SELECT player FROM data WHERE "goals scored" >= 4')
    assert {item.domain for item in held_out} <= {"1-20", "1-21", "1-22"}


def test_wikisql_s_trees_become_queries_in_both_of_their_forms() -> None:
    conditions = [[0, 0, "O'Hara"], [1, 2, 2.5]]
    columns = {"column_index": [0, 1], "operator_index": [0, 2], "condition": ["O'Hara", 2.5]}
    wanted = 'SELECT COUNT("b ""x""") FROM data WHERE "a" = ' + "'O''Hara'" + ' COLLATE NOCASE AND "b ""x""" < 2.5'
    for conds in (conditions, columns):
        assert wikisql_query({"sel": 1, "agg": 3, "conds": conds}, ["a", 'b "x"']) == wanted
    assert wikisql_query({"sel": 0, "agg": 0, "conds": []}, ["a"]) == 'SELECT "a" FROM data'


# ---- the hub's package ----


def test_the_hub_s_package_reads_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write_lines(tmp_path / "set" / "train.jsonl", [row for table in TABLES[:10] for row in gretel(table)])
    write_lines(tmp_path / "set" / "test.jsonl", [row for table in TABLES[10:] for row in gretel(table)])
    _, _, held_out = check(open_source(f"hub:{tmp_path / 'set'}", 0))
    assert {item.gold.split(" FROM ")[1].split()[0] for item in held_out} == {"toys", "tins"}
    with pytest.raises(SourceError, match="hub:"):
        open_source(f"hub:{tmp_path / 'nowhere'}", 0)


def test_without_the_hub_s_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(SourceError, match="pip install datasets"):
        open_source("hub:somebody/some-set", 0)


# ---- dividing ----


def groups(count: int, rows: int = 2) -> list[Row]:
    return [{"db_id": f"d{i}", "question": f"{i}/{k}"} for i in range(count) for k in range(rows)]


def test_rows_are_divided_by_database() -> None:
    parts = split(groups(30), [])
    assert [len({row["db_id"] for row in part}) for part in parts] == [24, 3, 3]
    assert sum(len(part) for part in parts) == 60
    assert split(groups(30), []) == parts


def test_databases_of_the_dev_rows_are_kept_out_of_training() -> None:
    train, validation, held_out = split(groups(20), groups(5))
    assert held_out == groups(5)
    used = {row["db_id"] for row in (*train, *validation)}
    assert used == {f"d{i}" for i in range(5, 20)}


def test_questions_about_one_database_are_divided_instead() -> None:
    parts = split(groups(1, rows=20), [])
    assert [len(part) for part in parts] == [16, 2, 2]
    train, validation, held_out = split(groups(1, rows=20), groups(1, rows=3))
    assert [len(part) for part in (train, validation, held_out)] == [18, 2, 3]


@pytest.mark.parametrize(
    ("declared", "kind"),
    [("VARCHAR(20)", "TEXT"), ("BIGINT", "INT"), ("bool", "INT"), ("decimal(4,2)", "REAL"), ("", "TEXT")],
)
def test_declared_types_are_shown_in_three_kinds(declared: str, kind: str) -> None:
    assert affinity(declared) == kind
