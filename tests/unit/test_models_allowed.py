"""Base models that clients may name: by pattern, and never anything that a path could reach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrl.models import catalog, store
from openrl.models.allowed import Allowed
from openrl.models.catalog import Kind
from openrl.models.hub_files import HubFiles
from openrl.types import ModelSpec

SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (path / "model.safetensors").write_bytes(b"")
    return path


def allowed(tmp_path: Path, *patterns: str) -> Allowed:
    return Allowed(patterns, tmp_path / "data")


def test_a_hub_id_must_match(tmp_path: Path) -> None:
    assert allowed(tmp_path, "Qwen/*").find("Qwen/Qwen3-0.6B") == ModelSpec("Qwen/Qwen3-0.6B", "hub:Qwen/Qwen3-0.6B")
    assert allowed(tmp_path, "Qwen/Qwen3-?.6B").find("Qwen/Qwen3-0.6B") is not None
    for pattern in ("qwen/*", "Qwen", "Qwen/Qwen2*"):
        assert allowed(tmp_path, pattern).find("Qwen/Qwen3-0.6B") is None


def test_an_embedded_model_by_either_of_its_names(tmp_path: Path) -> None:
    for pattern in ("*", "smollm2-*", "HuggingFaceTB/*"):
        for name in ("smollm2-135m-instruct", SMOL):
            found = allowed(tmp_path, pattern).find(name)
            assert found is not None
            assert (found.name, found.source) == (SMOL, "smollm2-135m-instruct")
    assert allowed(tmp_path, "google/*").find(SMOL) is None


def test_models_of_the_store_by_the_names_of_their_folders(tmp_path: Path) -> None:
    mine = folder(tmp_path / "data" / "models" / "mine")
    folder(tmp_path / "data" / "models" / ".tmp-half")
    (tmp_path / "data" / "models" / "linked").symlink_to(folder(tmp_path / "elsewhere"))
    every = allowed(tmp_path, "local/*")
    assert every.find("local/mine") == ModelSpec("local/mine", str(mine))
    assert every.find("local/absent") is None
    assert [spec.name for spec in every.known()] == ["local/linked", "local/mine"]
    assert allowed(tmp_path, "Qwen/*").find("local/mine") is None


@pytest.mark.parametrize(
    "name",
    [
        "/etc",
        "./models/x",
        "../x",
        "~/x",
        "models/../x",
        "a/b/c",
        "hub:a/b",
        "x.gguf",
        "",
        "local/..",
        "a/b\n",
        "plain",
    ],
)
def test_paths_and_other_forms_are_no_models_whatever_the_pattern(tmp_path: Path, name: str) -> None:
    assert allowed(tmp_path, "*").find(name) is None


def test_a_hub_id_is_not_taken_for_a_folder_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies under the server's own working folder is nothing for a client to open."""
    folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    found = allowed(tmp_path, "*").find("org/name")
    assert found is not None
    assert catalog.kind(found.source) is Kind.HUB
    assert store.locate(found, tmp_path / "data") is None


def test_what_is_whole_in_the_hubs_cache_is_known(tmp_path: Path, hub_cache: Path) -> None:
    repo = hub_cache / "models--org--name"
    whole = folder(repo / "snapshots" / ("c" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c" * 40)
    every = allowed(tmp_path, "*")
    assert [spec.name for spec in every.known()] == [SMOL, "google/gemma-3-270m", "org/name"]
    assert [spec.name for spec in allowed(tmp_path, "org/*").known()] == ["org/name"]
    assert store.locate(every.known()[-1], tmp_path) == whole


def test_the_user_may_say_that_a_source_is_a_hub_id(tmp_path: Path) -> None:
    assert catalog.resolve("hub:org/name") == ModelSpec("org/name", "hub:org/name")


def test_an_admitted_models_files_are_given_out(tmp_path: Path) -> None:
    """So that a client without a hub finds its tokenizer."""
    mine = folder(tmp_path / "data" / "models" / "mine")
    files = HubFiles([], tmp_path / "data", None)
    assert files.model("local/mine") is None
    files.add(ModelSpec("local/mine", str(mine)))
    found = files.model("local/mine")
    assert found is not None
    assert [file.name for file in found.files] == ["config.json"]
