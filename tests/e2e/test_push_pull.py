"""A run that starts on one server and goes on at another: real servers, real SDK, the real command line.

Two servers of the same tiny model in float32: "laptop" and "cluster". What is compared is every byte of the adapter
and of the optimizer's state, so the tolerance is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file
from tinker import types
from typer.testing import CliRunner

from openrl_cli.main import app
from openrl_recipes.local_server import openrl_command
from support.real_server import KillableServer, client, datum

KEY = "tml-test-key-of-at-least-some-length"  # of every KillableServer
TEXTS = [[5, 9, 11, 40 + i, 7, 23, 61, i + 3, 8] for i in range(10)]


@pytest.fixture
def servers(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[KillableServer, KillableServer]]:
    """Laptop and cluster. The cluster is the default remote; its key is in a variable."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OPENRL_REMOTES", str(tmp_path / "remotes.toml"))
    arguments = ["--model", str(tiny_model), "--dtype", "float32", "--threads", "1"]
    laptop = KillableServer([*arguments, "--data-dir", str(tmp_path / "laptop")], tmp_path / "laptop.log")
    cluster = KillableServer([*arguments, "--data-dir", str(tmp_path / "cluster")], tmp_path / "cluster.log")
    with laptop, cluster:
        monkeypatch.setenv("CLUSTER_KEY", KEY)
        monkeypatch.setenv("OPENRL_API_KEY", KEY)  # of the laptop's server, which was started with it
        openrl("remote", "add", "cluster", cluster.endpoint.base_url, "--token-from", "env:CLUSTER_KEY")
        yield laptop, cluster


def openrl(*arguments: str) -> str:
    """Run a command in this process; what it prints, which for push and pull is a path."""
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


def push(data_dir: Path, what: str, *options: str) -> str:
    return openrl("push", what, "--data-dir", str(data_dir), *options)


def train(run: tinker.TrainingClient, steps: range) -> None:
    for step in steps:
        run.forward_backward([datum(TEXTS[step])], "cross_entropy").result()
        run.optim_step(types.AdamParams(learning_rate=1e-2)).result()


def fresh(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("local/tiny", rank=4, seed=7).result()


def state(data_dir: Path, path: str) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    (folder,) = (data_dir / "checkpoints" / run / kind).glob(f"{name}--*")
    files = ("adapter_model.safetensors", "optimizer.safetensors")
    return {f"{file}:{key}": array for file in files for key, array in load_file(folder / file).items()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for key, array in one.items():
        np.testing.assert_array_equal(array, other[key], err_msg=key)


class Front(KillableServer):
    """`openrl remote cluster` at the address that the laptop's own server had."""

    def __init__(self, laptop: KillableServer, data_dir: Path, log: Path) -> None:
        super().__init__([], log)
        self.own = self.endpoint = laptop.own
        port = self.own.base_url.rpartition(":")[2]
        self._command = [openrl_command(), "remote", "cluster", "--port", port, "--data-dir", str(data_dir)]


def test_a_run_moves_to_the_cluster_and_ends_as_if_it_had_not(
    servers: tuple[KillableServer, KillableServer], tmp_path: Path
) -> None:
    """Five steps here and five there are ten on one server, bit for bit. The script's address and key stay the same:
    first the laptop's own server is there, then the cluster."""
    laptop, _cluster = servers
    service = client(laptop.endpoint)
    alone = fresh(service)
    train(alone, range(10))
    expected = alone.save_state("end").result().path
    moving = fresh(service)
    train(moving, range(5))
    half = moving.save_state("half").result().path
    service.close("success")

    there = push(tmp_path / "laptop", half)

    assert push(tmp_path / "laptop", half) == there, "the same push again finds what it has brought"
    laptop.interrupt()
    with Front(laptop, tmp_path / "front", tmp_path / "front.log") as front:
        service = client(front.endpoint)
        resumed = service.create_training_client_from_state_with_optimizer(there).result()
        train(resumed, range(5, 10))
        end = resumed.save_state("end").result().path
        service.close("success")
        url = front.endpoint.base_url
        copied = push(tmp_path / "front", end, "--from", url, "--to", url)  # both ways through the front
    same(state(tmp_path / "cluster", copied), state(tmp_path / "cluster", end))
    same(state(tmp_path / "cluster", end), state(tmp_path / "laptop", expected))

    laptop.start()
    back = openrl("pull", end, "--data-dir", str(tmp_path / "laptop"))
    same(state(tmp_path / "laptop", back), state(tmp_path / "laptop", expected))


def test_a_run_stands_for_its_newest_training_checkpoint(
    servers: tuple[KillableServer, KillableServer], tmp_path: Path
) -> None:
    laptop, cluster = servers
    service = client(laptop.endpoint)
    run = fresh(service)
    train(run, range(1))
    run.save_state("first").result()
    train(run, range(1, 2))
    run.save_state("second").result()
    run.save_weights_for_sampler("drawn").result()

    there = push(tmp_path / "laptop", run.model_id)

    assert there.endswith("/weights/second")
    train(run, range(2, 3))  # the push has taken no number of the run's
    remote = client(cluster.endpoint)
    weights = remote.create_training_client_from_state(there).result()
    train(weights, range(2, 3))
    for one in (service, remote):
        one.close("success")


def test_a_restart_in_the_middle_is_waited_for(
    servers: tuple[KillableServer, KillableServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiving server is killed while files come in, and started again by someone else: the push goes on."""
    laptop, cluster = servers
    service = client(laptop.endpoint)
    run = fresh(service)
    train(run, range(2))
    saved = run.save_state("kept").result().path
    monkeypatch.setattr("openrl.transfer.copying.PIECE_BYTES", 2048)
    _after_pieces(monkeypatch, 5, lambda: (cluster.kill(), cluster.start()))

    there = push(tmp_path / "laptop", saved)

    same(state(tmp_path / "cluster", there), state(tmp_path / "laptop", saved))
    service.close("success")


def _after_pieces(monkeypatch: pytest.MonkeyPatch, count: int, act: Callable[[], object]) -> None:
    """Call `act` once, when `count` pieces of files have been sent."""
    from openrl_cli.transfer import Bars

    moved, seen = Bars.moved, [0]

    def counting(self: Bars, file: str, at: int) -> None:
        moved(self, file, at)
        seen[0] += 1
        if seen[0] == count:
            act()

    monkeypatch.setattr(Bars, "moved", counting)
