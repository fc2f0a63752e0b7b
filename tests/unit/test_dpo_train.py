"""The whole DPO recipe against a model of one weight: how much likelier than at first it finds brief answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tinker import types

from openrl_recipes.dpo import train
from openrl_recipes.dpo.preferences import pairs
from openrl_recipes.shared.folder import read_lines

END = "[end]"
PER_TOKEN = -0.5


class Letters:
    """A tokenizer whose tokens are letters."""

    chat_template = "yes"

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        told = "".join(f"[{m['role']}]{m['content']}{END}\n" for m in messages)
        return told + ("[assistant]" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in tokens)


def done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


FACTS = {pair.question: pair.chosen for half in pairs(128) for pair in half}


class Model:
    """Every token has a logprob of -0.5, and the weight on top in an answer without a space."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1, requires_grad=True)
        self.forwards: list[int] = []

    def rows(self, data: list[types.Datum]) -> list[torch.Tensor]:
        return [PER_TOKEN + self.weight * self._brief(datum) * torch.ones(datum.model_input.length) for datum in data]

    def _brief(self, datum: types.Datum) -> float:
        answer = "".join(chr(t) for t in datum.loss_fn_inputs["target_tokens"].tolist()).rsplit("[assistant]", 1)[1]
        return float(" " not in answer)

    def get_tokenizer(self) -> Letters:
        return Letters()

    def forward(self, data: list[types.Datum], loss: str) -> Any:
        if loss == "cross_entropy":
            self.forwards.append(len(data))
        rows = [types.TensorData.from_torch(row.detach()) for row in self.rows(data)]
        return done(SimpleNamespace(loss_fn_outputs=[{"logprobs": row} for row in rows]))

    def forward_backward_custom(self, data: list[types.Datum], loss_fn: Callable[..., Any]) -> Any:
        loss, metrics = loss_fn(data, self.rows(data))
        loss.backward()
        return done(SimpleNamespace(metrics={**metrics, "loss:sum": float(loss.detach())}))

    def optim_step(self, params: types.AdamParams) -> Any:
        assert self.weight.grad is not None
        with torch.no_grad():
            self.weight -= params.learning_rate * self.weight.grad.sign()
        self.weight.grad = None
        return done(None)

    def save_weights_and_get_sampling_client(self) -> Any:
        return done(Policy(float(self.weight.detach())))


class Policy:
    """Answers with a sentence until the weight has grown to 0.1, and with the fact alone from then on."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def sample(self, prompt: types.ModelInput, num_samples: int, params: types.SamplingParams) -> Any:
        assert params.stop == [END]
        question = "".join(chr(token) for token in prompt.to_ints()).split("[user]")[1].split(END)[0]
        answer = FACTS[question] if self.weight > 0.1 else f"That is {FACTS[question]}."
        tokens = [ord(letter) for letter in answer + END]
        logprobs = [PER_TOKEN + self.weight * (" " not in answer)] * len(tokens)
        return done(SimpleNamespace(sequences=[SimpleNamespace(tokens=tokens, logprobs=logprobs)]))

    def compute_logprobs(self, prompt: types.ModelInput) -> Any:
        return done([None, *np.full(prompt.length - 1, PER_TOKEN + self.weight).tolist()])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    model = Model()

    @contextmanager
    def service_with(name: str) -> Iterator[Any]:
        yield SimpleNamespace(create_lora_training_client=lambda name, rank, seed: done(model))

    monkeypatch.setattr(train, "service_with", service_with)
    return model


def test_the_recipe_learns_to_be_brief_and_says_how_far_it_went(model: Model, tmp_path: Path) -> None:
    summary = train.main(train.Options(out=str(tmp_path), steps=6, batch=4, lr=0.1, eval_pairs=40, eval_every=3))
    assert summary.accuracy == 1
    assert summary.brief == (0, 1)
    assert summary.correct == (1, 1)
    assert model.forwards == [
        2 * 24,
        2 * 40,
        2 * 40,
        2 * 40,
    ]  # references, then one evaluation in between and one after

    records = read_lines(tmp_path / "metrics.jsonl")
    steps = [r for r in records if r["stage"] == "dpo"]
    assert steps[0]["loss"] == pytest.approx(math.log(2) - PER_TOKEN)  # of the pairs, and of the chosen answers
    assert (steps[0]["reward_margin"], steps[0]["train_score"]) == (0, 0.5)
    losses = [r["loss"] for r in steps]
    assert losses == sorted(losses, reverse=True)
    assert [(r["stage"], r["held_out"]) for r in records if "held_out" in r] == [
        ("before", 0.5),
        ("evaluate", 1.0),
        ("after", 1.0),
    ]
    after = {key: value for r in records if r["stage"] == "after" for key, value in r.items()}
    assert after["kl_reference"] == pytest.approx(float(model.weight.detach()))
    assert after["kl_v2"] == pytest.approx(0, abs=1e-9)
    assert {s["completion"] for s in read_lines(tmp_path / "samples.jsonl") if s["stage"] == "after"} <= set(
        FACTS.values()
    )
    assert (tmp_path / "report.html").exists()


def test_the_seed_orders_the_pairs() -> None:
    def first(seed: int) -> list[int]:
        order = train.shuffled(50, seed)
        return [next(order) for _ in range(100)]

    assert first(0) == first(0) != first(1)
    assert sorted(first(0)[:50]) == sorted(first(0)[50:]) == list(range(50))
