"""SIGTERM, as a rolling restart sends it: nothing accepted is lost, and the process is gone within its grace period."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import tinker
from tinker import types

from support import tiny
from support.real_server import KillableServer, client, datum
from support.tokenizers import save_byte_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODEL = "local/tiny"
GRACE = 20.0
STEPS = 8


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.build(tmp_path_factory.mktemp("models") / "tiny", "llama")
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KillableServer]:
    monkeypatch.setenv("OPENRL_SHUTDOWN_GRACE", str(GRACE))
    monkeypatch.setenv("OPENRL_LOG_FOLDER", str(tmp_path / "logs"))
    arguments = ["--data-dir", str(tmp_path / "data"), "--model", str(tiny_model), "--dtype", "float32"]
    with KillableServer(arguments, tmp_path / "log") as running:
        yield running


def train(service: tinker.ServiceClient, after_submit: Callable[[int], None]) -> list[float]:
    """Pipelined steps: pass and step are under way when `after_submit` is called. Returns the losses."""
    trainer = service.create_lora_training_client(MODEL, rank=4, seed=3).result()
    losses: list[float] = []
    for step in range(STEPS):
        data = [datum([1 + (step + i) % 7, 5, 9, 11, 2 + i]) for i in range(4)]
        loss = trainer.forward_backward(data, "cross_entropy")
        done = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        after_submit(step)
        losses.append(loss.result().metrics["loss:sum"])
        done.result()
    return losses


def ask(server: KillableServer, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any, str | None]:
    """Status, JSON body and `Retry-After` of one call, on a connection of its own."""
    request = urllib.request.Request(
        f"{server.endpoint.base_url}/api/v1/{path}",
        None if body is None else json.dumps(body).encode(),
        {"X-API-Key": server.endpoint.api_key, "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, json.loads(answer.read()), answer.headers["retry-after"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), error.headers["retry-after"]


def wait_ready(server: KillableServer) -> None:
    deadline = time.monotonic() + 60
    while ask(server, "readyz")[0] != 200:
        assert time.monotonic() < deadline, ask(server, "readyz")
        time.sleep(0.05)


@contextmanager
def frozen(server: KillableServer) -> Generator[Callable[[], None]]:
    """The worker stands still, as in a long pass, until the yielded function is called."""
    worker = server.workers()[0]
    worker.suspend()
    try:
        yield worker.resume
    finally:
        with suppress(psutil.NoSuchProcess):
            worker.resume()


def replayed(tmp_path: Path) -> int:
    """Lines of the daemon's log that tell of a replay."""
    log = tmp_path / "logs" / "daemon.jsonl"
    return sum("replaying" in line for line in log.read_text().splitlines())


def test_a_rolling_restart_is_not_noticed_by_the_training_loop(server: KillableServer, tmp_path: Path) -> None:
    """SIGTERM in the middle of a pipelined loop, and a new server on the same folder: the same losses, no error; the
    exits took less than the grace period, and what the first server wrote down did not have to be computed again."""
    undisturbed = train(client(server.endpoint), lambda step: None)
    exits: list[float] = []

    def roll() -> None:
        exits.append(server.terminate())
        server.start()

    rolling: list[threading.Thread] = []

    def maybe_roll(step: int) -> None:
        if step in (2, 5):
            if rolling:
                rolling[-1].join()
            rolling.append(threading.Thread(target=roll))
            rolling[-1].start()

    disturbed = train(client(server.endpoint), maybe_roll)
    for thread in rolling:
        thread.join()
    assert disturbed == pytest.approx(undisturbed, rel=1e-5)
    assert len(exits) == 2
    assert max(exits) < GRACE, exits
    assert replayed(tmp_path) == 0


def test_while_it_stops_it_says_so_and_still_gives_out_results(server: KillableServer) -> None:
    """SIGTERM during a pass: not ready at once, new work 503 with Retry-After, and the pass's result arrives."""
    wait_ready(server)
    trainer = client(server.endpoint).create_lora_training_client(MODEL, rank=4, seed=3).result()
    with frozen(server) as go_on:
        passing = trainer.forward_backward([datum([1, 5, 9])], "cross_entropy")
        time.sleep(0.5)
        stopping = threading.Thread(target=server.terminate)
        stopping.start()
        time.sleep(0.3)
        status, body, retry = ask(server, "readyz")
        assert (status, body["status"], body["reasons"], retry) == (503, "not ready", ["stopping"], "2")
        assert ask(server, "healthz")[0] == 200
        session = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
        status, body, retry = ask(server, "create_session", session)
        assert (status, retry) == (503, "2"), body
        go_on()
        assert passing.result(timeout=30).metrics["loss:sum"] > 0, "it has to come from the server that stops"
    stopping.join()


def test_a_pass_longer_than_the_grace_period_is_cut_and_runs_again(
    server: KillableServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grace period holds whatever is under way; the pass was accepted, so the next server ends it."""
    server.terminate()
    monkeypatch.setenv("OPENRL_SHUTDOWN_GRACE", "2")
    server.start()
    wait_ready(server)
    trainer = client(server.endpoint).create_lora_training_client(MODEL, rank=4, seed=3).result()
    first = trainer.forward_backward([datum([1, 5, 9])], "cross_entropy").result().metrics["loss:sum"]
    with frozen(server):
        passing = trainer.forward_backward([datum([1, 5, 9])], "cross_entropy")
        time.sleep(0.5)
        assert server.terminate() < 4
    server.start()
    assert passing.result().metrics["loss:sum"] == pytest.approx(first, rel=1e-6)
    trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
