"""Draws text-to-SQL questions with their reference queries, from a seed; needs no data set.

A question is worth asking only if a wrong query does not pass by luck. So an item is kept only when its reference
returns rows, the plausible wrong queries (WHERE dropped, one condition of two dropped) do not pass, a LIMIT cuts
through no tie, and the result is not the same constant on all of its databases.

Print a few: `python -m openrl_recipes.text_to_sql.generator`
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from openrl_recipes.text_to_sql.domains import HELD_OUT, TRAIN, Category, Domain, Number
from openrl_recipes.text_to_sql.scoring import Row, execution_match, run_query, same_result

Split = Literal["train", "held-out"]
DATABASES = 3  # a query must be right on all of them


@dataclass(frozen=True, slots=True)
class Item:
    """A question about one domain. `gold` is a whole query; `databases` are the row sets that answers run on."""

    domain: Domain
    level: int  # 1 easy .. 3 hard
    question: str
    gold: str
    databases: tuple[tuple[Row, ...], ...]

    @property
    def prompt(self) -> str:
        """What the model reads. It ends in SELECT: after a bare `SQL:` small models first write a newline."""
        return f"Table {self.domain.schema}\nQuestion: {self.question}\nSQL: SELECT"

    @property
    def answer(self) -> str:
        """What the model should write; the newline ends it."""
        return self.gold.removeprefix("SELECT") + "\n"

    def solved_by(self, query: str) -> bool:
        """Whether `query` gives the reference's result on every database."""
        return execution_match(create_table(self.domain), self.databases, self.gold, query)


@dataclass(frozen=True, slots=True)
class Draft:
    """A question before its checks.

    `wrong` are queries that a careless reader might write and that must not pass; leaving out `where` is always one.
    `ties` lists what a LIMIT sorts by, one row more than the LIMIT keeps.
    """

    question: str
    sql: str
    where: str = ""
    tail: str = ""
    wrong: tuple[str, ...] = ()
    ties: str = ""

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

    def category(self) -> Category:
        return self.rng.choice(self.domain.categories)

    def number(self) -> Number:
        return self.rng.choice(self.domain.numbers)

    def value(self, column: str) -> Row:
        """A one-cell row: a value that stands in `column`."""
        return (self.rng.choice(self.rows)[self.domain.columns.index(column)],)

    def say(self, *wordings: str) -> str:
        return self.rng.choice(wordings)


# ------------------------------------------------------------------------------------------------------------------
# Rows


def create_table(domain: Domain) -> str:
    """The CREATE TABLE statement of a domain."""
    kinds = ["INTEGER", "TEXT", "TEXT", "TEXT", "INTEGER", "INTEGER"]
    columns = ", ".join(f"{column} {kind}" for column, kind in zip(domain.columns, kinds, strict=True))
    return f"CREATE TABLE {domain.table}({columns})"


def draw_rows(rng: random.Random, domain: Domain) -> tuple[Row, ...]:
    """14 to 24 rows. Each set uses only some of a category's values, so that counting them is no constant."""
    size = rng.randint(14, 24)
    names = rng.sample(domain.names, size)
    texts = [rng.choices(rng.sample(c.values, rng.randint(2, len(c.values))), k=size) for c in domain.categories]
    numbers = [[rng.randrange(n.low, n.high + 1, n.step) for _ in range(size)] for n in domain.numbers]
    return tuple(zip(range(1, size + 1), names, *texts, *numbers, strict=True))


# ------------------------------------------------------------------------------------------------------------------
# Level 1: one condition, or one aggregate over the whole table


def _filter(d: Draw) -> Draft:
    c, (v,) = (cat := d.category()), d.value(cat.column)
    question = d.say(
        f"List the {d.domain.name} of every {d.domain.singular} whose {c.column} is {v}.",
        f"Which {d.domain.plural} have the {c.column} {v}? Give the {d.domain.name}.",
        f"What is the {d.domain.name} of each {d.domain.singular} with {c.column} {v}?",
    )
    return Draft(question, f"{d.domain.name} FROM {d.domain.table}", f" WHERE {c.column} = '{v}'")


def _compare(d: Draw) -> Draft:
    n, (v,) = (num := d.number()), d.value(num.column)
    word, sign = d.rng.choice([("above", ">"), ("over", ">"), ("below", "<"), ("under", "<")])
    question = d.say(
        f"Which {d.domain.plural} have a {n.column} {word} {v}? Give the {d.domain.name}.",
        f"List the {d.domain.name} of every {d.domain.singular} with a {n.column} {word} {v}.",
    )
    return Draft(question, f"{d.domain.name} FROM {d.domain.table}", f" WHERE {n.column} {sign} {v}")


