"""The real SDK through `openrl serve --backend remote`: the same results, whatever happens to the far server.

The whole suite runs so with E2E_REMOTE=1; here is what an ordinary run should see of it.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from openrl_recipes.local_server import Endpoint, local_server, openrl_command
from support.proxied import in_front_of
from support.real_server import KillableServer, client, datum, ints, logprobs

pytestmark = pytest.mark.e2e

MODEL = "local/tiny"
TEXT = list(range(40, 60))


@pytest.fixture(scope="module")
def far(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("far")
    arguments = ["--data-dir", str(folder / "data"), "--model", str(tiny_model), "--dtype", "float32"]
    with local_server(folder / "log", arguments) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def near(far: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with in_front_of(far, tmp_path_factory.mktemp("near")) as endpoint:
        yield endpoint


def train(endpoint: Endpoint, steps: int, disturb: Callable[[int], Any] = lambda step: None) -> list[float]:
    """The losses of some steps, two of them under way at a time."""
    service = client(endpoint)
    trainer = service.create_lora_training_client(MODEL, rank=4, seed=7).result()
    losses: list[Any] = []
    for step in range(steps):
        disturb(step)
        batch = [datum([*TEXT, step, 2 * step]), datum([9, 8, 7, step + 1])]
        losses.append(trainer.forward_backward(batch, "cross_entropy"))
        updated = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        if step % 2:
            updated.result()
    found = [float(loss.result().metrics["loss:sum"]) for loss in losses]
    service.close("success")
    return found


def test_training_sampling_and_checkpoints_are_those_of_the_far_server(far: Endpoint, near: Endpoint) -> None:
    assert np.allclose(train(near, 4), train(far, 4), rtol=1e-5)
    service = client(near)
    trainer = service.create_lora_training_client(MODEL, rank=4, seed=7).result()
    trainer.forward_backward([datum(TEXT)], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=1e-2))
    path = trainer.save_state("x").result().path
    sampler = trainer.save_weights_and_get_sampling_client().result()
    drawn = sampler.sample(ints(TEXT), 3, types.SamplingParams(max_tokens=8, seed=5)).result()
    assert [len(sequence.tokens) for sequence in drawn.sequences] == [8, 8, 8]
    direct = client(far).create_training_client_from_state_with_optimizer(path).result()
    here, there = (
        logprobs(t.forward([datum(TEXT)], "cross_entropy").result()) for t in (trainer, direct)
    )  # fmt: skip
    assert np.abs(here - there).max() < 1e-5
    service.close("success")


def test_external_weights_come_through(near: Endpoint) -> None:
    """Their signed URLs name this server, since the client may not reach the far one."""
    import httpx

    trainer = client(near).create_lora_training_client(MODEL, rank=4).result()
    path = trainer.save_weights_external("out").result().path
    rest = tinker.RestClient(base_url=near.base_url, api_key=near.api_key)
    urls = rest.get_external_weights_urls(path).result().urls
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls)
    assert all(url.startswith(f"{near.base_url}/remote-files/") for url in urls.values())
    assert json.loads(httpx.get(urls["adapter_config.json"]).content)["r"] == 4


def test_the_status_names_the_remote(far: Endpoint, near: Endpoint) -> None:
    command = [openrl_command(), "status", "--url", near.base_url]
    done = subprocess.run(
        command, env={"OPENRL_API_KEY": near.api_key, "PATH": "/usr/bin:/bin", "HOME": "/tmp"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"({far.base_url}): connected" in done.stdout
    assert MODEL in done.stdout


def test_the_far_server_is_killed_in_the_middle_of_training(
    far: Endpoint, tiny_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The SDK sees nothing of it, and the losses are those of a twin that nothing happened to."""
    with (
        KillableServer(tiny_arguments(), tmp_path / "log") as server,
        in_front_of(server.own, tmp_path / "near") as near,
    ):
        back: list[threading.Thread] = []

        def disturb(step: int) -> None:
            if step == 2:
                server.kill()
                back.append(threading.Thread(target=lambda: (time.sleep(1.5), server.start())))
                back[-1].start()
            elif back:
                back.pop().join()

        assert np.allclose(train(near, 5, disturb), train(far, 5), rtol=1e-4)


def test_local_and_remote_models_in_one_script(
    far: Endpoint, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--route`: the base model's name decides, the script does not change."""
    monkeypatch.setenv("OPENRL_REMOTES", str(tmp_path / "remotes.toml"))
    monkeypatch.setenv("FAR_KEY", far.api_key)
    (tmp_path / "remotes.toml").write_text(f'[remotes.far]\nurl = "{far.base_url}"\ntoken = "env:FAR_KEY"\n')
    model = ["--model", str(tiny_model), "--alias", f"here/tiny={MODEL}", "--dtype", "float32"]
    arguments = ["--data-dir", str(tmp_path / "data"), *model, "--route", "local/*=far"]
    with local_server(tmp_path / "log", arguments) as mixed:
        service = client(mixed)
        names = {m.model_name for m in tinker.RestClient(base_url=mixed.base_url, api_key=mixed.api_key)
                 .get_server_capabilities().result().supported_models}  # fmt: skip
        assert names == {MODEL, "here/tiny"}
        values: list[np.ndarray[Any, Any]] = []
        for base in ("here/tiny", MODEL):
            trainer = service.create_lora_training_client(base, rank=4, seed=3).result()
            trainer.forward_backward([datum(TEXT)], "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=1e-2))
            path = trainer.save_state("x").result().path
            again = service.create_training_client_from_state_with_optimizer(path).result()
            values.append(logprobs(again.forward([datum(TEXT)], "cross_entropy").result()))
            sampler = again.save_weights_and_get_sampling_client().result()
            assert (
                len(sampler.sample(ints(TEXT), 1, types.SamplingParams(max_tokens=4)).result().sequences[0].tokens) == 4
            )
        assert np.abs(values[0] - values[1]).max() < 1e-5
        runs = tinker.RestClient(base_url=far.base_url, api_key=far.api_key).list_training_runs(limit=100).result()
        assert {run.base_model for run in runs.training_runs} == {MODEL}
        service.close("success")
