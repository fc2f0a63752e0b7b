"""The unmodified tinker-cookbook against the real server: one supervised, one RL recipe, and its check of logprobs.

Skipped without its environment: `make cookbook-env` makes it, `make cookbook` runs all there is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cookbook.recipes import RECIPES, VALIDATE, Recipe
from cookbook.run import run
from cookbook.setting import Cookbook, Kitchen, kitchen

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kitchen]:
    cookbook = Cookbook.at(Path(sys.prefix) / "cookbook")
    if cookbook is None:
        pytest.skip("no cookbook here: make cookbook-env")
    with kitchen(cookbook, tmp_path_factory.mktemp("cookbook") / "kitchen") as setting:
        yield setting


def recipe(name: str) -> Recipe:
    return next(recipe for recipe in (*RECIPES, VALIDATE) if recipe.name == name)


@pytest.mark.parametrize(
    "name",
    [
        "tests.validate_temperature_logprobs",
        "chat_sl.train",  # supervised: data set and tokenizer come from the hub look-alike
        "math_rl.train",  # RL: sequence ids and provenance go with the data
        "math_rl.train (as it is)",  # its own loss is refused in words
    ],
)
def test_a_recipe_ends_as_it_should(setting: Kitchen, name: str) -> None:
    outcome = run(setting, recipe(name))
    assert outcome.as_expected, outcome.last_line
