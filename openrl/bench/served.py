"""Our side of the benchmark: a running server, used through the unmodified `tinker` SDK as any script would."""

from __future__ import annotations

import time
from collections.abc import Mapping

import httpx
import tinker
from tinker import types

from openrl.bench.workload import Tokens


class ServedLoop:
    """One LoRA run on a server, and a sampler of its weights."""

    def __init__(self, base_url: str, api_key: str, model: str, rank: int) -> None:
        self._service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
        self._trainer = self._service.create_lora_training_client(model, rank=rank, seed=0).result()
        self._sampler = self._trainer.save_weights_and_get_sampling_client().result()

    def close(self) -> None:
        """End the session."""
        self._service.close("success").result()

    def train_step(self, batch: tuple[Tokens, ...]) -> None:
        """`forward_backward` and `optim_step`, sent together as one step of a pipelined script."""
        passed = self._trainer.forward_backward([_datum(tokens) for tokens in batch], "cross_entropy")
        stepped = self._trainer.optim_step(types.AdamParams(learning_rate=1e-4))
        passed.result()
        stepped.result()

    def sample(self, prompts: tuple[Tokens, ...], new_tokens: int) -> int:
        """One request a prompt, all in flight together; `stop=[]` means no end-of-sequence stop either."""
        params = types.SamplingParams(max_tokens=new_tokens, temperature=1.0, stop=[])
        futures = [self._sampler.sample(types.ModelInput.from_ints(p.tolist()), 1, params) for p in prompts]
        return sum(len(future.result().sequences[0].tokens) for future in futures)


def _datum(tokens: Tokens) -> types.Datum:
    inputs = {"target_tokens": types.TensorData.from_numpy(tokens[1:].astype("int64"))}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def step_latencies(base_url: str, api_key: str, model: str, count: int) -> list[float]:
    """Seconds of each of `count` empty optimizer steps, one after another over plain HTTP.

    Empty means that no gradient was accumulated, and the adapter has rank 1: what remains is what the server adds to
    any request (accept, commit, queue, worker and back, result). Each counts from sending `optim_step` to holding its
    result.
    """
    with httpx.Client(base_url=f"{base_url}/api/v1", headers={"X-API-Key": api_key}, timeout=60) as client:
        session = _post(client, "create_session", {"tags": [], "user_metadata": {}, "sdk_version": tinker.__version__})
        lora = {"rank": 1, "seed": 0, "train_mlp": True, "train_attn": True, "train_unembed": True}
        create = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": model, "lora_config": lora}
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
