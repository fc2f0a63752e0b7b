"""Execution match: right queries pass however they are written, lucky, lazy and hostile ones do not."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from openrl_recipes.text_to_sql.sandbox import (
    DEADLINE_SECONDS,
    Database,
    QueryError,
    Row,
    Table,
    run_query,
    same_result,
)
from openrl_recipes.text_to_sql.scoring import Reference, Score, answer_query, one_line, orders

BOOKS = "CREATE TABLE books(id INT, title TEXT, genre TEXT, price INT)"
SHELVES = "CREATE TABLE shelves(genre TEXT, floor INT)"


def database(books: tuple[Row, ...], shelves: tuple[Row, ...]) -> Database:
    return Database((Table("books", BOOKS, books), Table("shelves", SHELVES, shelves)))


ONE = database(
    ((1, "Dust", "poetry", 10), (2, "Salt", "history", 30), (3, "Rain", "poetry", 20)),
    (("poetry", 1), ("history", 2), ("drama", 1)),
)
TWO = database(((1, "Moss", "history", 5), (2, "Iron", "poetry", 40)), (("poetry", 2), ("history", 2), ("drama", 1)))
THREE = database(
    ((1, "Fern", "poetry", 7), (2, "Opal", "poetry", 9), (3, "Loam", "history", 9), (4, "Silt", "drama", 1)),
    (("poetry", 1), ("history", 1), ("drama", 2)),
)
DATABASES = (ONE, TWO, THREE)

FILTER = "SELECT title FROM books WHERE genre = 'poetry'"
COUNT = "SELECT COUNT(*) FROM books WHERE genre = 'poetry'"
SORTED = "SELECT title FROM books ORDER BY price, title"
NESTED = "SELECT title FROM books WHERE price = (SELECT price FROM books ORDER BY price DESC LIMIT 1)"
CHEAPEST = "SELECT title FROM books WHERE id IN (SELECT id FROM books ORDER BY price LIMIT 2)"
JOIN = "SELECT title, floor FROM books JOIN shelves USING (genre)"
AVERAGE = "SELECT AVG(price) FROM books"
GENRES = "SELECT genre FROM books"
DISTINCT = "SELECT DISTINCT genre FROM books"
NOTHING = "SELECT title FROM books WHERE price > 1000"


def score(gold: str, answer: str, databases: tuple[Database, ...] = DATABASES) -> Score:
    with Reference(gold, databases) as reference:
        scored = reference.score(answer)
        assert reference.solved_by(answer) == scored.match
        return scored


# ---- right answers, written differently ----


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (FILTER, FILTER),
        (FILTER, "select b.title from books b where b.genre like 'poetry' order by title desc"),
        (FILTER, "SELECT title FROM books WHERE genre IN ('poetry');"),
        (FILTER, 'SELECT "title" AS "the ""name""" FROM [books] WHERE `genre` = \'poetry\' -- done'),
        (FILTER, "/* first */ SELECT title FROM books WHERE NOT genre <> 'poetry'"),
        (FILTER, "WITH p AS (SELECT * FROM books WHERE genre = 'poetry') SELECT title FROM p"),
        (COUNT, "SELECT SUM(genre = 'poetry') FROM books"),
        (COUNT, "SELECT COUNT(id) * 1.0 FROM books WHERE genre = 'poetry'"),
        (AVERAGE, "SELECT SUM(price) * 1.0 / COUNT(*) FROM books"),
        (AVERAGE, "SELECT TOTAL(price / 3.0) * 3 / COUNT(*) FROM books"),
        (SORTED, "SELECT title FROM (SELECT * FROM books) ORDER BY price ASC, title"),
        (NESTED, "SELECT title FROM books WHERE price = (SELECT MAX(price) FROM books) ORDER BY title DESC"),
        (CHEAPEST, "SELECT title FROM (SELECT * FROM books ORDER BY price LIMIT 2) ORDER BY id DESC"),
        (JOIN, "SELECT title, floor FROM shelves s, books b WHERE b.genre = s.genre"),
        (JOIN, "SELECT b.title, s.floor FROM shelves AS s INNER JOIN books AS b ON s.genre = b.genre ORDER BY 2"),
        (JOIN, "SELECT title, floor FROM books NATURAL JOIN shelves"),
        (DISTINCT, "SELECT genre FROM books GROUP BY genre"),
        (GENRES, "SELECT ALL genre FROM books"),
    ],
)
def test_right_answers_match_however_they_are_written(gold: str, answer: str) -> None:
    assert score(gold, answer) == Score(match=True, parses=True, runs=True, columns=1.0, values=1.0)


