"""The checks behind the rewards let no cheat through, and no problem is both learned from and tested on."""

from __future__ import annotations

import json
import re
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrl_recipes.rlvr import gsm8k
from openrl_recipes.rlvr.tasks import TaskName, load_task, score_number, score_record
from openrl_recipes.shared.options import OptionError

# ---- arithmetic ----


@pytest.mark.parametrize(
    "completion",
    [" 12 + 30 = <answer>42</answer>\n", "<answer>42</answer>", "First 12, then 30 more: <answer>42</answer>  "],
)
def test_a_right_number_between_tags_is_rewarded(completion: str) -> None:
    assert score_number(completion, "42") == 1


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "42",
        "12 + 30 = 42",
        "<answer>41</answer>",
        "<answer>42</answer><answer>42</answer>",
        "<answer>41</answer> <answer>42</answer>",
        "<answer>40 41 42 43</answer>",
        "<answer>41 or 42</answer>",
        "<answer>12 + 30</answer>",
        "<answer></answer>",
        "<answer> 42 </answer>",
        "<answer>042</answer>",
        "<answer>+42</answer>",
        "<answer>42.0</answer>",
        "<answer>4_2</answer>",
        "<answer>٤٢</answer>",
        "<answer>４２</answer>",
        "<answer>42",
        "42</answer>",
        "</answer>42<answer>",
        "<answer><answer>42</answer>",
        "<answer>42</answer></answer>",
        "<ANSWER>42</ANSWER>",
        "<answer>42</answer>.",
        "<answer>42</answer> or 43",
        "<answer>42</answer>\nQuestion: What is 1 + 1?",
        "<answer>4\n2</answer>",
        f"<answer>{'9' * 5000}</answer>",
        "answer",
    ],
)
def test_planted_cheats_at_numbers_earn_nothing(completion: str) -> None:
    assert score_number(completion, "42") == 0


def test_minus_and_zero_have_one_way_to_be_written() -> None:
    assert score_number("<answer>-3</answer>", "-3") == 1
    assert score_number("<answer>0</answer>", "0") == 1
    assert score_number("<answer>-0</answer>", "0") == 0


def fact(question: str) -> tuple[str, ...]:
    a, sign, b = question.split()
    return (sign, a, b) if sign == "-" else (sign, *sorted((a, b)))


def test_sums_are_right_and_turning_one_round_does_not_carry_it_over() -> None:
    task = load_task("arithmetic", 128)
    for problem in [*task.train, *task.held_out]:
        a, sign, b = problem.question.split()
        value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        assert problem.answer == str(value)
        assert problem.prompt.endswith(f"Question: What is {problem.question}?\nAnswer:")
        assert task.score(f" {problem.question} = <answer>{value}</answer>\n", problem.answer) == 1
    learned = {fact(problem.question) for problem in task.train}
    tested = {fact(problem.question) for problem in task.held_out}
    assert not learned & tested
    shown = {fact(found) for found in re.findall(r"What is (.*)\?", task.train[0].prompt)[:-1]}
    assert len(shown) == 2
    assert not shown & (learned | tested)


def test_every_sign_is_tested() -> None:
    signs = [problem.question.split()[1] for problem in load_task("arithmetic", 128).held_out]
    assert min(signs.count(sign) for sign in "+-*") > 10


# ---- records ----

RUTH = json.dumps({"name": "Ruth", "age": 47})


@pytest.mark.parametrize("completion", [f" {RUTH}\n", '{"age":47,"name":"Ruth"}', '{ "name" : "Ruth", "age" : 47 }'])
def test_a_record_with_the_right_values_is_rewarded(completion: str) -> None:
    assert score_record(completion, RUTH) == 1


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "{}",
        "[]",
        "47",
        "NaN",
        '[["age", 47], ["name", "Ruth"]]',
        '{"name": "Ruth", "age": "47"}',
        '{"name": "Ruth", "age": 47.0}',
        '{"name": "Ruth", "age": 4.7e1}',
        '{"name": "Ruth", "age": [47]}',
        '{"name": "Ruth", "age": 46}',
        '{"name": "Ruth"}',
        '{"name": "Ruth", "age": 47, "age": 46}',
        '{"name": "Ruth", "age": 46, "age": 47}',
        '{"name": "Ruth", "age": 47, "age": 47}',
        '{"name": "Ruth", "age": 47, "room": 12}',
        '{"Name": "Ruth", "age": 47}',
        '{"name": "ruth", "age": 47}',
        "{'name': 'Ruth', 'age': 47}",
        RUTH + RUTH,
        RUTH + " or so",
        "JSON: " + RUTH,
        RUTH + "\nText: more",
        "[" * 5000,
        '{"age": ' + "9" * 5000 + "}",
    ],
)
def test_planted_cheats_at_records_earn_nothing(completion: str) -> None:
    assert score_record(completion, RUTH) == 0


def test_true_is_not_one() -> None:
    assert score_record('{"age": true}', '{"age": 1}') == 0


