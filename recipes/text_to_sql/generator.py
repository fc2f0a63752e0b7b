"""Draws text-to-SQL questions with their reference queries, from a seed; needs no data set.

A question is worth asking only if a wrong query does not pass by luck. So an item is kept only when its reference
returns rows, the plausible wrong queries (WHERE dropped, one condition of two dropped, a join without its condition,
`SELECT column FROM table`) do not pass, a LIMIT cuts through no tie, and the result is not the same constant on all
of its databases.

Print a few: `python -m openrl_recipes.text_to_sql.generator`
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

from openrl_recipes.text_to_sql.domains import HELD_OUT, TRAIN, VALIDATION, Category, Domain, Number
from openrl_recipes.text_to_sql.item import Item
from openrl_recipes.text_to_sql.sandbox import Database, QueryError, Row, Table, same_result
from openrl_recipes.text_to_sql.scoring import Reference
from openrl_recipes.text_to_sql.templates import TEMPLATES, Draft, Draw

__all__ = ["Item", "Split", "items", "make_items"]

Split = Literal["train", "validation", "held-out"]
DOMAINS: dict[Split, tuple[Domain, ...]] = {"train": TRAIN, "validation": VALIDATION, "held-out": HELD_OUT}
DATABASES = 3  # a query must be right on all of them

# The second table is shown where the question needs it, and beside some others, so that it does not tell the answer.
_SHOWN_BESIDE = 0.3


def items(split: Split, seed: int) -> Iterator[Item]:
    """Questions without end, no two alike, levels in turn. The same split and seed give the same ones always."""
    rng = random.Random(f"text-to-sql/{split}/{seed}")
    seen: set[str] = set()
    while True:
        for level in TEMPLATES:
            item = _draw_item(rng, rng.choice(DOMAINS[split]), level)
            while item.prompt in seen:
                item = _draw_item(rng, rng.choice(DOMAINS[split]), level)
            seen.add(item.prompt)
            yield item


def make_items(split: Split, count: int, seed: int) -> list[Item]:
    """The first `count` of `items`."""
    return [item for item, _ in zip(items(split, seed), range(count), strict=False)]


def _draw_item(rng: random.Random, domain: Domain, level: int) -> Item:
    """Draws until a question is fair."""
    while True:
        rows = [draw_rows(rng, domain) for _ in range(DATABASES)]
        details = [draw_details(rng, domain) for _ in range(DATABASES)]
        draft = rng.choice(TEMPLATES[level])(Draw(rng, domain, rows[0], details[0]))
        shown = draft.joins or (level > 1 and rng.random() < _SHOWN_BESIDE)
        item = make_item(domain, level, draft, rows, details if shown else [])
        if is_fair(item, draft, lazy_queries(domain)):
            return item


def make_item(
    domain: Domain, level: int, draft: Draft, rows: list[tuple[Row, ...]], details: list[tuple[Row, ...]]
) -> Item:
    """An item on the given row sets; with the second table if there are `details`, one set for each of `rows`."""
    schemas = [domain.schema] + ([domain.detail.schema] if details else [])
    databases = tuple(
        Database(tuple(map(_table, schemas, sets)))
        for sets in (zip(rows, details, strict=True) if details else zip(rows, strict=True))
    )
    shown = "\n".join(f"Table {schema}" for schema in schemas)
    return Item(domain.table, level, shown, draft.question, draft.gold, databases)


def _table(schema: str, rows: tuple[Row, ...]) -> Table:
    return Table(schema.split("(", 1)[0], f"CREATE TABLE {schema}", rows)


# ------------------------------------------------------------------------------------------------------------------
# Rows


def draw_rows(rng: random.Random, domain: Domain) -> tuple[Row, ...]:
    """14 to 24 rows. Each set uses only some of a category's values, so that counting them is no constant."""
    size = rng.randint(14, 24)
    names = rng.sample(domain.names, size)
    texts = [rng.choices(rng.sample(c.values, rng.randint(2, len(c.values))), k=size) for c in domain.categories]
    numbers = [[_number(rng, n) for _ in range(size)] for n in domain.numbers]
    return tuple(zip(range(1, size + 1), names, *texts, *numbers, strict=True))


def draw_details(rng: random.Random, domain: Domain) -> tuple[Row, ...]:
    """A row of the second table for each value of the category that it is about, of at least two kinds."""
    about, detail = domain.detail.about, domain.detail
    keys = next(c.values for c in domain.categories if c.column == detail.key)
    while True:
        values = [rng.choice(about.values) if isinstance(about, Category) else _number(rng, about) for _ in keys]
        if len(set(values)) > 1:
            return tuple(zip(keys, values, strict=True))


def _number(rng: random.Random, number: Number) -> int | float:
    steps = round((number.high - number.low) / number.step)
    value = number.low + number.step * rng.randint(0, steps)
    return round(value, 2) if isinstance(value, float) else value


# ------------------------------------------------------------------------------------------------------------------
# Checks


def lazy_queries(domain: Domain) -> list[str]:
    """What a policy tries when it has stopped reading the question."""
    name, table = domain.name, domain.table
    return [f"SELECT {what} FROM {table}" for what in (name, "COUNT(*)", "*")] + [f"SELECT {name} FROM {table} LIMIT 1"]


def is_fair(item: Item, draft: Draft, lazy: list[str]) -> bool:
    """Whether only a right query can be expected to pass on the item's databases."""
    try:
        with Reference(item.gold, item.databases) as reference:
            return (
                _says_something(reference.results)
                and not any(reference.solved_by(trap) for trap in (*draft.traps, *lazy))
                and (not draft.ties or all(_all_different(rows) for rows in reference.run(draft.ties)))
            )
    except QueryError:
        return False


def _says_something(results: list[list[Row]]) -> bool:
    """Rows everywhere, not a lone zero or NULL, and not the same ones everywhere: a constant would do for those."""
    if any(not result or result in ([(0,)], [(None,)]) for result in results):
        return False
    return not all(same_result(results[0], other, ordered=False) for other in results[1:])


def _all_different(rows: list[Row]) -> bool:
    return len(set(rows)) == len(rows)


if __name__ == "__main__":
    for shown in make_items("train", 39, 0):
        print(f"[level {shown.level}] {shown.prompt}|{shown.answer}")
