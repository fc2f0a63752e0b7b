"""Tasks whose answers a program can check: sums, records, and grade-school word problems (GSM8K).

A verifiable reward is worth what its check is worth: whatever the check lets through, the policy will find. So each
`score` below says exactly what a right completion looks like; all else is wrong, and there is no credit for "nearly".

Problems to learn from and held-out ones are different problems, not the same in other words. Which are which is always
the same, so that runs with different seeds are tested alike.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from openrl_recipes.rlvr import gsm8k
from openrl_recipes.shared.options import OptionError

TaskName = Literal["arithmetic", "record", "gsm8k"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, the prompt that puts it behind worked examples, and what the completion is checked against."""

    question: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """Two sets of problems that share none, the check (completion, answer) -> reward, and the longest completion.

    A completion ends with its line.
    """

    train: Sequence[Problem]
    held_out: Sequence[Problem]
    score: Callable[[str, str], float]
    max_tokens: int

    def stream(self, seed: int) -> Iterator[Problem]:
        """Training problems without end: all of them in one random order, then all in another."""
        draw = random.Random(f"stream {seed}")
        while True:
            yield from draw.sample(self.train, len(self.train))


def load_task(name: TaskName, held_out: int, data: str = "") -> Task:
    """The task of that name with `held_out` problems to test on. `data`: where GSM8K is, if not to come from the hub.

    Raises `OptionError` if the data cannot be had or are too few.
    """
    if data and name != "gsm8k":
        raise OptionError(f"--data goes with --task gsm8k; the problems of {name} are made, not read")
    task = _word_problems(data) if name == "gsm8k" else _arithmetic() if name == "arithmetic" else _records()
    if not 1 <= held_out <= len(task.held_out):
        raise OptionError(f"--eval-items {held_out}: {name} has 1..{len(task.held_out)} problems to test on")
    return replace(task, held_out=task.held_out[:held_out])


def _dealt(things: Sequence[T]) -> tuple[list[T], list[T]]:
    """Things to make training problems of, and three in ten to test with: the same every time."""
    shuffled = random.Random("dealt").sample(things, len(things))
    cut = round(len(things) * 0.3)
    return shuffled[cut:], shuffled[:cut]


# ------------------------------------------------------------------------------------------------------------------
# Arithmetic: small sums, differences and products, the result between tags

_ARITHMETIC_PROMPT = (
    "Question: What is 14 + 5?\nAnswer: 14 + 5 = <answer>19</answer>\n"
    "Question: What is 3 * 4?\nAnswer: 3 * 4 = <answer>12</answer>\n"
    "Question: What is {}?\nAnswer:"
)
_SHOWN = {("+", 5, 14), ("*", 3, 4)}
Fact = tuple[str, int, int]


def score_number(completion: str, answer: str) -> float:
    """1 if the completion ends in the right number between answer tags, else 0.

    The model may write what it likes in front. But there is one pair of tags, so it cannot try several answers;
    digits alone between them, so it cannot hand the question back; and nothing behind them, so it has to stop.
    """
    text = completion.strip()
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return 0.0
    found = re.search(r"<answer>(-?(?:0|[1-9][0-9]*))</answer>\Z", text)
    return float(found is not None and found.group(1) == answer)


def _arithmetic() -> Task:
    """Sums and differences up to 20, products up to 12. Who learned 3 + 4 is not tested on 4 + 3."""
    facts: list[Fact] = [("+", a, b) for a in range(1, 21) for b in range(a, 21)]
    facts += [("*", a, b) for a in range(2, 13) for b in range(a, 13)]
    facts += [("-", a, b) for a in range(2, 21) for b in range(1, a)]
    train, test = _dealt([fact for fact in facts if fact not in _SHOWN])
    return Task(_sums(train), _sums(test), score_number, max_tokens=16)


def _sums(facts: Sequence[Fact]) -> list[Problem]:
    """Each fact as a problem, sums and products both ways round; in a random order, so that any part is fair."""
    turned = [(sign, b, a) for sign, a, b in facts if sign != "-" and a != b]
    result = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
    questions = [(f"{a} {sign} {b}", str(result[sign](a, b))) for sign, a, b in [*facts, *turned]]
    problems = [Problem(text, _ARITHMETIC_PROMPT.format(text), answer) for text, answer in questions]
    return random.Random("sums").sample(problems, len(problems))


# ------------------------------------------------------------------------------------------------------------------
# Records: a sentence in, JSON with a fixed form out

_RECORD_PROMPT = 'Text: Ruth is a nurse from Oslo. She is 47.\nJSON: {{"name": "Ruth", "age": 47}}\nText: {}\nJSON:'
_SENTENCES = (
    "{name} is {age} years old and lives at number {other}.",
    "With {age} years, {name} is the oldest of {other}.",
    "{name}, who has {other} cousins, is {age}.",
    "In room {other} we met {name}, aged {age}.",
    "{name} turned {age} on day {other} of the trip.",
)
_NAMES = (
    "Ada Amir Anna Ben Bruno Carl Cleo Dana David Elif Emma Erik Eva Farid Felix Fiona Georg Grace Hana Hugo Ida Igor "
    "Iris Ivan Jade Jan Jonas Julia Kai Karin Kofi Lars Lea Leo Lina Luca Mara Marco Maya Mia Milo Nadia Nico Nina "
    "Nora Olaf Olga Omar Oscar Paul Petra Rafi Rosa Sam Sara Simon Sofia Tara Theo Tim Uma Vera Wim Yara Yusuf Zoe"
)


def score_record(completion: str, answer: str) -> float:
    """1 if the completion is a JSON object with exactly the keys and values of `answer`, else 0.

    Types count (47 is neither "47" nor 47.0), and a key that stands there twice is no way to try two values.
    """
    text = completion.strip()
    if len(text) > 200:  # long before nesting or digits could trouble the parser
        return 0.0
    try:
        found = json.loads(text, object_pairs_hook=_Pairs)
    except ValueError:
        return 0.0
    wanted = json.loads(answer, object_pairs_hook=_Pairs)
    return float(isinstance(found, _Pairs) and repr(sorted(found)) == repr(sorted(wanted)))


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as its pairs, repeated keys and all."""


def _records() -> Task:
    """People, each in several sentences; those of the test have other names, and none is the Ruth of the prompt."""
    names, others = _dealt(_NAMES.split())
    return Task(_people(names, 1000), _people(others, 400), score_record, max_tokens=32)


def _people(names: Sequence[str], count: int) -> list[Problem]:
    draw = random.Random("people")
    problems: dict[Problem, None] = {}  # a set that keeps the order
    while len(problems) < count:
        name, (age, other) = draw.choice(names), draw.sample(range(10, 100), 2)
        text = draw.choice(_SENTENCES).format(name=name, age=age, other=other)
        problems[Problem(text, _RECORD_PROMPT.format(text), json.dumps({"name": name, "age": age}))] = None
    return list(problems)


# ------------------------------------------------------------------------------------------------------------------
# GSM8K


def _word_problems(data: str) -> Task:
    train, test = (
        [Problem(question, gsm8k.PROMPT.format(question), result) for question, result in rows]
        for rows in gsm8k.read(data)
    )
    return Task(train, test, gsm8k.score, max_tokens=256)