def _count(d: Draw) -> Draft:
    c, (v,) = (cat := d.category()), d.value(cat.column)
    question = d.say(
        f"How many {d.domain.plural} have the {c.column} {v}?",
        f"Count the {d.domain.plural} whose {c.column} is {v}.",
    )
    return Draft(question, f"COUNT(*) FROM {d.domain.table}", f" WHERE {c.column} = '{v}'")


_AGGREGATES = [("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN"), ("total", "SUM")]


def _aggregate(d: Draw) -> Draft:
    n, (word, function) = d.number(), d.rng.choice(_AGGREGATES)
    question = d.say(
        f"What is the {word} {n.column} of all {d.domain.plural}?",
        f"Find the {word} {n.column} over all {d.domain.plural}.",
    )
    return Draft(question, f"{function}({n.column}) FROM {d.domain.table}")


# ------------------------------------------------------------------------------------------------------------------
# Level 2: two things at once


def _aggregate_where(d: Draw) -> Draft:
    c, n, (word, function) = d.category(), d.number(), d.rng.choice(_AGGREGATES)
    (v,) = d.value(c.column)
    question = d.say(
        f"What is the {word} {n.column} of {d.domain.plural} whose {c.column} is {v}?",
        f"Find the {word} {n.column} among {d.domain.plural} with {c.column} {v}.",
    )
    return Draft(question, f"{function}({n.column}) FROM {d.domain.table}", f" WHERE {c.column} = '{v}'")


def _two_conditions(d: Draw) -> Draft:
    c, n = d.category(), d.number()
    (v,), (limit,) = d.value(c.column), d.value(n.column)
    word, sign = d.rng.choice([("above", ">"), ("below", "<")])
    question = d.say(
        f"Which {d.domain.plural} have the {c.column} {v} and a {n.column} {word} {limit}? Give the {d.domain.name}.",
        f"List the {d.domain.name} of every {d.domain.singular} whose {c.column} is {v} "
        f"and whose {n.column} is {word} {limit}.",
    )
    sql, first, second = f"{d.domain.name} FROM {d.domain.table}", f"{c.column} = '{v}'", f"{n.column} {sign} {limit}"
    wrong = (f"SELECT {sql} WHERE {first}", f"SELECT {sql} WHERE {second}")
    return Draft(question, sql, f" WHERE {first} AND {second}", wrong=wrong)


def _extreme(d: Draw) -> Draft:
    n, (word, order) = d.number(), d.rng.choice([("highest", "DESC"), ("lowest", "ASC")])
    question = d.say(
        f"Which {d.domain.singular} has the {word} {n.column}? Give the {d.domain.name}.",
        f"What is the {d.domain.name} of the {d.domain.singular} with the {word} {n.column}?",
    )
    return _top(d, question, n, order, 1)


def _distinct(d: Draw) -> Draft:
    c = d.category()
    question = d.say(
        f"How many different values of {c.column} are there among the {d.domain.plural}?",
        f"Count the distinct values of {c.column} of all {d.domain.plural}.",
    )
    wrong = (f"SELECT COUNT({c.column}) FROM {d.domain.table}",)
    return Draft(question, f"COUNT(DISTINCT {c.column}) FROM {d.domain.table}", wrong=wrong)


def _two_columns(d: Draw) -> Draft:
    c, n = d.category(), d.number()
    (v,) = d.value(c.column)
    question = d.say(
        f"Show the {d.domain.name} and {n.column} of every {d.domain.singular} whose {c.column} is {v}.",
        f"Give {d.domain.name} and {n.column} of all {d.domain.plural} with {c.column} {v}.",
    )
    return Draft(question, f"{d.domain.name}, {n.column} FROM {d.domain.table}", f" WHERE {c.column} = '{v}'")


# ------------------------------------------------------------------------------------------------------------------
# Level 3: groups and orders


def _count_by(d: Draw) -> Draft:
    c = d.category()
    question = d.say(
        f"How many {d.domain.plural} are there for each {c.column}? Show the {c.column} and the count.",
        f"Show each {c.column} with its number of {d.domain.plural}.",
    )
    return Draft(question, f"{c.column}, COUNT(*) FROM {d.domain.table}", tail=f" GROUP BY {c.column}")


