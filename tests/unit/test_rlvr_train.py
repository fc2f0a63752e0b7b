"""The loop of GRPO against a model that answers by a script: what is sent to the trainer, what is logged, and when."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tinker import types

from openrl_recipes.rlvr.tasks import Problem, Task, score_number
from openrl_recipes.rlvr.train import Model, Options, evaluate, train
from openrl_recipes.shared.folder import RunFolder

RIGHT, WRONG = "<answer>1</answer>\n", "<answer>2</answer>\n"
EASY, HARD, HOPELESS = (Problem(name, name, "1") for name in ("easy", "hard", "hopeless"))


class Letters:
    """A tokenizer whose tokens are letters."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in tokens)


def done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@dataclass
class Policy:
    """Solves the easy problem always, the hopeless one never, and the hard one in the first half of the tries."""

    version: int
    asked: list[tuple[int, types.SamplingParams]]

    def sample(self, prompt: types.ModelInput, num_samples: int, params: types.SamplingParams) -> Any:
        self.asked.append((self.version, params))
        name = "".join(chr(token) for token in prompt.to_ints())
        right = {"easy": num_samples, "hard": num_samples // 2, "hopeless": 0}[name]
        texts = [RIGHT] * right + [WRONG] * (num_samples - right)
        tokens = [[ord(letter) for letter in text] for text in texts]
        return done(
            SimpleNamespace(sequences=[SimpleNamespace(tokens=row, logprobs=[-0.5] * len(row)) for row in tokens])
        )


@dataclass
class Trainer:
    """Remembers what it was sent; each sampler that it makes has the number of steps taken so far."""

    asked: list[tuple[int, types.SamplingParams]] = field(default_factory=list)
    passes: list[tuple[str, list[types.Datum]]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def forward_backward(self, data: list[types.Datum], loss: str) -> Any:
        self.passes.append((loss, data))
        rows = [types.TensorData.from_numpy(np.full(d.model_input.length, -0.5, np.float32)) for d in data]
        return done(SimpleNamespace(metrics={"loss:sum": 0.25}, loss_fn_outputs=[{"logprobs": row} for row in rows]))

    def optim_step(self, params: types.AdamParams) -> Any:
        self.rates.append(params.learning_rate)
        return done(None)

    def save_weights_and_get_sampling_client(self) -> Any:
        return done(Policy(len(self.rates), self.asked))


def run(tmp_path: Path, problems: list[Problem], **options: Any) -> tuple[Trainer, RunFolder]:
    trainer: Any = Trainer()
    task = Task(problems, problems, score_number, 32)
    asked = Options(out=str(tmp_path), groups=len(problems), samples=4, **options)
    folder = RunFolder(tmp_path, asked)
    model = Model(trainer, Letters(), 32)
    train(folder, model, trainer.save_weights_and_get_sampling_client().result(), task, asked)
    return trainer, folder


def test_only_groups_with_right_and_wrong_tries_are_learned_from_but_all_are_counted(tmp_path: Path) -> None:
    trainer, folder = run(tmp_path, [EASY, HARD, HOPELESS], steps=1)
    [(loss, data)] = trainer.passes
    assert loss == "importance_sampling"
    assert len(data) == 4
    total = sum(len(text) for text in (RIGHT, RIGHT, WRONG, WRONG))
    advantages = [datum.loss_fn_inputs["advantages"].tolist() for datum in data]
    assert advantages[0] == pytest.approx([0.0] * 3 + [0.5 / total] * len(RIGHT))
    assert advantages[3] == pytest.approx([0.0] * 3 + [-0.5 / total] * len(WRONG))
    [record] = folder.records
    assert record["reward"] == pytest.approx(6 / 12)
    assert record["mixed_groups"] == pytest.approx(1 / 3)
    assert record["sampled_tokens"] == 12 * len(RIGHT)
    assert record["train_tokens"] == 4 * (len("hard") + len(RIGHT) - 1)
    assert record["kl_v2"] == 0
    assert record["entropy"] == 0.5


def test_every_step_samples_with_the_weights_of_the_step_before(tmp_path: Path) -> None:
    trainer, _ = run(tmp_path, [HARD], steps=3, eval_every=100, lr=0.5)
    assert [version for version, _ in trainer.asked] == [0, 1, 2]
    assert trainer.rates == [0.5] * 3
    assert all(params.temperature == 1 and params.stop == ["\n"] for _, params in trainer.asked)
    assert len({params.seed for _, params in trainer.asked}) == 3


def test_a_step_without_a_group_to_learn_from_takes_no_step(tmp_path: Path) -> None:
    trainer, folder = run(tmp_path, [EASY, HOPELESS], steps=2)
    assert not trainer.passes
    assert not trainer.rates
    assert [(r["reward"], r["mixed_groups"]) for r in folder.records] == [(0.5, 0.0)] * 2


def test_evaluation_is_greedy_and_on_the_held_out_problems(tmp_path: Path) -> None:
    trainer, folder = run(tmp_path, [HARD], steps=4, eval_every=2)
    assert [(r["stage"], r["step"]) for r in folder.records if "held_out" in r] == [("evaluate", 2)]
    greedy = [(version, params) for version, params in trainer.asked if params.temperature == 0]
    assert [version for version, _ in greedy] == [2]

    model: Any = Model(trainer, Letters(), 32)  # pyright: ignore[reportArgumentType]
    policy: Any = Policy(0, [])
    task = Task([], [EASY, HARD, HOPELESS, EASY], score_number, 32)
    assert evaluate(folder, "after", 4, model, policy, task) == 0.5
    samples = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 4
