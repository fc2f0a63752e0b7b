"""5.9 through the real SDK: a loss that runs on the server gives what the same function gives in the client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from support import losses
from support.real_server import KillableServer, client, ints

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = "local/tiny"


def data(name: str) -> list[types.Datum]:
    rng = np.random.default_rng(4)
    made: list[types.Datum] = []
    for n in (6, 11, 9):
        ranks = losses.LOSSES[name][1]
        shape = (n,) if ranks["logprobs"] == 1 else (n, 3)
        inputs = {"target_tokens": torch.tensor(rng.integers(3, 90, shape))}
        for key, rank in ranks.items():
            if key not in ("logprobs", "target_tokens"):
                inputs[key] = torch.tensor(rng.normal(0, 1, [(), (n,), shape][rank]), dtype=torch.float32)
        made.append(types.Datum(ints(rng.integers(3, 90, n).tolist()), inputs))
    return made


def in_the_client(
    name: str,
) -> Callable[[list[types.Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]:
    """The same loss over all datums, for `forward_backward_custom` with a callable."""
    fn, ranks = losses.LOSSES[name]

    def total(batch: list[types.Datum], lps: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        values: list[torch.Tensor] = []
        metrics: dict[str, float] = {}
        for datum, lp in zip(batch, lps, strict=True):
            loss, found = fn(lp, *(datum.loss_fn_inputs[key].to_torch() for key in list(ranks)[1:]))
            values.append(loss)
            for key, value in found.items():
                part = float(value.detach()) / (len(lps) if key.endswith(":mean") else 1)
                metrics[key] = metrics.get(key, 0.0) + part
        return torch.stack(values).sum(), metrics

    return total


@pytest.mark.parametrize("name", ["clipped", "preference", "shaped", "distilled"])
def test_a_handle_runs_on_the_server_and_agrees_with_the_client(
    name: str, tiny_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Same loss, metrics, logprobs and step; and again after the server was killed and started anew."""
    fn, ranks = losses.LOSSES[name]
    with KillableServer(tiny_arguments(), tmp_path / "log") as server:
        service = client(server.endpoint)
        handle = service.create_custom_loss(fn, ranks).result()
        assert handle.loss_id
        trainers = [service.create_lora_training_client(MODEL, rank=4, seed=3).result() for _ in range(2)]
        for again in (False, True):
            here = trainers[0].forward_backward_custom(data(name), handle).result()
            there = trainers[1].forward_backward_custom(data(name), in_the_client(name)).result()
            expected = {key: there.metrics[key] for key in here.metrics}
            assert here.metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)
            assert there.metrics.keys() - here.metrics.keys() == {"surrogate_loss:sum", "tokens:sum"}
            for a, b in zip(here.loss_fn_outputs, there.loss_fn_outputs, strict=True):
                assert a["logprobs"].shape == b["logprobs"].shape
                np.testing.assert_allclose(a["logprobs"].data, b["logprobs"].data, rtol=1e-5, atol=1e-5)
            steps = [trainer.optim_step(types.AdamParams(learning_rate=1e-2)) for trainer in trainers]
            norms = [step.result().metrics["grad_norm:mean"] for step in steps]
            assert norms[0] == pytest.approx(norms[1], rel=1e-4)
            assert norms[0] > 0
            if not again and name == "clipped":
                server.kill()
                server.start()
        service.close("success")


def test_what_the_server_does_not_run_fails_with_the_nodes_name(
    tiny_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The SDK traces more than is allowed here; the answer names the node, and a callable still runs in the client."""

    def random(logprobs: torch.Tensor) -> losses.Answer:
        return (logprobs * torch.rand_like(logprobs)).sum(), {}

    def infinite(logprobs: torch.Tensor) -> losses.Answer:
        return (logprobs * 1e30).exp().sum() - (logprobs * -1e30).exp().sum(), {}

    with KillableServer(tiny_arguments(), tmp_path / "log") as server:
        service = client(server.endpoint)
        with pytest.raises(tinker.RequestFailedError, match="rand_like"):
            service.create_custom_loss(random, {"logprobs": 1}).result()
        trainer = service.create_lora_training_client(MODEL, rank=4, seed=3).result()
        handle = service.create_custom_loss(infinite, {"logprobs": 1}).result()
        with pytest.raises(tinker.RequestFailedError, match="not finite"):
            trainer.forward_backward_custom(data("weighted"), handle).result()
        assert trainer.optim_step(types.AdamParams()).result().metrics["grad_norm:mean"] == 0
        service.close("success")
