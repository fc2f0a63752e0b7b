"""Two base models of different families and three runs at once, by the real SDK: side by side where memory allows, by
turns where it does not. Each run's losses are those that it has alone."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from support import tiny
from support.real_server import KillableServer, client, datum, ints
from support.tokenizers import save_byte_tokenizer

LLAMA, QWEN = "local/tiny", "local/other"
STEPS = 4


@dataclass(frozen=True)
class Job:
    base_model: str
    seed: int

    def run(self, service: tinker.ServiceClient, half_way: Callable[[], object]) -> list[float]:
        """The losses of a few steps; `half_way` is called after half of them."""
        trainer = service.create_lora_training_client(self.base_model, rank=4, seed=self.seed).result()
        tokens = np.random.default_rng(self.seed).integers(3, tiny.VOCAB, size=24).tolist()
        losses: list[float] = []
        for step in range(STEPS):
            if step == STEPS // 2:
                half_way()
            passed = trainer.forward_backward([datum(tokens)], "cross_entropy")
            stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
            losses.append(passed.result().metrics["loss:sum"])
            stepped.result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        drawn = sampler.sample(ints(tokens[:4]), 1, types.SamplingParams(max_tokens=3, seed=1)).result()
        assert len(drawn.sequences[0].tokens) > 0
        return losses


JOBS = (Job(LLAMA, 1), Job(LLAMA, 2), Job(QWEN, 3))


def together(server: KillableServer) -> list[list[float]]:
    """All jobs at once, each with a client of its own; half way they wait for each other."""
    meeting = threading.Barrier(len(JOBS))

    def work(job: Job) -> list[float]:
        service = client(server.endpoint)
        try:
            return job.run(service, lambda: meeting.wait(120))
        finally:
            service.close("success")

    with ThreadPoolExecutor(len(JOBS)) as pool:
        return list(pool.map(work, JOBS))


def get(server: KillableServer, path: str) -> Any:
    request = urllib.request.Request(f"{server.own.base_url}/api/v1/{path}")
    request.add_header("X-API-Key", server.own.api_key)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def names(server: KillableServer) -> set[str | None]:
    """What the server says that it serves."""
    rest = tinker.RestClient(base_url=server.endpoint.base_url, api_key=server.endpoint.api_key)
    return {model.model_name for model in rest.get_server_capabilities().result().supported_models}


def models(server: KillableServer) -> dict[str, dict[str, Any]]:
    return {model["name"]: model for model in get(server, "status")["models"]}


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    """A tiny model of another family, in the model store of the data folder, for the server to find."""
    store = tmp_path / "data" / "models"
    store.mkdir(parents=True)
    folder = tiny.build(store / "other", "qwen3", seed=5)
    save_byte_tokenizer(folder)
    return folder


@pytest.mark.timeout(600)
def test_three_runs_on_two_base_models_at_once(
    tiny_arguments: Callable[..., list[str]],
    other_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Listed models that fit are both in memory; with room for one, and the other only allowed, they take turns."""
    with KillableServer(tiny_arguments("--model", str(other_model)), tmp_path / "both.log") as server:
        service = client(server.endpoint)
        alone = [job.run(service, lambda: None) for job in JOBS]
        service.close("success")
        assert names(server) == {LLAMA, QWEN}
        np.testing.assert_allclose(together(server), alone, rtol=0, atol=1e-5)
        assert [model["state"] for model in models(server).values()] == ["ready", "ready"]

    monkeypatch.setenv("OPENRL_MODEL_MEMORY_BYTES", str(3 << 29))  # one of them needs a little over 1 GiB
    monkeypatch.setenv("OPENRL_MODEL_TURN_SECONDS", "0.5")
    with KillableServer(tiny_arguments("--allow-models", "local/*"), tmp_path / "turns.log") as server:
        assert models(server)[QWEN]["state"] == "asleep"
        assert {LLAMA, QWEN} <= names(server)
        np.testing.assert_allclose(together(server), alone, rtol=0, atol=1e-5)
        assert sorted(model["state"] for model in models(server).values()) != ["ready", "ready"]
        service = client(server.endpoint)
        with pytest.raises(tinker.BadRequestError, match=r"'org/unknown' is not served here.*local/\*"):
            service.create_lora_training_client("org/unknown", rank=4).result()
        service.close("success")
