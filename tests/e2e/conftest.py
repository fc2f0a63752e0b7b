"""Servers for end-to-end tests: the real command, the real SDK; one SmolLM2 server for all that do not kill theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker

from openrl_recipes.local_server import Endpoint
from support import tiny
from support.proxied import local_server
from support.real_server import client, data_dir_with_models, vllm_arguments
from support.tokenizers import save_byte_tokenizer

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def smol_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A server with the embedded default model and a data folder of its own; sampled by vLLM in `make test-vllm`."""
    data_dir = data_dir_with_models(tmp_path_factory.mktemp("smol"))
    arguments = ["--data-dir", str(data_dir), "--alias", f"test/stand-in={SMOL}", *vllm_arguments()]
    with local_server(data_dir / "server.log", arguments) as endpoint:
        yield endpoint


@pytest.fixture
def smol(smol_server: Endpoint) -> Iterator[tinker.ServiceClient]:
    service = client(smol_server)
    yield service
    service.close("success")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer, as a folder to serve."""
    folder = tiny.build(tmp_path_factory.mktemp("models") / "tiny", "llama")
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture
def tiny_arguments(tiny_model: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of a server of the tiny model with a data folder that outlives it."""
    return lambda *more: ["--data-dir", str(tmp_path / "data"), "--model", str(tiny_model), "--dtype", "float32", *more]