# ---- planted cheats ----


@dataclass(frozen=True)
class Cheat:
    """An answer that must not match, and what it may score besides."""

    answer: str
    parses: bool = False
    runs: bool = False
    gold: str = COUNT
    error: str = ""


CHEATS = {
    # nothing to run, which SQLite runs without a word
    "empty string": Cheat("", error="no query"),
    "blanks": Cheat(" \t\r\n", error="no query"),
    "semicolon": Cheat(";", error="no query"),
    "semicolons": Cheat(" ; \n;", error="no query"),
    "line comment": Cheat("-- SELECT 2", error="no query"),
    "block comment": Cheat("/* SELECT 2 */", error="no query"),
    "open comment": Cheat("/* SELECT 2", error="no query"),
    "many comments": Cheat("/**/" * 400, error="no query"),
    "bare select": Cheat("SELECT", error="incomplete"),
    # lazy or lucky
    "constant of the first database": Cheat("SELECT 2", parses=True, runs=True),
    "values without a table": Cheat("VALUES (2)", parses=True, runs=True),
    "all small numbers": Cheat("VALUES (1), (2), (3)", parses=True, runs=True),
    "a whole result as constants": Cheat("SELECT 'Dust' UNION ALL SELECT 'Rain'", True, True, FILTER),
    "a column of the table": Cheat("SELECT title FROM books", True, True, FILTER),
    "WHERE dropped": Cheat("SELECT COUNT(*) FROM books", True, True),
    "right on one database": Cheat("SELECT COUNT(*) FROM books WHERE price < 25", True, True),
    "right on two databases": Cheat("SELECT COUNT(DISTINCT genre) FROM books WHERE id < 3", True, True),
    "NULL": Cheat("SELECT NULL", True, True),
    "more columns": Cheat("SELECT title, id FROM books WHERE genre = 'poetry'", True, True, FILTER),
    "columns in another order": Cheat("SELECT floor, title FROM books JOIN shelves USING (genre)", True, True, JOIN),
    "cross join": Cheat("SELECT title, floor FROM books, shelves", True, True, JOIN),
    "duplicates dropped": Cheat("SELECT DISTINCT genre FROM books", True, True, GENRES),
    "duplicates kept": Cheat("SELECT genre FROM books", True, True, DISTINCT),
    "duplicates added": Cheat(f"{FILTER} UNION ALL {FILTER}", True, True, FILTER),
    "order ignored": Cheat("SELECT title FROM books ORDER BY title DESC", True, True, SORTED),
    "order reversed": Cheat("SELECT title FROM books ORDER BY price DESC, title DESC", True, True, SORTED),
    "number as text": Cheat("SELECT substr(price, 1) FROM books", True, True, "SELECT price FROM books"),
    "whole number division": Cheat("SELECT SUM(price) / COUNT(*) FROM books", True, True, AVERAGE),
    "rounded": Cheat("SELECT ROUND(AVG(price)) FROM books", True, True, AVERAGE),
    "infinity": Cheat("SELECT 9e999", True, True, AVERAGE),
    "not a number": Cheat("SELECT 9e999 - 9e999", True, True, AVERAGE),
    "both empty": Cheat("SELECT title FROM books WHERE 0", True, True, NOTHING),
    "the reference, which is empty": Cheat(NOTHING, True, True, NOTHING),
    # more than one statement, or no SELECT
    "two statements": Cheat(f"{COUNT}; {COUNT}", error="one statement"),
    "second statement writes": Cheat(f"{COUNT}; DROP TABLE books", error="one statement"),
    "drop": Cheat("DROP TABLE books", error="no query"),
    "delete": Cheat("DELETE FROM books WHERE genre <> 'poetry' RETURNING 1", error="no query"),
    "insert": Cheat("INSERT INTO books VALUES (9, 'x', 'y', 1)", error="no query"),
    "update": Cheat("UPDATE books SET genre = 'poetry'", error="no query"),
    "create": Cheat("CREATE TABLE t(x)", error="no query"),
    "temporary view": Cheat("CREATE TEMP VIEW v AS SELECT 1", error="no query"),
    "attach": Cheat("ATTACH DATABASE 'stolen.db' AS s", error="no query"),
    "pragma": Cheat("PRAGMA query_only = OFF", error="no query"),
    "vacuum": Cheat("VACUUM INTO 'copy.db'", error="no query"),
    "begin": Cheat("BEGIN EXCLUSIVE", error="no query"),
    "explain": Cheat(f"EXPLAIN {COUNT}", error="no query"),
    "with insert": Cheat("WITH x AS (SELECT 1) INSERT INTO books SELECT 1, 2, 3, 4 FROM x", True, error="authorized"),
    "with delete": Cheat("WITH x AS (SELECT 1) DELETE FROM books", True, error="authorized"),
    # reading what is none of its business
    "sqlite_master": Cheat("SELECT COUNT(*) FROM sqlite_master", True, error="authorized"),
    "sqlite_schema": Cheat("SELECT sql FROM SQLITE_SCHEMA", True, error="prohibited"),
    "sqlite_temp_master": Cheat("SELECT * FROM sqlite_temp_master", True, error="prohibited"),
    "pragma as a table": Cheat("SELECT * FROM pragma_database_list", True, error="prohibited|authorized|no such"),
    "dbstat": Cheat("SELECT * FROM dbstat", True, error="constructor|authorized|no such"),
    "load_extension": Cheat("SELECT load_extension('evil')", True, error="authorized"),
    "readfile": Cheat("SELECT readfile('/etc/passwd')", True, error="no such function|authorized"),
    "writefile": Cheat("SELECT writefile('x', 'y')", True, error="no such function|authorized"),
    "version": Cheat("SELECT sqlite_version()", True, error="authorized"),
    # using up memory or time
    "randomblob": Cheat("SELECT randomblob(1000000000)", True, error="authorized"),
    "zeroblob": Cheat("SELECT hex(zeroblob(1000000000))", True, error="authorized"),
    "printf": Cheat("SELECT printf('%1000000000d', 1)", True, error="authorized"),
    "nested replace": Cheat("SELECT " + "replace(" * 9 + "'a'" + ", 'a', 'aaaaaaaaaa')" * 9, True, error="authorized"),
    "group_concat": Cheat("SELECT group_concat(title) FROM books", True, error="authorized"),
    "doubling text": Cheat(
        "WITH RECURSIVE s(t) AS (SELECT 'xxxxxxxx' UNION ALL SELECT t || t FROM s) SELECT length(t) FROM s LIMIT 40",
        error="too big",
    ),
    "wide rows of long texts": Cheat(
        "WITH RECURSIVE s(t, n) AS (SELECT 'xxxxxxxx', 1 UNION ALL SELECT t || t, n + 1 FROM s WHERE n < 11), "
        "w AS (SELECT t FROM s WHERE n = 11) SELECT " + ", ".join(["t"] * 30) + " FROM w, books a, books b, books c",
        True,
        error="1000000 characters",
    ),
    "endless recursion": Cheat(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
        True,
        error="interrupted",
    ),
    "cross join bomb": Cheat(
        "SELECT COUNT(*) FROM " + ", ".join(f"books b{i}" for i in range(25)), True, error="interrupted"
    ),
    "sorting bomb": Cheat(
        "SELECT b0.id FROM " + ", ".join(f"books b{i}" for i in range(20)) + " ORDER BY b1.title || b2.title",
        True,
        error="interrupted",
    ),
    "a million rows": Cheat(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 1000000) SELECT i FROM n",
        True,
        error="1000 rows",
    ),
    "wildcards": Cheat(f"SELECT '{'a' * 900}' LIKE '{'%a' * 60}b'", True, error="too complex"),
    "deep expression": Cheat("SELECT " + "(" * 500 + "1" + ")" * 500, error="depth|overflow"),
    "deep sum": Cheat("SELECT " + "+".join(["1"] * 200), error="depth"),
    "many unions": Cheat(" UNION ALL ".join(["SELECT 1"] * 20), error="too many"),
    "many columns": Cheat("SELECT " + ", ".join(["1"] * 100), error="too many"),
    "long text": Cheat("SELECT '" + "x" * 5000 + "'", error="no query"),
    # text that is no text
    "NUL byte": Cheat("SELECT 2\0", error="null character"),
    "NUL byte within": Cheat("SELECT COUNT(*)\0 FROM books", error="null character"),
    "lone surrogate": Cheat("SELECT \ud800", error="surrogate"),
    "unicode garbage": Cheat("SELECT ﷽​🙈 FROM books", True, error="no such column"),
    "fullwidth letters": Cheat("ＳＥＬＥＣＴ 2", error="no query"),
    "replacement signs": Cheat("�" * 50, error="no query"),
    "right to left": Cheat("SELECT \u202e2", True, error="no such column"),
    "chatter": Cheat("Sure! SELECT 2", error="no query"),
    "unfinished quote": Cheat("SELECT 'Dust", error="unrecognized token"),
    "unknown column": Cheat("SELECT tittle FROM books", True, error="no such column"),
    "unknown table": Cheat("SELECT 2 FROM nowhere", True, error="no such table"),
}


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS.keys())
def test_planted_cheats_do_not_match(cheat: Cheat) -> None:
    scored = score(cheat.gold, cheat.answer)
    assert not scored.match
    assert (scored.parses, scored.runs) == (cheat.parses, cheat.runs), scored
    assert re.search(cheat.error, scored.error), scored.error
    assert bool(scored.error) is not scored.runs


