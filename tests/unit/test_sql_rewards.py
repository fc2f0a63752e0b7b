"""Rewards: only a match pays unless one asks for more."""

from __future__ import annotations

import pytest

from openrl_recipes.text_to_sql.rewards import Weights, reward
from openrl_recipes.text_to_sql.scoring import Score

NEAR = Score(match=False, parses=True, runs=True, columns=1.0, values=0.8)
RIGHT = Score(match=True, parses=True, runs=True, columns=1.0, values=1.0)
SHAPED = Weights(match=1.0, parses=0.05, runs=0.1, columns=0.1, values=0.2)


def test_by_default_a_query_that_only_runs_earns_nothing() -> None:
    assert reward(NEAR, Weights()) == 0
    assert reward(Score(error="no such column"), Weights()) == 0
    assert reward(RIGHT, Weights()) == 1


@pytest.mark.parametrize(
    ("score", "worth"),
    [
        (RIGHT, 1.45),
        (NEAR, 0.05 + 0.1 + 0.1 + 0.16),
        (Score(parses=True, error="no such column"), 0.05),
        (Score(error="syntax error"), 0),
    ],
)
def test_each_part_pays_its_weight(score: Score, worth: float) -> None:
    assert reward(score, SHAPED) == pytest.approx(worth)
