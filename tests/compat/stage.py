"""What probes work with: a server of the tiny model, and a session in which something has been trained and saved."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

from openrl_recipes.local_server import Endpoint

MODEL = "local/tiny"
PROJECT = "compat"
PROMPT = [1, 5, 9]
RATE = 1e-2
TIMEOUT = 60

# Clients call these on their own, now and then.
_BACKGROUND = ("session_heartbeat", "telemetry", "client/config", "client/dynamic_config", "auth/token", "healthz")


class Server:
    """A running server: where it listens, and which requests it logged while `recording`."""

    def __init__(self, endpoint: Endpoint, logs: Path) -> None:
        self.endpoint = endpoint
        self.recorded: list[str] = []
        self._log = logs / "daemon.jsonl"
        self._read = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Adds to `recorded` the method and path pattern of each request that comes meanwhile, each pattern once."""
        self._new_requests()
        try:
            yield
        finally:
            self.recorded = list(dict.fromkeys([*self.recorded, *self._new_requests()]))

    def _new_requests(self) -> list[str]:
        time.sleep(0.05)  # a line is written after its answer has been sent
        with self._log.open("rb") as log:
            log.seek(self._read)
            text = log.read()
        text = text[: text.rfind(b"\n") + 1]  # the last line may still be in writing
        self._read += len(text)
        seen = [_request(json.loads(line)) for line in text.splitlines()]
        return [request for request in seen if request]


def _request(line: dict[str, Any]) -> str:
    match = re.match(r"([A-Z]+) (/\S*) \d+ ", line["message"]) if line["logger"] == "openrl.access" else None
    if match is None or match[2].removeprefix("/api/v1/") in _BACKGROUND:
        return ""
    path = match[2].removeprefix("/api/v1/")
    for pattern, name in (
        (r"[^/]+:train:[^/]+/checkpoints/[^/]+/[^/]+", "{run}/checkpoints/{ckpt}"),
        (r"[^/]+:train:[^/]+", "{run}"),
        (r"[^/]+:sample:[^/]+", "{sampler}"),
        (r"^(sessions)/(?!search)[^/]+", r"\1/{session}"),
        (r"^(/signed/[^/]+)/.*", r"\1/..."),
    ):
        path = re.sub(pattern, name, path)
    return f"{match[1]} {path}"


@dataclass
class Trained:
    """A run after two steps and a save, and the losses of its next two steps."""

    trainer: tinker.TrainingClient
    state: str
    weights: str
    later: list[float]


class Stage:
    """`client(kind)` gives the client that a name is called on."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.service = self.new_service("compat")
        self._numbers = itertools.count(1)

    def new_service(self, display_name: str) -> tinker.ServiceClient:
        return tinker.ServiceClient(
            user_metadata={"suite": "compat"}, project_id=PROJECT, display_name=display_name, **self.access
        )

    @property
    def access(self) -> dict[str, str]:
        endpoint = self.server.endpoint
        return {"base_url": endpoint.base_url, "api_key": endpoint.api_key}

    def client(self, kind: str) -> Any:
        clients: dict[str, Any] = {
            "ServiceClient": lambda: self.service,
            "TrainingClient": lambda: self.trained.trainer,
            "SamplingClient": lambda: self.sampler,
            "RestClient": lambda: self.rest,
            "AdminClient": lambda: self.admin,
        }
        return clients[kind]()

    def unique(self, word: str) -> str:
        """A name not used before."""
        return f"{word}-{next(self._numbers)}"

    @cached_property
    def session(self) -> str:
        return self.trained.trainer.get_info().model_id.split(":")[0]

    @property
    def run(self) -> str:
        return self.trained.trainer.get_info().model_id

    @cached_property
    def trained(self) -> Trained:
        trainer = self.new_trainer()
        for _ in range(2):
            step(trainer)
        state = trainer.save_state("state").result(timeout=TIMEOUT).path
        weights = trainer.save_weights_for_sampler("weights").result(timeout=TIMEOUT).path
        return Trained(trainer, state, weights, [step(trainer) for _ in range(2)])

    def new_trainer(self) -> tinker.TrainingClient:
        """A run of its own: base model, adapter without effect."""
        return self.service.create_lora_training_client(MODEL, rank=4, seed=7, user_metadata={"n": "1"}).result(TIMEOUT)

    @cached_property
    def base(self) -> tinker.SamplingClient:
        return self.service.create_sampling_client(base_model=MODEL).result(TIMEOUT)

    @cached_property
    def sampler(self) -> tinker.SamplingClient:
        return self.service.create_sampling_client(model_path=self.trained.weights).result(TIMEOUT)

    @cached_property
    def base_logprobs(self) -> list[float]:
        """Of the prompt's tokens after the first, under the base model."""
        return [lp for lp in self.base.compute_logprobs(prompt()).result(TIMEOUT) if lp is not None]

    @cached_property
    def weights_logprobs(self) -> list[float]:
        """The same under the saved sampler weights."""
        return [lp for lp in self.sampler.compute_logprobs(prompt()).result(TIMEOUT) if lp is not None]

    @cached_property
    def rest(self) -> tinker.RestClient:
        return tinker.RestClient(**self.access)

    @cached_property
    def admin(self) -> tinker.AdminClient:
        return tinker.AdminClient(**self.access)

    def save(self) -> str:
        """A fresh training checkpoint."""
        return self.trained.trainer.save_state(self.unique("ckpt")).result(TIMEOUT).path

    def checkpoint(self, path: str) -> types.Checkpoint | None:
        """What the list says of a checkpoint, if it is there."""
        listed = self.rest.list_checkpoints(path.split("/")[2]).result(TIMEOUT).checkpoints
        return next((entry for entry in listed if entry.tinker_path == path), None)

    def cli(
        self, *arguments: str, check: bool = True, typed: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the SDK's command in a folder and home of its own."""
        home = {"HOME": str(self.folder), "TINKER_BASE_URL": self.server.endpoint.base_url}
        key = {"TINKER_API_KEY": self.server.endpoint.api_key}
        tinker_command = [str(Path(sys.executable).with_name("tinker")), *arguments]
        with self.server.recording():
            done = subprocess.run(
                tinker_command,
                env=os.environ | home | key | environment,
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=2 * TIMEOUT,
                check=False,
                input=typed,
            )
        said = (done.stderr or done.stdout).strip()[-300:]
        assert not check or done.returncode == 0, f"exit {done.returncode}: {said}"
        return done

    def cli_json(self, *arguments: str) -> Any:
        return json.loads(self.cli("--format", "json", *arguments).stdout)


def prompt() -> types.ModelInput:
    return types.ModelInput.from_ints(PROMPT)


def datum(tokens: list[int]) -> types.Datum:
    """Cross-entropy over all tokens after the first."""
    targets, weights = np.array(tokens[1:], np.int64), np.ones(len(tokens) - 1, np.float32)
    inputs = {"target_tokens": targets, "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def step(trainer: tinker.TrainingClient) -> float:
    """One step on fixed data; returns the loss before it."""
    loss = trainer.forward_backward([datum([*PROMPT, 11, 2 + i]) for i in range(4)], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=RATE)).result(timeout=TIMEOUT)
    return loss.result(timeout=TIMEOUT).metrics["loss:sum"]


def close(one: Any, other: Any, tolerance: float = 1e-4) -> None:
    """Assert that two arrays of numbers agree."""
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=1e-5)