def test_a_lucky_constant_is_right_on_the_database_it_was_guessed_from_only() -> None:
    assert score(COUNT, "SELECT 2", (ONE,)).match
    assert not score(COUNT, "SELECT 2").match


def test_without_a_database_nothing_matches() -> None:
    assert not score(COUNT, COUNT, ()).match


def test_endless_queries_end_at_the_deadline() -> None:
    started = time.thread_time()
    with pytest.raises(QueryError, match="interrupted"):
        run_query(ONE, CHEATS["endless recursion"].answer)
    assert DEADLINE_SECONDS <= time.thread_time() - started < 10 * DEADLINE_SECONDS


def test_a_hostile_answer_leaves_the_database_as_it_was() -> None:
    with Reference(COUNT, DATABASES) as reference:
        for cheat in CHEATS.values():
            reference.score(cheat.answer)
        assert reference.run(COUNT) == reference.results == [[(2,)], [(1,)], [(2,)]]


def test_no_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for cheat in CHEATS.values():
        score(COUNT, cheat.answer)
    assert list(tmp_path.iterdir()) == []


# ---- the statements of a data set are hostile too ----


def test_a_script_makes_tables_and_fills_them() -> None:
    script = (
        "CREATE TABLE t(id INTEGER PRIMARY KEY AUTOINCREMENT, x TEXT UNIQUE); INSERT INTO t(x) VALUES ('a'), ('b');"
    )
    assert run_query(Database(script=script), "SELECT id, x FROM t") == [(1, "a"), (2, "b")]


