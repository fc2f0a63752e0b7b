"""GSM8K, grade-school word problems: from the Hugging Face hub, or from files that you have, with the same check.

A line of such a file is {"question": "...", "answer": "... #### 42"}: what stands behind #### is the result. Of a
folder, train.jsonl and test.jsonl are read; of a single file, every fifth question is kept to test on.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx

from openrl_recipes.shared.options import OptionError

HUB = "openai/gsm8k"
Row = tuple[str, str]  # a question and its result

PROMPT = (
    "Question: A box holds 6 pens. Mia has 4 boxes and gives away 5 pens. How many pens are left?\n"
    "Answer: The boxes hold 4 * 6 = 24 pens. 24 - 5 = 19 are left. #### 19\n"
    "Question: {}\nAnswer:"
)
_FORM = (
    'Give a .jsonl file with lines like {"question": "...", "answer": "... #### 42"}, '
    "or a folder with train.jsonl and test.jsonl."
)
_NUMBER = re.compile(r"\$?(-?(?:0|[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]*))\.?")


def score(completion: str, answer: str) -> float:
    """1 if the completion's only #### has the right number behind it and nothing more, else 0."""
    _, *behind = completion.split("####")
    return float(len(behind) == 1 and _number(behind[0]) == answer)


def _number(text: str) -> str | None:
    """A whole number as digits: 1,234 and $1234. are 1234. None if it is none, or not written in one of these ways."""
    found = _NUMBER.fullmatch(text.strip())
    return found.group(1).replace(",", "") if found else None


def read(data: str) -> tuple[list[Row], list[Row]]:
    """Questions to learn from and to test on; none of them is in both. Raises `OptionError` if they cannot be had."""
    train, test = _local(Path(data)) if data else _hub()
    tested = {question for question, _ in test}
    return [row for row in train if row[0] not in tested], test


def _local(path: Path) -> tuple[list[Row], list[Row]]:
    if path.is_dir():
        return _file(path / "train.jsonl"), _file(path / "test.jsonl")
    rows = list(dict(_file(path)).items())
    return [row for i, row in enumerate(rows) if i % 5], rows[::5]


def _file(path: Path) -> list[Row]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--data: {path} cannot be read ({error}). {_FORM}") from error
    return [_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _row(line: str, where: str) -> Row:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise OptionError(f"--data: {where}: not JSON ({error}). {_FORM}") from error
    return _parsed(record, where)


def _parsed(record: Any, where: str) -> Row:
    """Question, on one line, and result of a record with the dataset's two fields."""
    question, answer = (record.get(key) if isinstance(record, dict) else None for key in ("question", "answer"))
    number = _number(answer.rpartition("####")[2]) if isinstance(answer, str) and "####" in answer else None
    if not isinstance(question, str) or number is None:
        raise OptionError(
            f"--data: {where}: no question, or no answer that ends in '#### ' and a whole number. {_FORM}"
        )
    return " ".join(question.split()), number


def _hub() -> tuple[list[Row], list[Row]]:
    """The dataset's two splits, with the optional package `datasets`."""
    try:
        import datasets
    except ImportError:
        raise OptionError(
            f"--task gsm8k needs the package datasets: pip install 'openrl[hub]'. Or use --data. {_FORM}"
        ) from None
    try:
        splits: Any = datasets.load_dataset(HUB, "main")
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise OptionError(
            f"--task gsm8k: {HUB} cannot be had from the hub ({error}). Or use --data. {_FORM}"
        ) from error
    return _split(splits, "train"), _split(splits, "test")


def _split(splits: Any, name: str) -> list[Row]:
    return [_parsed(record, f"{HUB}, {name}, row {number}") for number, record in enumerate(splits[name])]
