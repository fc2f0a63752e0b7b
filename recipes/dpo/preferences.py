"""Pairs of answers of which one is better, made by rule: the fact alone against the fact in a sentence.

    What is the capital of Peru?     better: Lima     worse: The capital of Peru is Lima.

Both answers are right, so a pair teaches style and nothing else; whether the model still knows its facts is measured
apart. Held-out pairs are about other facts than those of training.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from openrl_recipes.shared.options import OptionError

_CAPITALS = (
    "Austria Vienna, Belgium Brussels, Bulgaria Sofia, Canada Ottawa, Chile Santiago, China Beijing, Croatia Zagreb, "
    "Cuba Havana, Denmark Copenhagen, Egypt Cairo, England London, Finland Helsinki, France Paris, Germany Berlin, "
    "Greece Athens, Hungary Budapest, Iceland Reykjavik, Iran Tehran, Iraq Baghdad, Ireland Dublin, Italy Rome, "
    "Jamaica Kingston, Japan Tokyo, Kenya Nairobi, Lebanon Beirut, Norway Oslo, Peru Lima, Poland Warsaw, "
    "Portugal Lisbon, Romania Bucharest, Russia Moscow, Serbia Belgrade, Spain Madrid, Sweden Stockholm, "
    "Syria Damascus, Thailand Bangkok, Turkey Ankara, Ukraine Kyiv, Venezuela Caracas, Vietnam Hanoi"
)
_OPPOSITES = (
    "hot cold, big small, fast slow, high low, old new, rich poor, dark light, wet dry, full empty, hard soft, "
    "early late, open closed, strong weak, good bad, clean dirty, happy sad, right wrong, black white, up down, "
    "left right, in out, first last, day night, north south, east west, love hate, war peace, true false, "
    "heavy light, long short, near far, loud quiet, thick thin, wide narrow, sweet sour, summer winter, "
    "begin end, buy sell, give take, push pull"
)
_YOUNG = (
    "cat kitten, dog puppy, cow calf, horse foal, sheep lamb, goat kid, pig piglet, hen chick, duck duckling, "
    "goose gosling, bear cub, lion cub, deer fawn, frog tadpole, kangaroo joey, swan cygnet, wolf pup, fox cub, "
    "elephant calf, eagle eaglet"
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of question: how it is asked, how a sentence answers it, and the facts: "subject answer, ..."."""

    question: str
    sentences: Sequence[str]
    facts: str


_KINDS = (
    Kind(
        "What is the capital of {0}?",
        ("The capital of {0} is {1}.", "The city of {1} is the capital of {0}.", "It is {1}, the capital of {0}."),
        _CAPITALS,
    ),
    Kind(
        "What is the opposite of {0}?",
        ('The opposite of "{0}" is "{1}".', "{1} is the opposite of {0}.", 'The word you want is "{1}".'),
        _OPPOSITES,
    ),
    Kind(
        "What is a young {0} called?",
        ("A young {0} is called a {1}.", "It is called a {1}.", "The word for a young {0} is {1}."),
        _YOUNG,
    ),
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A question with its better and its worse answer. `chosen` is also the fact itself."""

    question: str
    chosen: str
    rejected: str


def pairs(count: int) -> tuple[list[Pair], list[Pair]]:
    """All pairs to train on, and `count` held-out ones about other facts; the same every time, in a random order.

    Raises `OptionError` if there are not so many.
    """
    train: list[Pair] = []
    held_out: list[Pair] = []
    draw = random.Random("pairs")
    for kind in _KINDS:
        facts = [fact.split() for fact in kind.facts.split(", ")]
        draw.shuffle(facts)
        cut = round(len(facts) * 0.43)
        held_out += _of(kind, facts[:cut])
        train += _of(kind, facts[cut:])
    draw.shuffle(train)
    draw.shuffle(held_out)
    if not 1 <= count <= len(held_out):
        raise OptionError(f"--eval-pairs {count}: there are 1..{len(held_out)} held-out pairs")
    return train, held_out[:count]


def _of(kind: Kind, facts: Sequence[Sequence[str]]) -> list[Pair]:
    return [
        Pair(kind.question.format(subject), answer, _capital(sentence.format(subject, answer)))
        for subject, answer in facts
        for sentence in kind.sentences
    ]


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def is_brief(answer: str) -> bool:
    """Whether an answer is one or two words."""
    return 1 <= len(answer.split()) <= 2


def is_correct(answer: str, fact: str) -> bool:
    """Whether the fact stands in an answer, as a word of its own."""
    return fact.lower() in (word.strip(".,!?:;\"'*()").lower() for word in answer.split())
