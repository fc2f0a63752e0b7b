"""Pig latin: the rule, the split, what the model reads and is scored on, and the order of calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from tinker import types

from openrl_recipes.pig_latin import execute_notebook, train
from openrl_recipes.pig_latin.words import WORDS, answer, pig_latin, prompt, read, similarity, split
from openrl_recipes.shared.folder import RunFolder, read_lines


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("book", "ookbay"),
        ("string", "ingstray"),
        ("school", "oolschay"),
        ("apple", "appleway"),
        ("eye", "eyeway"),
        ("use", "useway"),
        # y opens a word as a consonant and is a vowel anywhere else
        ("yellow", "ellowyay"),
        ("yes", "esyay"),
        ("my", "ymay"),
        ("fly", "yflay"),
        ("rhythm", "ythmrhay"),
        # u moves with its q
        ("queen", "eenquay"),
        ("square", "aresquay"),
        ("quay", "ayquay"),
        ("build", "uildbay"),
        # nothing but consonants: all of it moves, which leaves it as it was
        ("hmm", "hmmay"),
    ],
)
def test_the_rule(word: str, wanted: str) -> None:
    assert pig_latin(word) == wanted


def test_the_rule_on_all_words_keeps_every_letter() -> None:
    for word in WORDS:
        made = pig_latin(word)
        stem = made.removesuffix("way") if word[0] in "aeiou" else made.removesuffix("ay")
        assert sorted(stem) == sorted(word), word
        assert word[0] in "aeiou" or made[0] in "aeiouy", word
        assert stem in word + word, f"{word}: {made} is no rotation"


def test_words_are_short_lower_case_and_listed_once() -> None:
    assert len(WORDS) == len(set(WORDS)) > 500
    assert all(word.isascii() and word.isalpha() and word.islower() and 2 <= len(word) <= 7 for word in WORDS)


def test_train_and_held_out_words_are_disjoint_and_drawn_by_the_seed() -> None:
    train_words, held_out = split(seed=3, held_out=128)
    assert len(held_out) == 128
    assert set(train_words) | set(held_out) == set(WORDS)
    assert not set(train_words) & set(held_out)
    assert split(3, 128) == (train_words, held_out)
    assert split(4, 128)[1] != held_out


def test_what_is_read_of_an_answer_is_the_word() -> None:
    assert prompt("cat") == "Word: c a t\nPig latin:"
    assert answer("cat") == " a t c a y\n"
    assert all(read(answer(word)) == pig_latin(word) for word in WORDS)
    assert read(" a t c a y\nWord: d o g\n") == "atcay"
    assert read("\n") == ""
    assert max(len(answer(word)) // 2 + 1 for word in WORDS) < train.MAX_TOKENS


def test_similarity_is_the_mean_over_words() -> None:
    assert similarity(["atcay", "ogday"], ["atcay", "ogday"]) == 1
    assert similarity(["atcay", "xxx"], ["atcay", "ogday"]) == pytest.approx(0.5)
    assert similarity(["abcd"], ["bcde"]) == pytest.approx(2 * 3 / 8)


# ---- training and evaluation against a fake ----


class Characters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


@dataclass
class Called:
    """A future that notes when it is read."""

    name: str
    calls: list[str]
    value: Any = None

    def result(self) -> Any:
        self.calls.append(f"read {self.name}")
        return self.value


@dataclass
class FakeTrainer:
    calls: list[str] = field(default_factory=list[str])
    batches: list[list[types.Datum]] = field(default_factory=list[list[types.Datum]])
    rates: list[float] = field(default_factory=list[float])

    def forward_backward(self, data: list[types.Datum], loss: str) -> Called:
        assert loss == "cross_entropy"
        name = f"backward {len(self.batches)}"
        self.batches.append(data)
        self.calls.append(f"send {name}")
        return Called(name, self.calls, types.ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 1.5}))

    def optim_step(self, params: types.AdamParams) -> Called:
        name = f"optim {len(self.rates)}"
        self.rates.append(params.learning_rate)
        self.calls.append(f"send {name}")
        return Called(name, self.calls)


def test_a_step_is_sent_before_the_one_before_it_is_read(tmp_path: Path) -> None:
    trainer, options = FakeTrainer(), train.Options(steps=3, batch=4)
    train.train(RunFolder(tmp_path, options), trainer, Characters(), WORDS, options)
    sent = [[f"send backward {step}", f"send optim {step}"] for step in range(3)]
    seen = [[f"read backward {step}", f"read optim {step}"] for step in range(3)]
    assert trainer.calls == [*sent[0], *sent[1], *seen[0], *sent[2], *seen[1], *seen[2]]
    assert [r["step"] for r in read_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert trainer.rates[-1] < trainer.rates[1] <= options.lr


def test_the_loss_is_on_the_answers_alone_and_a_mean(tmp_path: Path) -> None:
    trainer, options = FakeTrainer(), train.Options(steps=2, batch=4)
    train.train(RunFolder(tmp_path, options), trainer, Characters(), WORDS, options)
    for batch in trainer.batches:
        weights = [datum.loss_fn_inputs["weights"].to_numpy() for datum in batch]
        targets = [datum.loss_fn_inputs["target_tokens"].to_numpy() for datum in batch]
        assert sum(float(row.sum()) for row in weights) == pytest.approx(1)
        learnt = [Characters().decode(t[w > 0].tolist()) for t, w in zip(targets, weights, strict=True)]
        assert set(learnt) <= {answer(word) for word in WORDS}
    assert trainer.batches[0] != trainer.batches[1]


class HalfRight:
    """A policy that knows the words of even length."""

    def sample(self, model_input: types.ModelInput, num_samples: int, params: types.SamplingParams) -> Called:
        assert (num_samples, params.temperature, params.stop) == (1, 0.0, ["\n"])
        word = read(Characters().decode(model_input.to_ints()).removeprefix("Word:").split("\n")[0])
        text = answer(word) if len(word) % 2 == 0 else " n o\n"
        tokens = np.array([ord(letter) for letter in text], np.int32)
        sequence = types.SampledSequence("stop", "s", tokens, np.full(len(tokens), -0.5, np.float32))
        return Called(word, [], types.SampleResponse(sequences=[sequence]))


def test_the_score_is_the_share_of_words_without_a_mistake(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, train.Options())
    words = ["book", "cat", "dog", "seat"]
    assert train.evaluate(folder, "before", 0, HalfRight(), Characters(), words) == 0.5
    samples = read_lines(tmp_path / "samples.jsonl")
    assert [(s["completion"], s["wanted"], s["score"]) for s in samples[:2]] == [
        ("ookbay", "ookbay", 1.0),
        ("no", "atcay", 0.0),
    ]
    record = read_lines(tmp_path / "metrics.jsonl")[0]
    assert record["held_out"] == 0.5
    assert 0.5 < record["held_out_similarity"] < 1


# ---- the notebook as committed ----


def test_the_committed_notebook_has_outputs_of_one_run_from_top_to_bottom() -> None:
    notebook = nbformat.read(execute_notebook.NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_the_committed_notebook_names_no_machine() -> None:
    text = json.dumps(nbformat.read(execute_notebook.NOTEBOOK, as_version=4).cells)
    for word in ("/home/", "/root/", "/tmp/", "/usr/", "/work", "/Users/", "site-packages", "tml-", "http://"):
        assert word not in text, word
