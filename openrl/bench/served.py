"""Our side of the benchmark: a running server, used through the unmodified `tinker` SDK as any script would."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
import numpy as np
import tinker
from tinker import types

from openrl.bench.workload import Example, Tokens


@dataclass(frozen=True, slots=True)
class Door:
    """Where a server listens, its key, and the served model that is measured."""

    base_url: str
    api_key: str
    model: str

    def service(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.base_url, api_key=self.api_key)

    def http(self) -> httpx.Client:
        """For what the SDK has no call for."""
        return httpx.Client(base_url=f"{self.base_url}/api/v1", headers={"X-API-Key": self.api_key}, timeout=60)


class ServedLoop:
    """`adapters` LoRA runs on a server, and a sampler of each one's weights; training uses the first."""

    def __init__(self, door: Door, rank: int, adapters: int = 1) -> None:
        self._service = door.service()
        self.trainers = [
            self._service.create_lora_training_client(door.model, rank=rank, seed=i).result() for i in range(adapters)
        ]
        self.samplers = [t.save_weights_and_get_sampling_client().result() for t in self.trainers]

    def close(self) -> None:
        """End the session."""
        self._service.close("success").result()

    def train_step(self, batch: Sequence[Example]) -> None:
        """`forward_backward` and `optim_step`, sent together as one step of a pipelined script."""
        passed = self.trainers[0].forward_backward([datum(example) for example in batch], "cross_entropy")
        stepped = self.trainers[0].optim_step(types.AdamParams(learning_rate=1e-4))
        passed.result()
        stepped.result()

    def sample(self, prompts: Sequence[Tokens], new_tokens: int) -> int:
        """One request a prompt, all in flight together, spread over the samplers."""
        futures = [
            self.samplers[i * len(self.samplers) // len(prompts)].sample(model_input(prompt), 1, params(new_tokens))
            for i, prompt in enumerate(prompts)
        ]
        return sum(len(future.result().sequences[0].tokens) for future in futures)


def params(new_tokens: int) -> types.SamplingParams:
    """Exactly `new_tokens` tokens: `stop=[]` means no end-of-sequence stop either."""
    return types.SamplingParams(max_tokens=new_tokens, temperature=1.0, stop=[])


def model_input(tokens: Tokens) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens.tolist())


def datum(example: Example) -> types.Datum:
    """For cross_entropy, with weight 0 where the example is masked."""
    weights = np.ones(example.length, np.float32)
    weights[: example.masked] = 0
    inputs = {
        "target_tokens": types.TensorData.from_numpy(example.tokens[1:].astype(np.int64)),
        "weights": types.TensorData.from_numpy(weights),
    }
    return types.Datum(model_input=model_input(example.tokens[:-1]), loss_fn_inputs=inputs)


def policy_datum(example: Example) -> types.Datum:
    """For importance_sampling and its kin: made-up logprobs, advantage 1 where the example is not masked."""
    advantages = np.ones(example.length, np.float32)
    advantages[: example.masked] = 0
    inputs = {
        "target_tokens": types.TensorData.from_numpy(example.tokens[1:].astype(np.int64)),
        "logprobs": types.TensorData.from_numpy(np.full(example.length, -10.0, np.float32)),
        "advantages": types.TensorData.from_numpy(advantages),
    }
    return types.Datum(model_input=model_input(example.tokens[:-1]), loss_fn_inputs=inputs)


def step_latencies(door: Door, count: int) -> list[float]:
    """Seconds of each of `count` empty optimizer steps, one after another over plain HTTP.

    Empty means that no gradient was accumulated, and the adapter has rank 1: what remains is what the server adds to
    any request (accept, commit, queue, worker and back, result). Each counts from sending `optim_step` to holding its
    result.
    """
    with door.http() as client:
        session = _post(client, "create_session", {"tags": [], "user_metadata": {}, "sdk_version": tinker.__version__})
        lora = {"rank": 1, "seed": 0, "train_mlp": True, "train_attn": True, "train_unembed": True}
        create = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": door.model, "lora_config": lora}
        run = _result(client, _post(client, "create_model", create))["model_id"]
        latencies: list[float] = []
        for number in range(1, count + 1):
            body = {"model_id": run, "seq_id": number, "adam_params": {"learning_rate": 0.0}}
            started = time.perf_counter()
            _result(client, _post(client, "optim_step", body))
            latencies.append(time.perf_counter() - started)
        _post(client, f"sessions/{session['session_id']}/finish", {"reason": {"type": "success"}, "detail": None})
        return latencies


def _result(client: httpx.Client, promise: dict[str, str]) -> dict[str, str]:
    """Wait for a promise; 408 means ask again. Raises RuntimeError if the request failed."""
    while True:
        answer = client.post("retrieve_future", json={"request_id": promise["request_id"]})
        if answer.status_code == 408:
            continue
        answer.raise_for_status()
        body: dict[str, str] = answer.json()
        if "error" in body:
            raise RuntimeError(body["error"])
        return body


def _post(client: httpx.Client, path: str, body: Mapping[str, object]) -> dict[str, str]:
    answer = client.post(path, json=body)
    answer.raise_for_status()
    return answer.json()
