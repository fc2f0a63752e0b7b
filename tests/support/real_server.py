"""Helpers around a real server and the real SDK."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tinker
from tinker import types

from openrl.settings import load
from openrl_recipes.local_server import Endpoint, free_port, openrl_command
from support.proxied import PROXIED, in_front_of


def data_dir_with_models(folder: Path) -> Path:
    """A fresh data folder that shares the user's pulled models, which `make test` has put there."""
    models = load({}, None).settings.data_dir / "models"
    assert (models / "smollm2-135m-instruct").exists(), "run: openrl models pull smollm2-135m-instruct"
    (folder / "models").symlink_to(models)
    return folder


def vllm_arguments() -> list[str]:
    """Options of a server whose samples vLLM draws, if E2E_VLLM_PYTHON names a Python that has it; else none. The
    other half is on E2E_BACKEND, the CPU by default."""
    python, backend = os.environ.get("E2E_VLLM_PYTHON"), os.environ.get("E2E_BACKEND", "cpu")
    return [] if not python else ["--backend", backend, "--sampler", "vllm", "--vllm-python", python]


def sampler_state(endpoint: Endpoint) -> dict[str, Any]:
    """What a server says of the sampler of its first model, if that works apart."""
    request = urllib.request.Request(f"{endpoint.base_url}/api/v1/status", headers={"X-API-Key": endpoint.api_key})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["models"][0]["sampler"]


def client(endpoint: Endpoint) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=endpoint.base_url, api_key=endpoint.api_key)


class KillableServer:
    """`openrl serve` on a fixed port, to be killed and started again on the same data folder.

    `endpoint` is where clients go: a proxy before it, with E2E_REMOTE=1.
    """

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        port = free_port()
        self.own = self.endpoint = Endpoint(f"http://127.0.0.1:{port}", "tml-test-key-of-at-least-some-length")
        self._proxy = ExitStack()
        self._command = [openrl_command(), "serve", "--port", str(port), *arguments]
        self._log = log
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> KillableServer:
        self.start()
        if PROXIED:
            self.endpoint = self._proxy.enter_context(
                in_front_of(self.own, self._log.with_name(f"proxy-{self._log.stem}"))
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._proxy.close()
        self.interrupt()

    def start(self) -> None:
        environment = os.environ | {"OPENRL_API_KEY": self.endpoint.api_key}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self._log.read_text()
            try:
                urllib.request.urlopen(f"{self.own.base_url}/api/v1/healthz", timeout=5).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"the server does not answer:\n{self._log.read_text()}")

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        """kill -9 of the daemon; its workers must end on their own."""
        workers = self.workers()
        self.process.kill()
        self.process.wait(10)
        gone, alive = psutil.wait_procs(workers, timeout=20)
        assert not alive, f"workers outlived their daemon: {alive}, ended: {gone}"

    def terminate(self) -> float:
        """SIGTERM, as an orchestrator sends it; returns the seconds until the process had ended, with exit code 0."""
        workers = self.workers()
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0
        took = time.monotonic() - start
        _, alive = psutil.wait_procs(workers, timeout=5)
        assert not alive, f"workers outlived their daemon: {alive}"
        return took

    def interrupt(self) -> int:
        """Ctrl-C once; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def datum(tokens: Sequence[int], prompt: int = 0) -> types.Datum:
    """A cross-entropy datum over `tokens`, whose first `prompt` tokens have weight 0."""
    weights = [0.0] * max(prompt - 1, 0) + [1.0] * (len(tokens) - max(prompt, 1))
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:], np.int64), "weights": np.array(weights, np.float32)},
    )


def logprobs(output: types.ForwardBackwardOutput, index: int = 0) -> np.ndarray[Any, Any]:
    """The float32 logprobs of one datum of a result."""
    return np.array(output.loss_fn_outputs[index]["logprobs"].data, np.float32)


def ints(tokens: Sequence[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))
