"""The question generator: same seed, same questions; references pass, plausible wrong queries do not."""

from __future__ import annotations

import random

import pytest

from openrl_recipes.text_to_sql.domains import HELD_OUT, TRAIN, Domain
from openrl_recipes.text_to_sql.generator import (
    TEMPLATES,
    Draft,
    Draw,
    Item,
    create_table,
    draw_rows,
    is_fair,
    make_items,
)
from openrl_recipes.text_to_sql.scoring import run_query


@pytest.fixture(scope="module")
def drawn() -> list[Item]:
    return make_items("train", 150, seed=0)


def test_the_same_seed_gives_the_same_items_and_another_seed_others(drawn: list[Item]) -> None:
    assert make_items("train", 20, seed=0) == drawn[:20]
    assert make_items("train", 20, seed=1) != drawn[:20]


def test_held_out_questions_are_about_tables_that_training_never_shows(drawn: list[Item]) -> None:
    held_out = make_items("held-out", 60, seed=0)
    assert len(TRAIN) == 12
    assert len(HELD_OUT) == 4
    assert {item.domain.table for item in held_out} == {domain.table for domain in HELD_OUT}
    assert not {item.domain.table for item in held_out} & {item.domain.table for item in drawn}


def test_levels_come_in_turn_and_no_question_twice(drawn: list[Item]) -> None:
    assert [item.level for item in drawn[:6]] == [1, 2, 3, 1, 2, 3]
    assert len({item.prompt for item in drawn}) == len(drawn)


def test_every_reference_solves_its_question(drawn: list[Item]) -> None:
    assert all(item.solved_by(item.gold) for item in drawn)


def test_prompt_and_answer_together_spell_the_reference(drawn: list[Item]) -> None:
    for item in drawn:
        assert item.prompt.endswith("\nSQL: SELECT")
        assert item.prompt.startswith(f"Table {item.domain.schema}\nQuestion: ")
        assert item.answer.startswith(" ")
        assert item.answer.endswith("\n")
        assert (item.prompt + item.answer).endswith(f"SQL: {item.gold}\n")


def test_dropping_the_where_clause_or_one_condition_is_wrong(drawn: list[Item]) -> None:
    filtered = [item for item in drawn if " WHERE " in item.gold]
    assert filtered
    for item in filtered:
        head, condition = item.gold.split(" WHERE ")
        assert not item.solved_by(head)
        for one in condition.split(" AND ") if " AND " in condition else []:
            assert not item.solved_by(f"{head} WHERE {one}")


def test_no_constant_solves_a_question(drawn: list[Item]) -> None:
    for item in drawn:
        first = run_query(create_table(item.domain), item.databases[0], item.gold)[0]
        cells = ", ".join(f"'{cell}'" if isinstance(cell, str) else str(cell) for cell in first)
        assert not item.solved_by(f"SELECT {cells}")


def test_an_item_whose_limit_cuts_through_a_tie_is_not_fair() -> None:
    domain = TRAIN[0]
    rows = tuple((i, name, "poetry", "Hindi", 10, 2000 + i) for i, name in enumerate(domain.names[:5], 1))
    others = (tuple(reversed(rows)), rows[1:])
    draft = Draft(
        "Which book has the highest price? Give the title.",
        "title FROM books",
        tail=" ORDER BY price DESC LIMIT 1",
        ties="SELECT price FROM books ORDER BY price DESC LIMIT 2",
    )
    assert not is_fair(Item(domain, 2, draft.question, draft.gold, (rows, *others)), draft)


@pytest.mark.parametrize("domain", [*TRAIN, *HELD_OUT], ids=lambda domain: domain.table)
def test_every_template_runs_on_every_domain(domain: Domain) -> None:
    rng = random.Random(7)
    rows = draw_rows(rng, domain)
    assert 14 <= len(rows) <= 24
    for templates in TEMPLATES.values():
        for template in templates:
            draft = template(Draw(rng, domain, rows))
            assert isinstance(run_query(create_table(domain), rows, draft.gold), list)
            assert "  " not in draft.question
