"""A checkpoint's life through the real SDK, the `tinker` CLI and `openrl checkpoints`, on a server of a tiny model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sysconfig
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file
from tinker import types
from transformers import AutoModelForCausalLM

from openrl_recipes.local_server import Endpoint, openrl_command
from support.proxied import local_server
from support.real_server import client, datum, logprobs

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

MODEL = "local/tiny"
TEXT = [5, 30, 41, 7, 77, 12, 60, 33, 9, 21]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(data_dir: Path, tiny_model: Path) -> Iterator[Endpoint]:
    arguments = ["--data-dir", str(data_dir), "--model", str(tiny_model), "--dtype", "float32"]
    with local_server(data_dir / "server.log", arguments) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def service(server: Endpoint) -> Iterator[tinker.ServiceClient]:
    held = client(server)
    yield held
    held.close("success")


@pytest.fixture(scope="module")
def trainer(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A run whose adapter does something, head included."""
    run = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
    for _ in range(3):
        run.forward_backward([datum(TEXT)], "cross_entropy")
        run.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    return run


@pytest.fixture
def rest(server: Endpoint) -> Any:
    return tinker.RestClient(base_url=server.base_url, api_key=server.api_key)


def served(run: tinker.TrainingClient) -> np.ndarray[Any, Any]:
    return logprobs(run.forward([datum(TEXT)], "cross_entropy").result())


def local(model: torch.nn.Module) -> np.ndarray[Any, Any]:
    """The same logprobs from a transformers model."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TEXT[:-1]])).logits[0].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0].numpy()


def run_cli(command: str, *arguments: str, server: Endpoint, expect: int = 0) -> str:
    environment = os.environ | server.environment()
    done = subprocess.run([command, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == expect, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def tinker_cli(server: Endpoint, *arguments: str) -> Any:
    """`tinker --format json ...`."""
    command = str(Path(sysconfig.get_path("scripts")) / "tinker")
    out = run_cli(command, "--format", "json", *arguments, server=server)
    return json.loads(out) if out.strip() else None


def test_rest_client(trainer: tinker.TrainingClient, rest: Any) -> None:
    """E30, E32-E36 and E28 as the SDK's RestClient calls them."""
    path = trainer.save_state("one").result().path
    trainer.save_weights_for_sampler("two").result()
    run = trainer.model_id
    listed = rest.list_checkpoints(run).result().checkpoints
    assert {c.checkpoint_id for c in listed} >= {"weights/one", "sampler_weights/two"}
    mine = rest.list_user_checkpoints(limit=100).result()
    assert mine.cursor.total_count == len(mine.checkpoints)
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    found = next(c for c in rest.list_checkpoints(run).result().checkpoints if c.tinker_path == path)
    assert found.public
    assert found.expires_at is not None
    assert found.size_bytes
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    found = next(c for c in rest.list_checkpoints(run).result().checkpoints if c.tinker_path == path)
    assert not found.public
    assert found.expires_at is None
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_unembed) == (MODEL, 4, True)
    rest.delete_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert path not in {c.tinker_path for c in rest.list_checkpoints(run).result().checkpoints}
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(path).result()


def test_copy_weights(
    service: tinker.ServiceClient, trainer: tinker.TrainingClient, rest: Any, server: Endpoint
) -> None:
    """E29: a copy loads as its source does, after the source is gone; a foreign token is refused."""
    path = trainer.save_state("to-copy").result().path
    copied = rest.copy_weights(path, destination_project_id="p1", ttl_seconds=3600).result()
    assert copied.endswith("/weights/to-copy")
    own = rest.copy_weights(path, destination_project_id="p1", weights_access_token=server.api_key).result()
    assert own not in (path, copied)
    with pytest.raises(tinker.AuthenticationError):
        rest.copy_weights(path, destination_project_id="p1", weights_access_token="tml-someone-else").result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    resumed = service.create_training_client_from_state_with_optimizer(copied).result()
    assert np.abs(served(resumed) - served(trainer)).max() < 1e-6


def test_external_weights(trainer: tinker.TrainingClient, rest: Any, tiny_model: Path, tmp_path: Path) -> None:
    """E26, E31: files that PEFT loads, from URLs that need no key."""
    saved = trainer.save_weights_external("ext", ttl_seconds=7200).result()
    urls = rest.get_external_weights_urls(saved.path).result()
    assert set(urls.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    for name, url in urls.urls.items():
        urllib.request.urlretrieve(url, tmp_path / name)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path).eval()
    assert np.abs(local(model) - served(trainer)).max() < 2e-5


