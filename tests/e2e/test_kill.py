"""kill -9 at any moment: the SDK's calls go on with the next daemon, with the numbers of an undisturbed run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tinker
from tinker import types

from support.real_server import KillableServer, client, datum, ints

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = "local/tiny"
STEPS = 12


def train(service: tinker.ServiceClient, after_step: Callable[[int], None]) -> list[float]:
    """Twelve pipelined steps; returns the losses."""
    trainer = service.create_lora_training_client(MODEL, rank=4, seed=3).result()
    losses: list[float] = []
    for step in range(STEPS):
        data = [datum([1 + (step + i) % 7, 5, 9, 11, 2 + i]) for i in range(4)]
        loss = trainer.forward_backward(data, "cross_entropy")
        done = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(loss.result().metrics["loss:sum"])
        done.result()
        after_step(step)
    return losses


def test_a_killed_daemon_is_not_noticed_by_the_training_loop(
    tiny_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The daemon is killed in the middle of a pipelined loop and started again: same losses, no error, no repeat."""
    with KillableServer(tiny_arguments(), tmp_path / "log") as server:
        service = client(server.endpoint)
        undisturbed = train(service, lambda step: None)

        def kill_and_restart() -> None:
            server.kill()
            time.sleep(1)
            server.start()

        killer: list[threading.Thread] = []

        def maybe_kill(step: int) -> None:
            if step in (2, 6):
                killer.append(threading.Thread(target=kill_and_restart))
                killer[-1].start()

        disturbed = train(service, maybe_kill)
        for thread in killer:
            thread.join()
        assert disturbed == pytest.approx(undisturbed, rel=1e-5)


def test_a_killed_worker_is_not_noticed_either(tiny_arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    with KillableServer(tiny_arguments(), tmp_path / "log") as server:
        undisturbed = train(client(server.endpoint), lambda step: None)

        def kill_worker(step: int) -> None:
            if step == 4:
                server.workers()[0].kill()

        assert train(client(server.endpoint), kill_worker) == pytest.approx(undisturbed, rel=1e-5)


def test_checkpoints_samplers_and_results_outlive_a_kill(
    tiny_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    with KillableServer(tiny_arguments(), tmp_path / "log") as server:
        service = client(server.endpoint)
        trainer = service.create_lora_training_client(MODEL, rank=4, seed=3).result()
        trainer.forward_backward([datum([1, 5, 9])], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-1)).result()
        path = trainer.save_state("kept").result().path
        sampler = trainer.save_weights_and_get_sampling_client().result()
        before = sampler.compute_logprobs(ints([1, 5, 9])).result()
        server.kill()
        server.start()
        assert sampler.compute_logprobs(ints([1, 5, 9])).result()[1:] == pytest.approx(before[1:], rel=1e-6)
        resumed = service.create_training_client_from_state(path).result()
        assert resumed.get_info().lora_rank == 4


def test_ctrl_c_once_ends_gracefully_and_the_run_goes_on_later(
    tiny_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    with KillableServer(tiny_arguments(), tmp_path / "log") as server:
        trainer = client(server.endpoint).create_lora_training_client(MODEL, rank=4, seed=3).result()
        trainer.forward_backward([datum([1, 5, 9])], "cross_entropy").result()
        start = time.monotonic()
        assert server.interrupt() == 0
        assert time.monotonic() - start < 15
        server.start()
        assert trainer.optim_step(types.AdamParams()).result().metrics["grad_norm:mean"] > 0