@pytest.mark.parametrize(
    "script",
    [
        "ATTACH DATABASE 'stolen.db' AS s; CREATE TABLE s.t(x);",
        "PRAGMA journal_mode = WAL;",
        "CREATE TABLE t(x); CREATE TRIGGER r AFTER INSERT ON t BEGIN DELETE FROM t; END;",
        "CREATE TABLE t(x); INSERT INTO t VALUES (load_extension('evil'));",
        "CREATE TABLE t(x); INSERT INTO t VALUES (zeroblob(100000000));",
        "CREATE TABLE t(x); INSERT INTO t WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT 2 FROM n) SELECT i FROM n;",
        "VACUUM INTO 'copy.db';",
        "not SQL at all",
    ],
)
def test_a_hostile_script_makes_no_database(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(QueryError, match="no database"):
        run_query(Database(script=script), "SELECT 1")
    assert list(tmp_path.iterdir()) == []


def test_a_thinned_database_lacks_a_third_of_the_rows() -> None:
    script = "CREATE TABLE t(x INT); INSERT INTO t VALUES " + ", ".join(f"({i})" for i in range(1, 10)) + ";"
    kept = [run_query(Database(script=script, thin=thin), "SELECT x FROM t") for thin in range(3)]
    assert [len(rows) for rows in kept] == [9, 6, 6]
    assert kept[1] != kept[2]


# ---- comparing, partial scores, text ----


def test_results_compare_by_value_and_count() -> None:
    assert same_result([(1, "a"), (2, "b")], [(2.0, "b"), (1, "a")], ordered=False)
    assert not same_result([(1, "a"), (2, "b")], [(2, "b"), (1, "a")], ordered=True)
    assert same_result([(0.1 + 0.2,)], [(0.3,)], ordered=True)
    assert same_result([(float("inf"),), (-0.0,)], [(0,), (float("inf"),)], ordered=False)
    assert not same_result([(1,), (1,)], [(1,)], ordered=False)
    assert not same_result([(1,), (1,), (2,)], [(1,), (2,), (2,)], ordered=False)
    assert not same_result([], [], ordered=False)
    assert not same_result([("1",)], [(1,)], ordered=False)
    assert not same_result([(None,)], [(0,)], ordered=False)
    assert not same_result([(2**60,)], [(2**61,)], ordered=False)


def test_partial_scores_say_how_near_an_answer_came() -> None:
    """F1 of cells: both poems of database one stand among its three titles, and so on."""
    scored = score(FILTER, "SELECT title FROM books")
    assert (scored.match, scored.runs, scored.columns) == (False, True, 1.0)
    assert scored.values == pytest.approx((2 * 2 / 5 + 2 * 1 / 3 + 2 * 2 / 6) / 3)
    wide = score(FILTER, "SELECT title, genre FROM books WHERE genre = 'poetry'")
    assert wide.columns == 0.5
    assert wide.values == pytest.approx(2 / 3)
    assert score(FILTER, "SELECT title FROM books WHERE 0").columns == 0
    assert score(FILTER, "SELECT tittle FROM books") == Score(parses=True, error="no such column: tittle")


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        (SORTED, True),
        ("select a from t order /* by */ by a", True),
        ("SELECT a FROM t ORDER\n  BY a LIMIT 3", True),
        ("SELECT a FROM (SELECT 1) ORDER BY (SELECT 2)", True),
        (NESTED, False),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("WITH x AS (SELECT a FROM t ORDER BY a) SELECT a FROM x", False),
        ("SELECT RANK() OVER (ORDER BY a) FROM t", False),
        ("SELECT a FROM t WHERE b = 'ORDER BY c'", False),
        ('SELECT "ORDER BY c" FROM t -- ORDER BY a', False),
        ("SELECT a FROM t WHERE b = '(' AND c IN (SELECT d FROM u ORDER BY d)", False),
        ("SELECT order_by FROM t", False),
    ],
)
def test_only_the_outermost_order_counts(sql: str, ordered: bool) -> None:
    assert orders(sql) == ordered


def test_a_query_is_put_on_one_line_with_its_texts_left_alone() -> None:
    assert one_line("SELECT a, -- the first\n  'two\n lines; --' FROM t /* all\n */ ;\n") == (
        "SELECT a, 'two\n lines; --' FROM t"
    )


@pytest.mark.parametrize(
    ("completion", "query"),
    [
        (" title FROM books\n", "SELECT title FROM books"),
        (" title FROM books\nQuestion: next", "SELECT title FROM books"),
        ("* FROM books", "SELECT * FROM books"),
        ("", ""),
        ("\n title FROM books", ""),
        ("   ", ""),
    ],
)
def test_the_query_is_the_completion_s_first_line(completion: str, query: str) -> None:
    assert answer_query(completion) == query