def test_nobody_of_the_tests_records_is_learned_from() -> None:
    task = load_task("record", 256)
    learned = {json.loads(problem.answer)["name"] for problem in task.train}
    tested = {json.loads(problem.answer)["name"] for problem in task.held_out}
    assert tested
    assert not learned & tested
    assert "Ruth" not in learned | tested
    for problem in [*task.train, *task.held_out]:
        wanted = json.loads(problem.answer)
        assert wanted["name"] in problem.question
        assert str(wanted["age"]) in problem.question
        assert task.score(problem.answer, problem.answer) == 1


# ---- GSM8K ----


@pytest.mark.parametrize("completion", ["6 * 7 = 42. #### 42\n", "#### 42", "#### $42.", "####42"])
def test_a_right_result_is_rewarded(completion: str) -> None:
    assert gsm8k.score(completion, "42") == 1


@pytest.mark.parametrize(
    "completion",
    ["", "42", "#### 41", "#### 41 #### 42", "#### 42 #### 42", "#### 42 or 43", "#### 6 * 7", "#### 4,2", "#### 42.0",
     "#### ٤٢", "#### 042", "42 ####", "#### 42\nQuestion: and now?", "#### 42 pens"],
)  # fmt: skip
def test_planted_cheats_at_word_problems_earn_nothing(completion: str) -> None:
    assert gsm8k.score(completion, "42") == 0


def test_thousands_may_be_parted() -> None:
    assert gsm8k.score("#### 1,234,567", "1234567") == 1
    assert gsm8k.score("#### 1234567", "1234567") == 1
    assert gsm8k.score("#### 12,34", "1234") == 0


def line(question: str, answer: str = "Think. #### 1,200") -> str:
    return json.dumps({"question": question, "answer": answer}) + "\n"


def test_a_folder_has_two_files_and_a_question_of_both_is_tested_only(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(line("How\n many?") + line("Both?") + "\n")
    (tmp_path / "test.jsonl").write_text(line("Both?") + line("And now?", "#### -3"))
    task = load_task("gsm8k", 2, str(tmp_path))
    assert [(p.question, p.answer) for p in task.train] == [("How many?", "1200")]
    assert [(p.question, p.answer) for p in task.held_out] == [("Both?", "1200"), ("And now?", "-3")]
    assert task.train[0].prompt.endswith("Question: How many?\nAnswer:")


def test_of_one_file_every_fifth_question_is_tested(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(line(f"Number {i}?", f"#### {i}") for i in (*range(10), 3, 5)))
    task = load_task("gsm8k", 2, str(file))
    assert [p.answer for p in task.held_out] == ["0", "5"]
    assert [p.answer for p in task.train] == ["1", "2", "3", "4", "6", "7", "8", "9"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"line 1: not JSON"),
        (line("fine") + '{"question": "x"}', r"line 2: .*####"),
        (line("fine") + line("x", "no result"), r"line 2: .*####"),
        (line("x", "#### a half"), r"whole number"),
        ("[1]", r"line 1: "),
        ("", r"0 problems|1\.\.0"),
    ],
)
def test_a_file_that_is_not_so_is_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "own.jsonl").write_text(text)
    with pytest.raises(OptionError, match=words):
        load_task("gsm8k", 1, str(tmp_path / "own.jsonl"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"nowhere\.jsonl.*cannot be read.*question"):
        load_task("gsm8k", 1, str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(OptionError, match=r"train\.jsonl.*cannot be read"):
        load_task("gsm8k", 1, str(tmp_path))


def test_without_the_package_or_the_hub_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OptionError, match=r"package datasets.*--data"):
        load_task("gsm8k", 1)

    def unreachable(*_: str) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(OptionError, match=r"openai/gsm8k.*no route.*--data"):
        load_task("gsm8k", 1)


def test_the_hubs_splits_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*asked: str) -> dict[str, list[dict[str, str]]]:
        assert asked == ("openai/gsm8k", "main")
        return {name: [json.loads(line(f"{name}?"))] for name in ("train", "test")}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    task = load_task("gsm8k", 1)
    assert ([p.question for p in task.train], [p.question for p in task.held_out]) == (["train?"], ["test?"])


# ---- all ----


def test_data_goes_with_gsm8k_alone() -> None:
    with pytest.raises(OptionError, match=r"--data goes with --task gsm8k"):
        load_task("record", 1, "file")


@pytest.mark.parametrize("count", [0, -1, 100_000])
def test_there_must_be_as_many_problems_to_test_on(count: int) -> None:
    with pytest.raises(OptionError, match=rf"--eval-items {count}: arithmetic has 1\.\.\d+"):
        load_task("arithmetic", count)


@pytest.mark.parametrize("name", ["arithmetic", "record"])
def test_the_seed_orders_the_problems_and_the_split_is_always_the_same(name: TaskName) -> None:
    one, two = load_task(name, 64), load_task(name, 64)
    assert (one.train, one.held_out) == (two.train, two.held_out)
    assert len({p.prompt for p in one.held_out}) == 64
    first = [list(islice(load_task(name, 64).stream(seed), 50)) for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2]
    whole = list(islice(one.stream(0), 2 * len(one.train)))
    assert set(whole[: len(one.train)]) == set(one.train) == set(whole[len(one.train) :])