def _aggregate_by(d: Draw) -> Draft:
    c, n, (word, function) = d.category(), d.number(), d.rng.choice(_AGGREGATES)
    question = d.say(
        f"What is the {word} {n.column} for each {c.column}? Show the {c.column} and the {word} {n.column}.",
        f"Show each {c.column} with the {word} {n.column} of its {d.domain.plural}.",
    )
    return Draft(question, f"{c.column}, {function}({n.column}) FROM {d.domain.table}", tail=f" GROUP BY {c.column}")


def _top_k(d: Draw) -> Draft:
    n, k, (word, order) = d.number(), d.rng.randint(2, 5), d.rng.choice([("highest", "DESC"), ("lowest", "ASC")])
    question = d.say(
        f"Give the {d.domain.name} of the {k} {d.domain.plural} with the {word} {n.column}, {word} first.",
        f"Which {k} {d.domain.plural} have the {word} {n.column}? Give the {d.domain.name}, {word} first.",
    )
    return _top(d, question, n, order, k)


def _top(d: Draw, question: str, n: Number, order: str, k: int) -> Draft:
    by = f" ORDER BY {n.column} {order} LIMIT "
    ties = f"SELECT {n.column} FROM {d.domain.table}{by}{k + 1}"
    return Draft(question, f"{d.domain.name} FROM {d.domain.table}", tail=f"{by}{k}", ties=ties)


def _most_common(d: Draw) -> Draft:
    c = d.category()
    question = d.say(
        f"What is the most common {c.column} of the {d.domain.plural}?",
        f"Which {c.column} has the most {d.domain.plural}?",
    )
    by = f" GROUP BY {c.column} ORDER BY COUNT(*) DESC LIMIT "
    ties = f"SELECT COUNT(*) FROM {d.domain.table}{by}2"
    return Draft(question, f"{c.column} FROM {d.domain.table}", tail=f"{by}1", ties=ties)


TEMPLATES: dict[int, tuple[Callable[[Draw], Draft], ...]] = {
    1: (_filter, _compare, _count, _aggregate),
    2: (_aggregate_where, _two_conditions, _extreme, _distinct, _two_columns),
    3: (_count_by, _aggregate_by, _top_k, _most_common),
}


# ------------------------------------------------------------------------------------------------------------------
# Drawing and checking


def items(split: Split, seed: int) -> Iterator[Item]:
    """Questions without end, no two alike, levels in turn. The same split and seed give the same ones always."""
    rng = random.Random(f"text-to-sql/{split}/{seed}")
    domains = TRAIN if split == "train" else HELD_OUT
    seen: set[str] = set()
    while True:
        for level in TEMPLATES:
            item = _draw_item(rng, rng.choice(domains), level)
            while item.prompt in seen:
                item = _draw_item(rng, rng.choice(domains), level)
            seen.add(item.prompt)
            yield item


def make_items(split: Split, count: int, seed: int) -> list[Item]:
    """The first `count` of `items`."""
    return [item for item, _ in zip(items(split, seed), range(count), strict=False)]


def _draw_item(rng: random.Random, domain: Domain, level: int) -> Item:
    while True:
        databases = tuple(draw_rows(rng, domain) for _ in range(DATABASES))
        draft = rng.choice(TEMPLATES[level])(Draw(rng, domain, databases[0]))
        item = Item(domain, level, draft.question, draft.gold, databases)
        if is_fair(item, draft):
            return item


def is_fair(item: Item, draft: Draft) -> bool:
    """Whether only a right query can be expected to pass on the item's databases."""
    results = [_run(item, rows, item.gold) for rows in item.databases]
    if any(not result or result in ([(0,)], [(None,)]) for result in results):
        return False
    if all(same_result(results[0], other, ordered=False) for other in results[1:]):
        return False  # the same constant would do
    if any(item.solved_by(trap) for trap in draft.traps):
        return False
    return not draft.ties or all(_all_different(_run(item, rows, draft.ties)) for rows in item.databases)


def _run(item: Item, rows: tuple[Row, ...], sql: str) -> list[Row]:
    return run_query(create_table(item.domain), rows, sql)


def _all_different(rows: list[Row]) -> bool:
    return len(set(rows)) == len(rows)


if __name__ == "__main__":
    for shown in make_items("train", 13, 0):
        print(f"[level {shown.level}] {shown.prompt}|{shown.answer}")