def test_l3_archive(trainer: tinker.TrainingClient, server: Endpoint) -> None:
    """L3 as SDKs up to 0.34 and the cookbook fetch it: a redirect, then plain urllib without a key."""
    path = trainer.save_weights_for_sampler("arch").result().path
    run, checkpoint = path.removeprefix("tinker://").split("/", 1)
    answer = httpx.get(
        f"{server.base_url}/api/v1/training_runs/{run}/checkpoints/{checkpoint}/archive",
        headers={"X-API-Key": server.api_key},
    )
    assert answer.status_code == 302
    url = answer.headers["location"]
    with urllib.request.urlopen(url) as response:
        data = response.read()
        assert int(response.headers["content-length"]) == len(data)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert set(tar.getnames()) == {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"}
    request = urllib.request.Request(url, headers={"Range": "bytes=512-1023"})
    with urllib.request.urlopen(request) as response:
        assert response.status == 206
        assert response.read() == data[512:1024]
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(url.replace("signature=", "signature=0"))


def test_tinker_cli(trainer: tinker.TrainingClient, server: Endpoint, tmp_path: Path) -> None:
    """The checkpoint commands of the `tinker` CLI, but push-hf, which ends at the hub's door."""
    path = trainer.save_state("cli").result().path
    listed = tinker_cli(server, "checkpoint", "list")
    assert path in {c["tinker_path"] for c in listed["checkpoints"]}
    of_run = tinker_cli(server, "checkpoint", "list", "--run-id", trainer.model_id)
    assert path in {c["tinker_path"] for c in of_run["checkpoints"]}
    tinker_cli(server, "checkpoint", "publish", path)
    tinker_cli(server, "checkpoint", "set-ttl", path, "--ttl", "3600")
    info = tinker_cli(server, "checkpoint", "info", path)
    assert info["public"] is True
    assert info["expires_at"]
    tinker_cli(server, "checkpoint", "set-ttl", path, "--remove")
    tinker_cli(server, "checkpoint", "unpublish", path)
    info = tinker_cli(server, "checkpoint", "info", path)
    assert info["public"] is False
    assert not info.get("expires_at")
    tinker_cli(server, "checkpoint", "download", path, "--output", str(tmp_path))
    (folder,) = tmp_path.iterdir()
    tensors = load_file(folder / "adapter_model.safetensors")
    assert "base_model.model.lm_head.lora_A.weight" in tensors
    left = tinker_cli(server, "checkpoint", "list")["checkpoints"]
    assert not any(c["checkpoint_id"] == "external_weights/download" for c in left), "the export is temporary"
    tinker_cli(server, "checkpoint", "delete", path, "--yes")
    assert path not in {c["tinker_path"] for c in tinker_cli(server, "checkpoint", "list")["checkpoints"]}


def test_openrl_cli_beside_the_server(
    service: tinker.ServiceClient,
    trainer: tinker.TrainingClient,
    server: Endpoint,
    data_dir: Path,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """Export and import are the same function as the run, while the server goes on; removal goes through it."""

    def openrl(*arguments: str) -> str:
        flags = ["--data-dir", str(data_dir)]
        environment = os.environ | {"OPENRL_API_KEY": server.api_key}
        done = subprocess.run(
            [openrl_command(), "checkpoints", *arguments, *flags],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    path = trainer.save_weights_for_sampler("out").result().path
    assert path in {c["path"] for c in json.loads(openrl("list", "--json"))}
    openrl("export", path, "--as", "merged", "--base", str(tiny_model), "--out", str(tmp_path / "merged"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ours = served(trainer)
    assert np.abs(local(merged) - ours).max() < 2e-5
    archive = openrl("export", path, "--as", "archive", "--out", str(tmp_path / "tar"))
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    again = openrl("import", str(tmp_path / "unpacked"), "--base", str(tiny_model), "--name", "back")
    resumed = service.create_training_client_from_state_with_optimizer(again).result()
    assert np.abs(served(resumed) - ours).max() < 1e-6

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    made = get_peft_model(base, LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "up_proj"]))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    made.save_pretrained(tmp_path / "peft")
    theirs = openrl("import", str(tmp_path / "peft"), "--base", str(tiny_model))
    foreign = service.create_training_client_from_state(theirs).result()
    assert np.abs(served(foreign) - local(made.eval())).max() < 2e-5
    sampler = service.create_sampling_client(model_path=theirs).result()
    drawn = sampler.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()
    assert np.abs(np.array(drawn[1:], np.float32) - local(made)).max() < 1e-4
    openrl("rm", again, theirs, "--yes")
    assert not {again, theirs} & {c["path"] for c in json.loads(openrl("list", "--json"))}
