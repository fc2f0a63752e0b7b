"""Execution match: right queries pass, lucky and hostile ones do not."""

from __future__ import annotations

import time

import pytest

from openrl_recipes.text_to_sql.scoring import (
    DEADLINE_SECONDS,
    QueryError,
    answer_query,
    execution_match,
    run_query,
    same_result,
)

CREATE = "CREATE TABLE books(id INTEGER, title TEXT, genre TEXT, price INTEGER)"
ONE = ((1, "Dust", "poetry", 10), (2, "Salt", "history", 30), (3, "Rain", "poetry", 20))
TWO = ((1, "Moss", "history", 5), (2, "Iron", "poetry", 40))
THREE = ((1, "Fern", "poetry", 7), (2, "Opal", "poetry", 9), (3, "Loam", "history", 9), (4, "Silt", "drama", 1))
DATABASES = (ONE, TWO, THREE)


def match(gold: str, answer: str) -> bool:
    return execution_match(CREATE, DATABASES, gold, answer)


@pytest.mark.parametrize(
    "answer",
    [
        "SELECT title FROM books WHERE genre = 'poetry'",
        "select b.title from books b where b.genre like 'poetry' order by title desc",
        "SELECT title FROM books WHERE genre IN ('poetry');",
        "WITH p AS (SELECT * FROM books WHERE genre = 'poetry') SELECT title FROM p",
    ],
)
def test_other_wordings_of_the_same_query_match(answer: str) -> None:
    assert match("SELECT title FROM books WHERE genre = 'poetry'", answer)


@pytest.mark.parametrize("answer", ["", " ", ";", " ; \n", "--", "/* nothing */", "SELECT", "SELECT ;"])
def test_text_without_a_query_never_matches(answer: str) -> None:
    assert not match("SELECT title FROM books", answer)


@pytest.mark.parametrize(
    "answer",
    [
        "SELECT 2",  # right on the first database only
        "SELECT COUNT(*) FROM books WHERE price < 25",
        "SELECT COUNT(DISTINCT genre) FROM books",
    ],
)
def test_answers_that_are_right_on_one_database_by_luck_do_not_match(answer: str) -> None:
    gold = "SELECT COUNT(*) FROM books WHERE genre = 'poetry'"
    assert execution_match(CREATE, (ONE,), gold, answer)
    assert not match(gold, answer)


def test_two_empty_results_do_not_match() -> None:
    nothing = "SELECT title FROM books WHERE price > 1000"
    assert run_query(CREATE, ONE, nothing) == []
    assert not match(nothing, nothing)


def test_no_databases_prove_nothing() -> None:
    assert not execution_match(CREATE, (), "SELECT 1", "SELECT 1")


def test_rows_are_a_multiset_unless_the_reference_orders_them() -> None:
    assert match("SELECT genre FROM books", "SELECT genre FROM books ORDER BY price DESC")
    assert not match("SELECT genre FROM books", "SELECT DISTINCT genre FROM books")
    assert not match("SELECT title FROM books ORDER BY price", "SELECT title FROM books ORDER BY price DESC")


def test_columns_must_come_in_the_order_asked_for() -> None:
    assert not match("SELECT title, price FROM books", "SELECT price, title FROM books")
    assert not match("SELECT title FROM books", "SELECT * FROM books")


def test_numbers_match_by_value_and_text_does_not_pass_for_a_number() -> None:
    assert same_result([(2,)], [(2.0,)], ordered=False)
    assert same_result([(0.1 + 0.2,)], [(0.3,)], ordered=True)
    assert not same_result([(2,)], [("2",)], ordered=False)
    assert not same_result([(None,)], [(0,)], ordered=False)


@pytest.mark.parametrize(
    "hostile",
    [
        "DROP TABLE books",
        "DELETE FROM books",
        "INSERT INTO books VALUES (9, 'x', 'y', 1)",
        "UPDATE books SET price = 0",
        "CREATE TABLE t(x)",
        "ATTACH DATABASE 'stolen.db' AS s",
        "PRAGMA query_only = OFF",
        "VACUUM INTO 'copy.db'",
        "SELECT load_extension('evil')",
        "SELECT randomblob(1000000000)",
        "SELECT zeroblob(1000000000)",
        "SELECT printf('%1000000000d', 1)",
        "SELECT hex(zeroblob(1000))",
        "SELECT * FROM pragma_database_list",
        "SELECT title FROM books; DROP TABLE books",
        "SELECT title FROM books\0",
        "SELECT \ud800",
        "SELECT " + "(" * 500 + "1" + ")" * 500,
        "SELECT '" + "x" * 5000 + "'",
    ],
)
def test_hostile_queries_are_refused(hostile: str) -> None:
    with pytest.raises(QueryError):
        run_query(CREATE, ONE, hostile)


@pytest.mark.parametrize(
    "endless",
    [
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
        "SELECT COUNT(*) FROM " + ", ".join(f"books b{i}" for i in range(20)),
    ],
)
def test_endless_queries_end_at_the_deadline(endless: str) -> None:
    started = time.monotonic()
    with pytest.raises(QueryError, match="interrupted"):
        run_query(CREATE, ONE, endless)
    assert DEADLINE_SECONDS <= time.monotonic() - started < 20 * DEADLINE_SECONDS


def test_results_longer_than_a_thousand_rows_are_refused() -> None:
    many = "SELECT a.id FROM " + ", ".join(f"books {name}" for name in "abcdefg")
    with pytest.raises(QueryError, match="1000 rows"):
        run_query(CREATE, ONE, many)


def test_values_cannot_grow_without_bound() -> None:
    doubling = (
        "WITH RECURSIVE s(t) AS (SELECT 'xxxxxxxx' UNION ALL SELECT t || t FROM s) SELECT length(t) FROM s LIMIT 40"
    )
    with pytest.raises(QueryError, match="too big"):
        run_query(CREATE, ONE, doubling)


def test_the_database_is_fresh_for_every_query() -> None:
    with pytest.raises(QueryError):
        run_query(CREATE, ONE, "DELETE FROM books")
    assert run_query(CREATE, ONE, "SELECT COUNT(*) FROM books") == [(3,)]


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
