"""The kinds of questions, in three levels, with what a careless reader would answer to each.

A template takes a `Draw` (a domain and rows to take values from) and gives a `Draft`: the question, its reference,
and wrong queries that must not pass. `generator.py` checks the draft on three row sets and keeps or drops it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from openrl_recipes.text_to_sql.domains import Category, Domain, Number
from openrl_recipes.text_to_sql.sandbox import Row


@dataclass(frozen=True, slots=True)
class Draft:
    """A question before its checks.

    `wrong` are queries that a careless reader might write and that must not pass; leaving out `where` is always one.
    `ties` lists what a LIMIT sorts by, one row more than the LIMIT keeps. `joins`: it needs the second table.
    """

    question: str
    sql: str
    where: str = ""
    tail: str = ""
    wrong: tuple[str, ...] = ()
    ties: str = ""
    joins: bool = False

    @property
    def gold(self) -> str:
        return f"SELECT {self.sql}{self.where}{self.tail}"

    @property
    def traps(self) -> tuple[str, ...]:
        return (*self.wrong, f"SELECT {self.sql}{self.tail}") if self.where else self.wrong


@dataclass(frozen=True, slots=True)
class Draw:
    """Everything a template may use: a domain, one of its row sets to take values from, and the random source."""

    rng: random.Random
    domain: Domain
    rows: tuple[Row, ...]
    details: tuple[Row, ...]

    def category(self) -> Category:
        return self.rng.choice(self.domain.categories)

    def number(self) -> Number:
        return self.rng.choice(self.domain.numbers)

    def value(self, column: Category | Number) -> str:
        """A value that stands in `column`, as a question writes it."""
        return self.values(column)[0]

    def values(self, *columns: Category | Number) -> list[str]:
        """What one row holds in these columns."""
        row = self.rng.choice(self.rows)
        return [str(row[self.domain.columns.index(column.column)]) for column in columns]

    def say(self, *wordings: str) -> str:
        return self.rng.choice(wordings)

    @property
    def names(self) -> str:
        """`title FROM books`"""
        return f"{self.domain.name} FROM {self.domain.table}"

    @property
    def joined(self) -> str:
        """`books JOIN shelves USING (genre)`"""
        return f"{self.domain.table} JOIN {self.domain.detail.table} USING ({self.domain.detail.key})"


Template = Callable[[Draw], Draft]

_AGGREGATES = [("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN"), ("total", "SUM")]
_ORDERS = [("highest", "DESC"), ("lowest", "ASC")]
_SIGNS = [("above", ">"), ("over", ">"), ("below", "<"), ("under", "<")]
_FLIPPED = {"<": ">", ">": "<", "ASC": "DESC", "DESC": "ASC"}


# ------------------------------------------------------------------------------------------------------------------
# Level 1: one condition, or one aggregate over the whole table


def _filter(d: Draw) -> Draft:
    c, v = (cat := d.category()).column, d.value(cat)
    question = d.say(
        f"List the {d.domain.name} of every {d.domain.singular} whose {c} is {v}.",
        f"Which {d.domain.plural} have the {c} {v}? Give the {d.domain.name}.",
        f"What is the {d.domain.name} of each {d.domain.singular} with {c} {v}?",
    )
    return Draft(question, d.names, f" WHERE {c} = '{v}'")


def _excluded(d: Draw) -> Draft:
    c, v = (cat := d.category()).column, d.value(cat)
    question = d.say(
        f"List the {d.domain.name} of every {d.domain.singular} whose {c} is not {v}.",
        f"Which {d.domain.plural} have another {c} than {v}? Give the {d.domain.name}.",
    )
    return Draft(question, d.names, f" WHERE {c} <> '{v}'")


def _compare(d: Draw) -> Draft:
    n, v = (num := d.number()).column, d.value(num)
    word, sign = d.rng.choice(_SIGNS)
    question = d.say(
        f"Which {d.domain.plural} have a {n} {word} {v}? Give the {d.domain.name}.",
        f"List the {d.domain.name} of every {d.domain.singular} with a {n} {word} {v}.",
    )
    wrong = (f"SELECT {d.names} WHERE {n} {_FLIPPED[sign]} {v}", f"SELECT {d.names} WHERE {n} {sign}= {v}")
    return Draft(question, d.names, f" WHERE {n} {sign} {v}", wrong=wrong)


def _count(d: Draw) -> Draft:
    c, v = (cat := d.category()).column, d.value(cat)
    question = d.say(
        f"How many {d.domain.plural} have the {c} {v}?",
        f"Count the {d.domain.plural} whose {c} is {v}.",
    )
    return Draft(question, f"COUNT(*) FROM {d.domain.table}", f" WHERE {c} = '{v}'")


def _aggregate(d: Draw) -> Draft:
    n, (word, function) = d.number().column, d.rng.choice(_AGGREGATES)
    question = d.say(
        f"What is the {word} {n} of all {d.domain.plural}?",
        f"Find the {word} {n} over all {d.domain.plural}.",
    )
    return Draft(question, f"{function}({n}) FROM {d.domain.table}", wrong=(f"SELECT {n} FROM {d.domain.table}",))


def _different(d: Draw) -> Draft:
    c = d.category().column
    question = d.say(
        f"List each different {c} of the {d.domain.plural}.",
        f"Which values of {c} occur among the {d.domain.plural}? List each once.",
    )
    return Draft(question, f"DISTINCT {c} FROM {d.domain.table}", wrong=(f"SELECT {c} FROM {d.domain.table}",))


# ------------------------------------------------------------------------------------------------------------------
# Level 2: two things at once


def _aggregate_where(d: Draw) -> Draft:
    cat, n, (word, function) = d.category(), d.number().column, d.rng.choice(_AGGREGATES)
    c, v = cat.column, d.value(cat)
    question = d.say(
        f"What is the {word} {n} of {d.domain.plural} whose {c} is {v}?",
        f"Find the {word} {n} among {d.domain.plural} with {c} {v}.",
    )
    wrong = (f"SELECT {n} FROM {d.domain.table} WHERE {c} = '{v}'",)
    return Draft(question, f"{function}({n}) FROM {d.domain.table}", f" WHERE {c} = '{v}'", wrong=wrong)


def _two_conditions(d: Draw) -> Draft:
    cat, num, (word, sign) = d.category(), d.number(), d.rng.choice([("above", ">"), ("below", "<")])
    c, n = cat.column, num.column
    v, limit = d.values(cat, num)
    question = d.say(
        f"Which {d.domain.plural} have the {c} {v} and a {n} {word} {limit}? Give the {d.domain.name}.",
        f"List the {d.domain.name} of every {d.domain.singular} whose {c} is {v} and whose {n} is {word} {limit}.",
    )
    first, second = f"{c} = '{v}'", f"{n} {sign} {limit}"
    near = f"{first} AND {n} {sign}= {limit}"
    wrong = tuple(f"SELECT {d.names} WHERE {w}" for w in (first, second, f"{first} OR {second}", near))
    return Draft(question, d.names, f" WHERE {first} AND {second}", wrong=wrong)


def _either(d: Draw) -> Draft:
    cat = d.category()
    c, v, w = cat.column, d.value(cat), d.value(cat)
    question = d.say(
        f"List the {d.domain.name} of every {d.domain.singular} whose {c} is {v} or {w}.",
        f"Which {d.domain.plural} have the {c} {v} or {w}? Give the {d.domain.name}.",
    )
    wrong = (f"SELECT {d.names} WHERE {c} = '{v}'", f"SELECT {d.names} WHERE {c} = '{w}'")
    return Draft(question, d.names, f" WHERE {c} IN ('{v}', '{w}')", wrong=wrong)


def _between(d: Draw) -> Draft:
    num = d.number()
    n, (low, high) = num.column, sorted((d.value(num), d.value(num)), key=float)
    question = d.say(
        f"Which {d.domain.plural} have a {n} from {low} to {high}? Give the {d.domain.name}.",
        f"List the {d.domain.name} of every {d.domain.singular} whose {n} is between {low} and {high}.",
    )
    conditions = (f"{n} >= {low}", f"{n} <= {high}", f"{n} > {low} AND {n} < {high}")
    wrong = tuple(f"SELECT {d.names} WHERE {condition}" for condition in conditions)
    return Draft(question, d.names, f" WHERE {n} BETWEEN {low} AND {high}", wrong=wrong)


def _extreme(d: Draw) -> Draft:
    n, (word, order) = d.number().column, d.rng.choice(_ORDERS)
    question = d.say(
        f"Which {d.domain.singular} has the {word} {n}? Give the {d.domain.name}.",
        f"What is the {d.domain.name} of the {d.domain.singular} with the {word} {n}?",
    )
    return _top(d, question, "", n, order, 1)


def _extreme_where(d: Draw) -> Draft:
    cat, n, (word, order) = d.category(), d.number().column, d.rng.choice(_ORDERS)
    c, v = cat.column, d.value(cat)
    question = d.say(
        f"Which {d.domain.singular} with {c} {v} has the {word} {n}? Give the {d.domain.name}.",
        f"Of all {d.domain.plural} whose {c} is {v}, give the {d.domain.name} of the one with the {word} {n}.",
    )
    return _top(d, question, f" WHERE {c} = '{v}'", n, order, 1)


def _count_different(d: Draw) -> Draft:
    c = d.category().column
    question = d.say(
        f"How many different values of {c} are there among the {d.domain.plural}?",
        f"Count the distinct values of {c} of all {d.domain.plural}.",
    )
    wrong = (f"SELECT COUNT({c}) FROM {d.domain.table}",)
    return Draft(question, f"COUNT(DISTINCT {c}) FROM {d.domain.table}", wrong=wrong)


def _two_columns(d: Draw) -> Draft:
    cat, n = d.category(), d.number().column
    c, v = cat.column, d.value(cat)
    question = d.say(
        f"Show the {d.domain.name} and {n} of every {d.domain.singular} whose {c} is {v}.",
        f"Give {d.domain.name} and {n} of all {d.domain.plural} with {c} {v}.",
    )
    wrong = (f"SELECT {d.names} WHERE {c} = '{v}'",)
    return Draft(question, f"{d.domain.name}, {n} FROM {d.domain.table}", f" WHERE {c} = '{v}'", wrong=wrong)


# ------------------------------------------------------------------------------------------------------------------
# Level 3: groups, orders, joins, queries in queries


def _count_by(d: Draw) -> Draft:
    c = d.category().column
    question = d.say(
        f"How many {d.domain.plural} are there for each {c}? Show the {c} and the count.",
        f"Show each {c} with its number of {d.domain.plural}.",
    )
    return Draft(question, f"{c}, COUNT(*) FROM {d.domain.table}", tail=f" GROUP BY {c}")


def _aggregate_by(d: Draw) -> Draft:
    c, n, (word, function) = d.category().column, d.number().column, d.rng.choice(_AGGREGATES)
    question = d.say(
        f"What is the {word} {n} for each {c}? Show the {c} and the {word} {n}.",
        f"Show each {c} with the {word} {n} of its {d.domain.plural}.",
    )
    sql = f"{c}, {function}({n}) FROM {d.domain.table}"
    wrong = (f"SELECT {c}, {n} FROM {d.domain.table} GROUP BY {c}",)
    return Draft(question, sql, tail=f" GROUP BY {c}", wrong=wrong)


def _top_k(d: Draw) -> Draft:
    n, k, (word, order) = d.number().column, d.rng.randint(2, 5), d.rng.choice(_ORDERS)
    question = d.say(
        f"Give the {d.domain.name} of the {k} {d.domain.plural} with the {word} {n}, {word} first.",
        f"Which {k} {d.domain.plural} have the {word} {n}? Give the {d.domain.name}, {word} first.",
    )
    return _top(d, question, "", n, order, k)


def _top(d: Draw, question: str, where: str, n: str, order: str, k: int) -> Draft:
    tail = f" ORDER BY {n} {order} LIMIT {k}"
    ties = f"SELECT {n} FROM {d.domain.table}{where} ORDER BY {n} {order} LIMIT {k + 1}"
    wrong = (f"SELECT {d.names}{where} ORDER BY {n} {_FLIPPED[order]} LIMIT {k}", f"SELECT {d.names}{where} LIMIT {k}")
    return Draft(question, d.names, where, tail, wrong, ties)


def _most_common(d: Draw) -> Draft:
    c, table = d.category().column, d.domain.table
    question = d.say(
        f"What is the most common {c} of the {d.domain.plural}?",
        f"Which {c} has the most {d.domain.plural}?",
    )
    by = f" GROUP BY {c} ORDER BY COUNT(*) DESC LIMIT "
    wrong = (f"SELECT MAX({c}) FROM {table}", f"SELECT MIN({c}) FROM {table}", f"SELECT {c} FROM {table} LIMIT 1")
    return Draft(question, f"{c} FROM {table}", "", f"{by}1", wrong, f"SELECT COUNT(*) FROM {table}{by}2")


def _having_count(d: Draw) -> Draft:
    c, k, table = d.category().column, d.rng.randint(2, 6), d.domain.table
    question = d.say(
        f"For which {c} are there more than {k} {d.domain.plural}?",
        f"Give every {c} that more than {k} {d.domain.plural} have.",
    )
    group = f"SELECT {c} FROM {table} GROUP BY {c}"
    wrong = (group, f"{group} HAVING COUNT(*) >= {k}", f"{group} HAVING COUNT(*) < {k}")
    return Draft(question, f"{c} FROM {table}", tail=f" GROUP BY {c} HAVING COUNT(*) > {k}", wrong=wrong)


def _having_average(d: Draw) -> Draft:
    c, num, table, (word, sign) = d.category().column, d.number(), d.domain.table, d.rng.choice(_SIGNS)
    n, v = num.column, d.value(num)
    question = d.say(
        f"For which {c} is the average {n} of the {d.domain.plural} {word} {v}?",
        f"Give every {c} whose {d.domain.plural} have an average {n} {word} {v}.",
    )
    group = f"SELECT {c} FROM {table} GROUP BY {c}"
    wrong = (group, f"SELECT {c} FROM {table} WHERE {n} {sign} {v}", f"{group} HAVING {n} {sign} {v}")
    wrong += (f"{group} HAVING MAX({n}) {sign} {v}", f"{group} HAVING MIN({n}) {sign} {v}")
    return Draft(question, f"{c} FROM {table}", tail=f" GROUP BY {c} HAVING AVG({n}) {sign} {v}", wrong=wrong)


def _join_filter(d: Draw) -> Draft:
    key, about, (condition, v) = d.domain.detail.key, d.domain.detail.about.column, _about(d)
    question = d.say(
        f"List the {d.domain.name} of every {d.domain.singular} whose {key} has the {about} {v}.",
        f"Which {d.domain.plural} have a {key} with {about} {v}? Give the {d.domain.name}.",
    )
    wrong = (f"SELECT {d.names}, {d.domain.detail.table} WHERE {condition}",)
    return Draft(question, f"{d.domain.name} FROM {d.joined}", f" WHERE {condition}", wrong=wrong, joins=True)


def _join_aggregate(d: Draw) -> Draft:
    key, about, (condition, v) = d.domain.detail.key, d.domain.detail.about.column, _about(d)
    n = d.number().column
    word, function = d.rng.choice([*_AGGREGATES, ("number", "COUNT")])
    counted = function == "COUNT"
    question = d.say(
        f"How many {d.domain.plural} have a {key} with {about} {v}?"
        if counted
        else f"What is the {word} {n} of {d.domain.plural} whose {key} has the {about} {v}?"
    )
    value = "COUNT(*)" if counted else f"{function}({n})"
    wrong = (
        f"SELECT {value} FROM {d.domain.table}, {d.domain.detail.table} WHERE {condition}",
        f"SELECT {value} FROM {d.domain.table}",
    )
    return Draft(question, f"{value} FROM {d.joined}", f" WHERE {condition}", wrong=wrong, joins=True)


def _join_group(d: Draw) -> Draft:
    key, about = d.domain.detail.key, d.domain.detail.about.column
    question = d.say(
        f"How many {d.domain.plural} are there for each {about}? Show the {about} and the count.",
        f"Show each {about} with its number of {d.domain.plural}.",
    )
    wrong = (
        f"SELECT {key}, COUNT(*) FROM {d.domain.table} GROUP BY {key}",
        f"SELECT {about}, COUNT(*) FROM {d.domain.detail.table} GROUP BY {about}",
    )
    return Draft(question, f"{about}, COUNT(*) FROM {d.joined}", tail=f" GROUP BY {about}", wrong=wrong, joins=True)


def _about(d: Draw) -> tuple[str, str]:
    """A condition on the second table, and its value as a question writes it."""
    v = str(d.rng.choice(d.details)[1])
    about = d.domain.detail.about
    return f"{about.column} = " + (f"'{v}'" if isinstance(about, Category) else v), v


def _above_average(d: Draw) -> Draft:
    n, table, (word, sign) = d.number().column, d.domain.table, d.rng.choice([("above", ">"), ("below", "<")])
    question = d.say(
        f"Which {d.domain.plural} have a {n} {word} the average? Give the {d.domain.name}.",
        f"List the {d.domain.name} of every {d.domain.singular} whose {n} is {word} the average {n}.",
    )
    average = f"(SELECT AVG({n}) FROM {table})"
    return Draft(
        question,
        d.names,
        f" WHERE {n} {sign} {average}",
        wrong=(f"SELECT {d.names} WHERE {n} {_FLIPPED[sign]} {average}",),
    )


def _same_as(d: Draw) -> Draft:
    c, name, table = d.category().column, d.domain.name, d.domain.table
    v = str(d.rng.choice(d.rows)[1])
    question = d.say(
        f"Which {d.domain.plural} have the same {c} as {v}? Give the {name}.",
        f"List the {name} of every {d.domain.singular} with the {c} of {v}.",
    )
    where = f" WHERE {c} = (SELECT {c} FROM {table} WHERE {name} = '{v}')"
    return Draft(question, d.names, where, wrong=(f"SELECT {d.names} WHERE {name} = '{v}'",))


_GROUPS_AND_ORDERS = (_count_by, _aggregate_by, _top_k, _most_common, _having_count, _having_average)
_JOINS_AND_NESTED = (_join_filter, _join_aggregate, _join_group, _above_average, _same_as)

TEMPLATES: dict[int, tuple[Template, ...]] = {
    1: (_filter, _excluded, _compare, _count, _aggregate, _different),
    2: (_aggregate_where, _two_conditions, _either, _between, _extreme, _extreme_where, _count_different, _two_columns),
    3: (*_GROUPS_AND_ORDERS, *_JOINS_AND_NESTED),
}
