"""Distillation's arithmetic: soft targets, per-token advantages, the divergences, the teacher file, the options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types

from openrl_recipes.distill import train
from openrl_recipes.distill.teacher import (
    Example,
    entropy,
    read_examples,
    score,
    soft_targets,
    soft_targets_batch,
    write_examples,
)
from openrl_recipes.distill.train import Options, check, reverse_kl, reverse_kl_batch
from openrl_recipes.shared.grpo import Rollout
from openrl_recipes.shared.options import OptionError, parse


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


SURE = Example([10, 11, 12], [20, 21], [[20, 5], [21, 6]], [logs(0.6, 0.2), logs(0.9, 0.1)])
UNSURE = Example([10, 11], [30], [[7, 30]], [logs(0.3, 0.3)])


def test_soft_targets_are_the_teachers_probabilities_scaled_to_one() -> None:
    assert soft_targets(SURE) == pytest.approx(np.array([[0.75, 0.25], [0.9, 0.1]]))
    assert soft_targets(UNSURE) == pytest.approx(np.array([[0.5, 0.5]]))
    tiny = Example([1], [2], [[2, 3]], [[-900.0, -900.0 + math.log(3)]])
    assert soft_targets(tiny) == pytest.approx(np.array([[0.25, 0.75]])), "no underflow of what is unlikely altogether"
    empty = Example([1], [2], [[2, 0]], [[0.0, -99999.0]])  # how the SDK writes an empty cell
    assert soft_targets(empty) == pytest.approx(np.array([[1.0, 0.0]]))


def test_a_soft_datum_has_k_targets_a_place_and_no_weight_on_the_prompt() -> None:
    sure, unsure = soft_targets_batch([SURE, UNSURE])
    assert sure.model_input.to_ints() == [10, 11, 12, 20]
    assert sure.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [[0, 0], [0, 0], [20, 5], [21, 6]]
    weights = sure.loss_fn_inputs["weights"].to_numpy()
    assert weights == pytest.approx(np.array([[0, 0], [0, 0], [0.25, 0.25 / 3], [0.3, 0.1 / 3]]))
    assert unsure.model_input.to_ints() == [10, 11]
    assert unsure.loss_fn_inputs["weights"].to_numpy() == pytest.approx(np.array([[0, 0], [0.5 / 3, 0.5 / 3]]))
    # All rows of all answers together sum to 1: the server's summed loss is a mean a token.
    assert weights.sum() + unsure.loss_fn_inputs["weights"].to_numpy().sum() == pytest.approx(1)


def test_the_entropy_is_the_loss_of_a_student_that_agrees() -> None:
    by_hand = [-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))]
    assert entropy([SURE]) == pytest.approx(sum(by_hand) / 2)
    assert entropy([SURE, UNSURE]) == pytest.approx((sum(by_hand) + math.log(2)) / 3)
    weights = soft_targets_batch([SURE])[0].loss_fn_inputs["weights"].to_numpy()[2:]
    assert -(weights * np.log(soft_targets(SURE))).sum() == pytest.approx(entropy([SURE]))


ROLLOUTS = [Rollout([1, 2, 3], [4, 5], [-0.5, -1.0], "", 0.0), Rollout([1, 2], [6], [-2.0], "", 0.0)]
SCORED = [[-0.25, -4.0], [-1.0]]


def test_a_tokens_advantage_is_the_teachers_logprob_minus_the_students() -> None:
    first, second = reverse_kl_batch(ROLLOUTS, SCORED)
    assert first.model_input.to_ints() == [1, 2, 3, 4]
    assert first.loss_fn_inputs["target_tokens"].tolist() == [2, 3, 4, 5]
    assert first.loss_fn_inputs["advantages"].tolist() == pytest.approx([0, 0, 0.25 / 3, -3.0 / 3])
    assert first.loss_fn_inputs["logprobs"].tolist() == pytest.approx([0, 0, -0.5, -1.0])
    assert second.loss_fn_inputs["advantages"].tolist() == pytest.approx([0, 1.0 / 3])


def test_the_reverse_kl_is_a_mean_over_all_sampled_tokens() -> None:
    assert reverse_kl(ROLLOUTS, SCORED) == pytest.approx((-0.25 + 3.0 - 1.0) / 3)


def test_the_estimate_and_its_gradient_are_those_of_the_reverse_kl() -> None:
    """Over all tokens of a small vocabulary: the mean of the estimate is KL(student || teacher), and the mean of
    advantage x grad logprob, by which the policy climbs, is minus the gradient of that KL."""
    logits, teacher = np.array([0.2, -0.4, 1.0]), np.log([0.2, 0.5, 0.3])

    def student(z: np.ndarray) -> np.ndarray:
        return z - np.log(np.exp(z).sum())

    def divergence(z: np.ndarray) -> float:
        return float((np.exp(student(z)) * (student(z) - teacher)).sum())

    own = student(logits)
    rollouts = [Rollout([1], [token], [own[token]], "", 0.0) for token in range(3)]
    data = [reverse_kl_batch([r], [[teacher[r.tokens[0]]]])[0] for r in rollouts]
    advantages = np.array([datum.loss_fn_inputs["advantages"].tolist()[0] for datum in data])
    assert -(np.exp(own) * advantages).sum() == pytest.approx(divergence(logits))
    climbed = sum(np.exp(own[t]) * advantages[t] * (np.eye(3)[t] - np.exp(own)) for t in range(3))
    nudges = np.eye(3) * 1e-5
    numeric = [(divergence(logits + n) - divergence(logits - n)) / 2e-5 for n in nudges]
    assert climbed == pytest.approx(-np.array(numeric), abs=1e-6)


@dataclass
class Ready:
    value: Any

    def result(self) -> Any:
        return self.value


class FakeTeacher:
    """Finds token n as likely as -n / 10, in nats; has no logprob for the first of all."""

    def compute_logprobs(self, tokens: types.ModelInput) -> Ready:
        return Ready([None, *(-token / 10 for token in tokens.to_ints()[1:])])


def test_the_teacher_scores_the_sampled_tokens_and_not_the_prompt() -> None:
    assert score(FakeTeacher(), ROLLOUTS) == [[-0.4, -0.5], [-0.6]]


def test_a_teacher_file_holds_the_examples(tmp_path: Path) -> None:
    file = tmp_path / "new" / "teacher.jsonl"
    write_examples(file, [SURE, UNSURE])
    assert read_examples(file) == [SURE, UNSURE]


@pytest.mark.parametrize("line", ["", "{", "[1]", '{"prompt": [1]}', "ragged", "short"])
def test_a_teacher_file_with_anything_else_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "teacher.jsonl"
    ragged = Example([1], [2, 3], [[2, 3], [4]], [[-1.0, -1.0], [-1.0]])
    short = Example([1], [2, 3], [[2, 3]], [[-1.0, -1.0]])
    if line in {"ragged", "short"}:
        write_examples(file, [{"ragged": ragged, "short": short}[line]])
    elif line:
        file.write_text(line + "\n")
    with pytest.raises(OptionError, match="--teacher-file"):
        read_examples(file)


@pytest.mark.parametrize(
    "options",
    [
        Options(teacher_file="t.jsonl"),
        Options(teacher_file="t.jsonl", mode="soft_targets", teacher="tinker://x"),
        Options(teacher_file="t.jsonl", mode="soft_targets", make_teacher="u.jsonl"),
        Options(make_teacher="t.jsonl", mode="on_policy"),
        Options(teacher_url="http://127.0.0.1:1"),
    ],
)
def test_options_that_contradict_are_refused_before_anything_runs(options: Options) -> None:
    with pytest.raises(OptionError, match="--"):
        train.main(options)


def test_options_that_go_together() -> None:
    assert parse(Options, []) == Options()
    check(parse(Options, ["--mode", "soft_targets", "--teacher-file", "t.jsonl"]))
    check(parse(Options, ["--make-teacher", "t.jsonl"]))
    check(parse(Options, ["--teacher", "tinker://x/weights/y", "--teacher-url", "http://127.0.0.1:1"]))
