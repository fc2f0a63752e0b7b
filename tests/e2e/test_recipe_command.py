"""`openrl recipe run` on real servers: a sweep of a real recipe, and a server for the time of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from openrl_recipes.local_server import Endpoint, free_port, openrl_command

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TESTS = Path(__file__).parents[1]


@contextmanager
def started(words: Sequence[str], folder: Path, **variables: str) -> Generator[subprocess.Popen[str]]:
    """`openrl recipe run` in a folder, with a data folder of its own and no server that its settings name."""
    own = {"OPENRL_DATA_DIR": str(folder / "data"), "OPENRL_PORT": str(free_port()), "PYTHONPATH": str(TESTS)}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    command = [openrl_command(), "recipe", "run", *words]
    environment = {**inherited, "COLUMNS": "120", **own, **variables}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True) as run:
        try:
            yield run
        finally:
            if run.poll() is None:  # a test that failed
                run.terminate()


def test_a_sweep_trains_side_by_side_on_one_server(smol_server: Endpoint, tmp_path: Path) -> None:
    words = ["pig_latin", "--parallel", "2", "--sweep", "lr=1e-5,3e-3", "steps=3", "batch=8", "eval-words=4"]
    with started([*words, "--out", "sweep", "--tensorboard"], tmp_path, **smol_server.environment()) as run:
        out, said = run.communicate(timeout=600)
    assert run.returncode == 0, out + said
    assert f"Running against the server at {smol_server.base_url}." in said
    losses: dict[str, list[float]] = {}
    spans: list[tuple[float, float]] = []
    for name in ("lr=1e-5", "lr=3e-3"):
        folder = tmp_path / "sweep" / name
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [record["loss"] for record in records if record["stage"] == "sft"]
        spans.append(((folder / "config.json").stat().st_mtime, (folder / "report.html").stat().st_mtime))
        assert list((folder / "tensorboard").iterdir())
        assert f"{name} done" in " ".join(out.split())
    assert all(len(each) == 3 for each in losses.values())
    assert losses["lr=3e-3"][-1] < losses["lr=1e-5"][-1] - 0.1
    assert max(begin for begin, _ in spans) < min(end for _, end in spans), "they ran one after the other"
    assert (tmp_path / "sweep" / "compare.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "sweep" / "compare.html").read_text()
    assert "lr=1e-5" in page
    assert "Loss (nats a token)" in page


def test_a_server_is_started_for_the_time_of_a_run(tiny_model: Path, tmp_path: Path) -> None:
    with started(["support.fake_recipe", "--model", str(tiny_model), "--mode", "hang"], tmp_path) as run:
        pids = tmp_path / "runs" / "fake" / "pids.json"
        deadline = time.monotonic() + 60
        while not pids.exists():
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        told = json.loads((tmp_path / "runs" / "fake" / "environment.json").read_text())
        with urllib.request.urlopen(f"{told['TINKER_BASE_URL']}/api/v1/healthz", timeout=5) as answer:
            assert answer.status == 200
        left = psutil.Process(run.pid).children(recursive=True)
        assert len(left) >= 3  # the recipe, its child, the server

        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
    assert run.returncode == 130
    assert f"starting `openrl serve --model {tiny_model}` for the time of this run" in said
    ended, running = psutil.wait_procs(left, timeout=5)
    assert not [each for each in running if each.status() != psutil.STATUS_ZOMBIE], ended
    assert (tmp_path / "runs" / "fake" / "server.log").exists()
