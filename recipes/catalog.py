"""The recipes that come with OpenRL, for `openrl recipe list`. Each module has `Options` and `main(options)`."""

from __future__ import annotations

from dataclasses import dataclass

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Recipe:
    """`module` is run as `python -m MODULE`; `model` is what it wants by default; `minutes` on two CPU cores."""

    name: str
    summary: str
    module: str
    model: str = SMOL
    minutes: int = 0


RECIPES = (
    Recipe(
        "pig_latin",
        "The gentlest fine-tuning (SFT): a rule makes the data.",
        "openrl_recipes.pig_latin.train",
        minutes=2,
    ),
    Recipe(
        "text_to_sql",
        "Questions to SQL, scored by running it: SFT, then GRPO.",
        "openrl_recipes.text_to_sql.train",
        minutes=13,
    ),
    Recipe("rlvr", "Rewards that a program can check, without any SFT: GRPO.", "openrl_recipes.rlvr.train", minutes=4),
    Recipe(
        "distill", "A small student learns from what a teacher finds likely.", "openrl_recipes.distill.train", minutes=3
    ),
    Recipe(
        "dpo",
        "From pairs of better and worse answers, by a custom loss.",
        "openrl_recipes.dpo.train",
        minutes=2,
    ),
)


def find(name: str) -> Recipe | None:
    """The recipe of a name; `-` and `_` are alike."""
    return next((recipe for recipe in RECIPES if recipe.name == name.replace("-", "_")), None)
