"""Training all parameters with the real SDK over `openrl serve`: train, overfit, save, sample, kill, resume."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from openrl_recipes.local_server import Endpoint
from support.real_server import KillableServer, client, datum, ints, logprobs
from support.training import needs_mlx

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MODEL = "local/tiny"
ADAM = types.AdamParams(learning_rate=3e-3)
DATA = [[1, 5, 9, 11, 2], [3, 8, 4, 40, 7]]


def post(endpoint: Endpoint, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{endpoint.base_url}/api/v1/{path}",
        json.dumps(body).encode(),
        {"x-api-key": endpoint.api_key, "content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        if error.code != 408:  # a long poll that ended without a result
            raise
        return {}


def train(trainer: tinker.TrainingClient, steps: int) -> float:
    """The last step's loss per token, measured before it."""
    loss = 0.0
    for _ in range(steps):
        done = trainer.forward_backward([datum(tokens) for tokens in DATA], "cross_entropy")
        step = trainer.optim_step(ADAM)
        loss = done.result().metrics["loss:sum"] / 8
        step.result()
    return loss


@pytest.mark.parametrize("backend", ["cpu", pytest.param("mps", marks=[needs_mlx, pytest.mark.slow])])
def test_f1_f5_f6_f7_a_full_run_from_its_start_to_its_resumption(
    backend: str, tiny_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """F1, F5, F6, F7, C9, S15: rank 0 over the unmodified SDK."""
    with KillableServer(tiny_arguments("--backend", backend), tmp_path / "log") as server:
        service = client(server.endpoint)
        trainer = service.create_lora_training_client(MODEL, rank=0).result()
        info = trainer.get_info()
        assert (info.is_lora, info.lora_rank) == (False, None)
        with pytest.raises(tinker.RequestFailedError, match=f"so does run {trainer.model_id}"):
            service.create_lora_training_client(MODEL, rank=0).result()
        first = train(trainer, 1)
        assert train(trainer, 40) < 0.05 < first
        sampler = trainer.save_weights_and_get_sampling_client().result()
        told = logprobs(trainer.forward([datum(DATA[0])], "cross_entropy").result())
        np.testing.assert_allclose(sampler.compute_logprobs(ints(DATA[0])).result()[1:], told, atol=1e-5)
        path = trainer.save_state("kept").result().path
        train(trainer, 2)
        later = logprobs(trainer.forward([datum(DATA[1])], "cross_entropy").result())

        server.kill()
        server.start()
        again = logprobs(trainer.forward([datum(DATA[1])], "cross_entropy").result())
        np.testing.assert_allclose(again, later, atol=1e-5)
        np.testing.assert_allclose(sampler.compute_logprobs(ints(DATA[0])).result()[1:], told, atol=1e-5)

        rest = tinker.RestClient(base_url=server.endpoint.base_url, api_key=server.endpoint.api_key)
        about = rest.get_weights_info_by_tinker_path(path).result()
        assert (about.is_lora, about.lora_rank) == (False, None)
        service.close("success")
        other = client(server.endpoint)
        resumed = other.create_training_client_from_state_with_optimizer(path).result()
        assert resumed.get_info().is_lora is False
        train(resumed, 2)
        np.testing.assert_allclose(
            logprobs(resumed.forward([datum(DATA[1])], "cross_entropy").result()), later, atol=1e-4
        )
        other.close("success")


def test_f1_no_lora_config_is_a_full_run_too(tiny_arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    """F1: the wire's other word for it, as a raw call."""
    with KillableServer(tiny_arguments(), tmp_path / "log") as server:
        session = post(server.endpoint, "create_session", {"type": "create_session"})["session_id"]
        promise = post(server.endpoint, "create_model", {"session_id": session, "model_seq_id": 0, "base_model": MODEL})
        made: dict[str, Any] = {}
        while "model_id" not in made:
            made = post(server.endpoint, "retrieve_future", {"request_id": promise["request_id"]})
            assert "error" not in made, made
        info = post(server.endpoint, "get_info", {"model_id": made["model_id"]})
        assert (info["is_lora"], info["lora_rank"]) == (False, None)
