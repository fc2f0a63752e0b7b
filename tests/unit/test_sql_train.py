"""The recipe's own arithmetic, and the whole recipe against a hand-written stand-in for the SDK's clients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types

from openrl_recipes.text_to_sql import report, train
from openrl_recipes.text_to_sql.generator import items, make_items
from openrl_recipes.text_to_sql.train import Options, Rollout, parse_options, policy_gradient_batch, shifted


def values(datum: types.Datum, key: str) -> list[float]:
    return datum.loss_fn_inputs[key].to_numpy().tolist()


def test_a_datum_predicts_the_completion_and_nothing_of_the_prompt() -> None:
    datum = shifted([10, 11, 12], [20, 21], weights=[0.5, 0.5])
    assert datum.model_input.to_ints() == [10, 11, 12, 20]
    assert values(datum, "target_tokens") == [11, 12, 20, 21]
    assert values(datum, "weights") == [0, 0, 0.5, 0.5]


def test_advantages_are_centred_in_the_group_and_shared_by_all_sampled_tokens() -> None:
    group = [
        Rollout([1, 2], [3], [-0.1], 1.0),
        Rollout([1, 2], [4, 5, 6], [-0.1, -0.2, -0.3], 0.0),
        Rollout([1, 2], [7, 8], [-0.4, -0.5], 0.0),
        Rollout([1, 2], [3, 9], [-0.6, -0.7], 0.0),
    ]
    data = policy_gradient_batch([group])
    assert values(data[0], "advantages") == pytest.approx([0, 0.75 / 8])
    assert values(data[1], "advantages") == pytest.approx([0, -0.25 / 8, -0.25 / 8, -0.25 / 8])
    assert values(data[1], "logprobs") == pytest.approx([0, -0.1, -0.2, -0.3])
    assert all(values(datum, "target_tokens")[0] == 2 for datum in data)


def test_every_option_has_a_flag() -> None:
    assert parse_options([]) == Options()
    options = parse_options(["--rl-steps", "3", "--sft-lr", "0.1", "--rl-loss", "ppo", "--out", "x"])
    assert (options.rl_steps, options.sft_lr, options.rl_loss, options.out) == (3, 0.1, "ppo", "x")


def test_overlapping_steps_count_their_time_once() -> None:
    records: list[report.Record] = [
        {"at": 2.0, "seconds": 2.0, "train_tokens": 100},
        {"at": 3.0, "seconds": 2.0, "train_tokens": 100},
        {"at": 9.0, "seconds": 1.0, "train_tokens": 100},
        {"at": 5.0, "seconds": 1.0, "sampled_tokens": 7},
    ]
    summary = report.Summary([], [], records)
    assert summary.speed("train_tokens") == pytest.approx(300 / 4)
    assert summary.speed("sampled_tokens") == pytest.approx(7)
    assert report.Summary([], [], []).speed("train_tokens") == 0


# ---- the whole recipe, against a fake ----


class Characters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


@dataclass
class Ready:
    """A future that has its result already."""

    value: Any

    def result(self) -> Any:
        return self.value


@dataclass
class FakePolicy:
    """Knows the right queries; of its samples a share of `skill` is right."""

    answers: dict[str, str]
    skill: float

    def sample(self, prompt: types.ModelInput, num_samples: int, params: types.SamplingParams) -> Ready:
        assert params.stop == ["\n"]
        right = self.answers[Characters().decode(prompt.to_ints())]
        count = num_samples if params.temperature == 0 and self.skill >= 0.5 else int(self.skill * num_samples)
        texts = [right] * count + [" nonsense\n"] * (num_samples - count)
        return Ready(types.SampleResponse(sequences=[sequence(text) for text in texts]))


def sequence(text: str) -> types.SampledSequence:
    tokens = np.array([ord(letter) for letter in text], dtype=np.int32)
    logprobs = np.full(len(tokens), -0.5, dtype=np.float32)
    return types.SampledSequence(stop_reason="stop", sequence_id="s", tokens_np=tokens, logprobs_np=logprobs)


@dataclass
class FakeTrainer:
    """Becomes better with each step; records what it is asked to do."""

    answers: dict[str, str]
    skill: float = 0.0
    calls: list[str] = field(default_factory=list[str])
    batches: list[list[types.Datum]] = field(default_factory=list[list[types.Datum]])

    def get_tokenizer(self) -> Characters:
        return Characters()

    def forward_backward(self, data: list[types.Datum], loss_fn: str) -> Ready:
        self.calls.append(loss_fn)
        self.batches.append(data)
        return Ready(types.ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 1.5}))

    def optim_step(self, params: types.AdamParams) -> Ready:
        self.calls.append("optim_step")
        self.skill += 0.25
        return Ready(None)

    def save_weights_and_get_sampling_client(self) -> Ready:
        self.calls.append("save")
        return Ready(FakePolicy(self.answers, self.skill))


@dataclass
class FakeService:
    trainer: FakeTrainer

    def __enter__(self) -> FakeService:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def create_lora_training_client(self, model: str, rank: int, seed: int) -> Ready:
        return Ready(self.trainer)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> FakeTrainer:
    options = Options()
    drawn = make_items("held-out", 12, options.seed)
    for seed in (options.seed, options.seed + 1):
        drawn += [item for item, _ in zip(items("train", seed), range(40), strict=False)]
    fake = FakeTrainer({item.prompt: item.answer for item in drawn})
    monkeypatch.setattr(train.tinker, "ServiceClient", lambda: FakeService(fake))
    return fake


def small(out: Path) -> Options:
    return Options(out=str(out), eval_items=12, sft_steps=2, sft_batch=4, rl_steps=3, rl_groups=2, rl_samples=4)


def test_the_recipe_runs_both_stages_and_writes_its_files(trainer: FakeTrainer, tmp_path: Path) -> None:
    summary = train.main(small(tmp_path))
    assert [evaluation.accuracy for evaluation in summary.evaluations] == [0, 1, 1]
    step = ["cross_entropy", "optim_step"]
    update = ["importance_sampling", "optim_step", "save"]
    assert trainer.calls == ["save", *step, *step, "save", *update, *update]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records == summary.records
    assert [r["reward"] for r in records if r["kind"] == "grpo"] == [0.5, 0.75, 1.0]
    assert [r["mixed_groups"] for r in records if r["kind"] == "grpo"] == [1, 1, 0]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "| after RL | 100.0% |" in (tmp_path / "report.md").read_text()


def test_the_supervised_loss_is_a_mean_over_answer_tokens(trainer: FakeTrainer, tmp_path: Path) -> None:
    train.main(small(tmp_path))
    weights = [weight for datum in trainer.batches[0] for weight in values(datum, "weights")]
    assert sum(weights) == pytest.approx(1)
    targets = [
        int(t)
        for t, w in zip(
            values(trainer.batches[0][0], "target_tokens"), values(trainer.batches[0][0], "weights"), strict=True
        )
        if w > 0
    ]
    assert Characters().decode(targets) in trainer.answers.values()


def test_the_final_tables_print(trainer: FakeTrainer, tmp_path: Path) -> None:
    from rich.console import Console

    summary = train.main(small(tmp_path))
    with (tmp_path / "printed.txt").open("w") as file:
        report.show(summary, Console(file=file, width=160))
    printed = (tmp_path / "printed.txt").read_text()
    assert "after SFT" in printed
    assert summary.held_out[0].domain.table in printed
