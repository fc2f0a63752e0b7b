"""The reward of an answer: execution match, and, where one asks for them, shaping terms."""

from __future__ import annotations

from dataclasses import dataclass

from openrl_recipes.text_to_sql.scoring import Score


@dataclass(frozen=True, slots=True)
class Weights:
    """What each part of a score is worth. By default only being right pays.

    The other four are for experiments. In trials from the same start, a reward that also paid for running and for
    overlapping values took held-out accuracy from 34 to 25 %, match alone from 34 to 48 %: the policy collapsed to
    `SELECT column FROM table`, which always runs and shares some cells with the right result. With a bonus, watch
    `runs` and `match` apart: the first rising alone is that collapse.
    """

    match: float = 1.0
    parses: float = 0.0
    runs: float = 0.0
    columns: float = 0.0
    values: float = 0.0


def reward(score: Score, weights: Weights) -> float:
    """The weighted sum of the parts of a score."""
    return (
        weights.match * score.match
        + weights.parses * score.parses
        + weights.runs * score.runs
        + weights.columns * score.columns
        + weights.values * score.values
    )
