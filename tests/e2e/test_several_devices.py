"""`openrl serve --devices 2` over the SDK: the losses of one device, and a rank's death that nobody notices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import tinker
from tinker import types

from support.real_server import KillableServer, client, datum, ints

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "local/tiny"
STEPS = 8
DEVICES = ("--backend", "cpu", "--devices", "2")


def train(service: tinker.ServiceClient, after_step: Callable[[int], None] = lambda _: None) -> list[float]:
    trainer = service.create_lora_training_client(MODEL, rank=4, seed=3).result()
    losses: list[float] = []
    for step in range(STEPS):
        data = [datum([1 + (step + i) % 7, 5, 9, 11, 2 + i]) for i in range(5)]
        loss = trainer.forward_backward(data, "cross_entropy")
        done = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(loss.result().metrics["loss:sum"])
        done.result()
        after_step(step)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    drawn = sampler.sample(ints([1, 5, 9]), 1, types.SamplingParams(max_tokens=4, temperature=0.0)).result()
    service.close("success")
    return [*losses, *(drawn.sequences[0].logprobs or [])]


def ranks(server: KillableServer) -> list[psutil.Process]:
    return [p for p in server.workers() if any("distributed.follower" in word for word in p.cmdline())]


def test_two_processes_train_as_one_and_a_dead_one_is_replaced(
    tiny_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    with KillableServer(tiny_arguments("--backend", "cpu"), tmp_path / "one.log") as server:
        wanted = train(client(server.endpoint))
    with KillableServer(tiny_arguments(*DEVICES), tmp_path / "two.log") as server:
        found = train(client(server.endpoint))
        (first,) = ranks(server)

        def kill_a_rank(step: int) -> None:
            if step == 3:
                ranks(server)[0].kill()

        disturbed = train(client(server.endpoint), kill_a_rank)
        (second,) = ranks(server)
        assert second.pid != first.pid
        assert "cpu, 2 processes" in (tmp_path / "two.log").read_text()
        server.kill()  # checks that no process outlives the daemon
    assert found == pytest.approx(wanted, rel=1e-4)
    assert disturbed == pytest.approx(wanted, rel=1e-4)


def test_all_parameters_are_refused_with_the_reason(tiny_arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    with KillableServer(tiny_arguments(*DEVICES), tmp_path / "two.log") as server:
        train(client(server.endpoint))
        with pytest.raises(tinker.RequestFailedError, match="devices"):
            client(server.endpoint).create_lora_training_client(MODEL, rank=0).result()
