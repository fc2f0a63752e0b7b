"""What tests with the real vLLM share: its models are opened once, since it takes long to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.vllm import VllmWorld, vllm_python


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmWorld]:
    """A tiny llama with tied embeddings."""
    world = VllmWorld(tmp_path_factory.mktemp("vllm-llama"), "llama", vllm_python(), head_dim=32)
    yield world
    world.close()
