"""The real SDK over HTTP against the real SmolLM2-135M: what is learnt, and that sampler and trainer agree."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
from e2e.conftest import SMOL
from tinker import types

from openrl_recipes.local_server import Endpoint
from support.real_server import datum, ints, logprobs, sampler_state, vllm_arguments

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CITIES = ["Paris", "Rome", "Oslo", "Lima", "Cairo", "Delhi", "Tokyo", "Bern", "Quito", "Kyiv", "Seoul", "Accra"]
HELD_OUT = ["Vienna", "Dublin", "Riga", "Hanoi"]

# In bf16 the trainer's forward is 3e-4 away from float32 after a step and the sampler's 9e-4; in float32 the two agree
# to 1e-10 (the contract tests' part). S14 calls 1e-3 acceptable and 1e-2 a bug. vLLM rounds the residual stream after
# each layer, too, and is 1e-3 to 4e-3 away (docs/vllm.md), so there it is the bound of bugs that can be held.
BF16_NOISE = 1e-3
SAMPLED_NOISE = 1e-2 if vllm_arguments() else BF16_NOISE


def question(city: str) -> str:
    return f"Write the city in capitals, between stars.\nCity: {city}\nAnswer:"


def test_supervised_learning_generalises_to_held_out_cities(smol: tinker.ServiceClient) -> None:
    """SFT improves a held-out score: the mean logprob of answers to questions that were not trained on."""
    trainer = smol.create_lora_training_client(SMOL, rank=8, seed=1).result()
    tokenizer = trainer.get_tokenizer()

    def example(city: str) -> types.Datum:
        prompt = tokenizer.encode(question(city))
        return datum(prompt + tokenizer.encode(f" *{city.upper()}*\n"), prompt=len(prompt))

    def held_out() -> float:
        data = [example(city) for city in HELD_OUT]
        output = trainer.forward(data, "cross_entropy").result()
        weights = sum(float(np.sum(d.loss_fn_inputs["weights"].data)) for d in data)
        return output.metrics["loss:sum"] / weights

    before = held_out()
    pending = []
    for _ in range(6):
        pending.append(trainer.forward_backward([example(city) for city in CITIES], "cross_entropy"))
        pending.append(trainer.optim_step(types.AdamParams(learning_rate=1e-3)))
    losses = [f.result().metrics["loss:sum"] for f in pending[::2]]
    assert losses[-1] < losses[0] / 3
    assert held_out() < before / 2

    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=12, temperature=0.0, stop=["\n"])
    answers = [
        tokenizer.decode(sampler.sample(ints(tokenizer.encode(question(c))), 1, params).result().sequences[0].tokens)
        for c in CITIES[:4]
    ]
    assert sum(a.strip() == f"*{c.upper()}*" for a, c in zip(answers, CITIES, strict=False)) >= 3, answers


def test_a_verifiable_reward_is_raised_by_policy_gradient(smol: tinker.ServiceClient) -> None:
    """A short GRPO loop: answers that contain the word `blue` are rewarded, and become frequent."""
    trainer = smol.create_lora_training_client(SMOL, rank=8, seed=2).result()
    tokenizer = trainer.get_tokenizer()
    prompt = tokenizer.encode("My favourite colour is")
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=7)
    rewards: list[float] = []
    for _ in range(8):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        group = sampler.sample(ints(prompt), 48, params).result().sequences
        reward = np.array([float("blue" in tokenizer.decode(s.tokens)) for s in group])
        rewards.append(float(reward.mean()))
        advantages = reward - reward.mean()
        data = [rollout_datum(prompt, s, a) for s, a in zip(group, advantages / len(prompt), strict=True) if a != 0]
        if data:
            trainer.forward_backward(data, "importance_sampling")
            trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    assert 0.0 < rewards[0] < 0.6, rewards
    assert np.mean(rewards[-2:]) > rewards[0] + 0.25, rewards


def rollout_datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """A sampled sequence as an RL datum: zeros on the prompt, the sampler's logprobs on the action."""
    tokens = prompt + list(sequence.tokens)
    pad = [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], np.int64),
            "logprobs": np.array(pad + list(sequence.logprobs or []), np.float32),
            "advantages": np.array(pad + [advantage] * len(sequence.tokens), np.float32),
        },
    )


def test_s6_s14_s15_sampler_and_trainer_agree(smol: tinker.ServiceClient) -> None:
    """S6, S14, S15: on-policy logprobs of sampler and trainer agree within what the compute dtype allows."""
    trainer = smol.create_lora_training_client(SMOL, rank=8, seed=3).result()
    tokenizer = trainer.get_tokenizer()
    text = tokenizer.encode("The tide came in slowly, and the boats rose one after another until the harbour was full.")
    trainer.forward_backward([datum(text)], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=3e-4)).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()

    scored = np.array(sampler.compute_logprobs(ints(text)).result()[1:], np.float32)
    forward = logprobs(trainer.forward([datum(text)], "cross_entropy").result())
    assert kl_v2(scored, forward) < BF16_NOISE

    prompt = text[:6]
    group = sampler.sample(ints(prompt), 16, types.SamplingParams(max_tokens=24, seed=5)).result().sequences
    data = [datum(prompt + list(s.tokens), prompt=len(prompt)) for s in group]
    output = trainer.forward(data, "cross_entropy").result()
    drawn = np.concatenate([np.array(s.logprobs, np.float32) for s in group])
    trained = np.concatenate([logprobs(output, i)[len(prompt) - 1 :] for i in range(len(group))])
    v2 = kl_v2(drawn, trained)
    assert v2 < SAMPLED_NOISE
    assert abs(float(np.mean(drawn - trained))) < 3 * np.sqrt(2 * v2 / len(drawn)) + 1e-3

    trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    again = np.array(sampler.compute_logprobs(ints(text)).result()[1:], np.float32)
    assert kl_v2(scored, again) < 1e-6, "a sampler is frozen at its save (S15)"


@pytest.mark.skipif(not vllm_arguments(), reason="make test-vllm")
def test_all_that_was_drawn_above_was_drawn_by_vllm(smol_server: Endpoint) -> None:
    """It is ready, was not restarted, and nothing is left to our engine for being wrong: neither adapters of the head,
    nor top-p, nor whole models."""
    state = sampler_state(smol_server)
    assert state["engine"].startswith("vLLM "), state
    assert (state["state"], state["restarts"]) == ("ready", 0), state
    assert "engine does" not in state["detail"], state


def kl_v2(q: np.ndarray, lp: np.ndarray) -> float:
    """optim/kl_sample_train_v2 of the cookbook: half the mean squared difference."""
    return float(0.5 * np.mean((q.astype(np.float64) - lp.astype(np.float64)) ** 2))
