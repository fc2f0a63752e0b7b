"""Small made-up data sets in the form of those that recipes load, as folders for the hub look-alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Splits = Mapping[str, tuple[Callable[[int], Row], int]]  # split -> a row by its number, and how many


def write_all(folder: Path) -> Path:
    """Write every data set to `folder/ORG/NAME`; returns `folder`."""
    for repo, configs in DATASETS.items():
        _write(folder / repo, configs)
    return folder


def write_conversations(path: Path, rows: int) -> Path:
    """A file of `{"messages": [...]}` lines."""
    path.write_text("".join(json.dumps({"messages": _dialogue(number)}) + "\n" for number in range(rows)))
    return path


def _write(folder: Path, configs: Mapping[str, Splits]) -> None:
    head = ["---", "configs:"]
    for config, splits in configs.items():
        head += [f"- config_name: {config}", "  data_files:"]
        for split, (row, count) in splits.items():
            file = folder / config / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row(number)) + "\n" for number in range(count)))
            head += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*head, "---", "Made up for tests.", ""]))


def _sum(number: int) -> tuple[int, int, int]:
    one, other = number % 97, number * 7 % 89
    return one, other, one + other


def _dialogue(number: int) -> list[Row]:
    one, other, total = _sum(number)
    return [
        {"role": "user", "content": f"What is {one} plus {other}?"},
        {"role": "assistant", "content": f"It is {total}."},
    ]


def _gsm8k(number: int) -> Row:
    one, other, total = _sum(number)
    return {
        "question": f"Ann has {one} apples and gets {other} more. How many has she?",
        "answer": f"{one} + {other} = {total}.\n#### {total}",
    }


def _no_robots(number: int) -> Row:
    messages = _dialogue(number)
    return {
        "prompt": messages[0]["content"],
        "prompt_id": str(number),
        "messages": messages,
        "category": "Open QA",
    }


def _problem(number: int) -> Row:
    one, other, total = _sum(number)
    return {
        "problem": f"Compute ${one} + {other}$. (problem {number})",
        "solution": f"The sum is $\\boxed{{{total}}}$.",
        "answer": str(total),
    }


def _deepmath(number: int) -> Row:
    one, other, total = _sum(number)
    return {"question": f"Compute ${one} + {other}$.", "final_answer": str(total)}


def _hh(number: int) -> Row:
    one, other, total = _sum(number)
    question = f"\n\nHuman: What is {one} plus {other}?\n\nAssistant:"
    return {"chosen": f"{question} It is {total}.", "rejected": f"{question} I do not know."}


def _thoughts(number: int) -> Row:
    user, assistant = _dialogue(number)
    return {
        "conversations": [
            {"from": "human", "value": user["content"]},
            {"from": "gpt", "value": assistant["content"]},
        ]
    }


def _science(number: int) -> Row:
    one, other, total = _sum(number)
    return {
        "question": f"How many atoms are {one} atoms and {other} atoms?",
        "choices": {"label": ["A", "B"], "text": [str(total), str(total + 1)]},
        "answerKey": "A",
        "domain": "Chemistry",
        "details": {"level": "L3"},
        "type": "mcq-2-choices",
    }


def _tool(number: int) -> Row:
    one, other, total = _sum(number)
    return {"instruction": f"Call add({one}, {other}).", "output": str(total)}


def _one_config(**splits: tuple[Callable[[int], Row], int]) -> Mapping[str, Splits]:
    return {"default": splits}


DATASETS: Mapping[str, Mapping[str, Splits]] = {
    "openai/gsm8k": {"main": {"train": (_gsm8k, 64), "test": (_gsm8k, 8)}},
    # Some of the cookbook's own tests take batches of 256, up to six of them.
    "HuggingFaceH4/no_robots": _one_config(train=(_no_robots, 1600), test=(_no_robots, 64)),
    "HuggingFaceH4/MATH-500": _one_config(test=(_problem, 8)),
    "EleutherAI/hendrycks_math": {"algebra": {"train": (_problem, 64), "test": (_problem, 16)}},
    "POLARIS-Project/Polaris-Dataset-53K": _one_config(train=(_problem, 64)),
    "zwhe99/DeepMath-103K": _one_config(train=(_deepmath, 64)),
    "allenai/tulu-3-sft-mixture": _one_config(train=(_no_robots, 1200)),
    "Anthropic/hh-rlhf": _one_config(train=(_hh, 600), test=(_hh, 1100)),
    "open-thoughts/OpenThoughts3-1.2M": _one_config(train=(_thoughts, 256)),
    "hicai-zju/SciKnowEval": _one_config(test=(_science, 64)),
    "tangqiaoyu/ToolAlpaca": _one_config(train=(_tool, 64)),
}
