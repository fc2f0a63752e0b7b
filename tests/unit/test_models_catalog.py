"""What a user's name for a model means, and under which names it is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrl.errors import ModelError
from openrl.models import aliases, catalog
from openrl.models.catalog import Kind


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("gemma-3-270m", "google/gemma-3-270m"),
        ("google/gemma-3-270m", "google/gemma-3-270m"),
    ],
)
def test_embedded_models_by_their_own_or_served_name(source: str, name: str) -> None:
    spec = catalog.resolve(source)
    assert spec.name == name
    assert spec.aliases == (spec.source,)  # the short name is served too
    assert catalog.kind(source) is Kind.EMBEDDED


def test_pins_are_whole() -> None:
    for model in catalog.EMBEDDED:
        assert len(model.wheels) == len(model.parts)
        assert all(len(wheel.sha256) == 64 for wheel in model.wheels)
        assert len(model.sha256) == 64


def test_a_hub_id_is_its_own_name() -> None:
    spec = catalog.resolve("Qwen/Qwen3-0.6B", ["alias"])
    assert (spec.name, spec.source, spec.aliases) == ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", ("alias",))


def test_a_folder_is_never_served_under_its_path(tmp_path: Path) -> None:
    """T49: names that look like paths break the client's get_tokenizer."""
    spec = catalog.resolve(str(folder(tmp_path / "my model: v2")))
    assert spec.name == "local/my-model-v2"
    assert Path(spec.source).is_absolute()


def test_a_folder_that_looks_like_a_hub_id_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert catalog.kind("org/name") is Kind.FOLDER
    assert catalog.resolve("org/name").name == "local/name"


def test_a_cache_snapshot_keeps_its_repo_name(tmp_path: Path) -> None:
    snapshot = folder(tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / ("a" * 40))
    assert catalog.resolve(str(snapshot)).name == "Qwen/Qwen3-0.6B"


def test_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.Q4_0.gguf").write_bytes(b"GGUF")
    assert catalog.resolve(str(tmp_path / "tiny.Q4_0.gguf")).name == "local/tiny.Q4_0"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("unknown", "no such embedded model"),
        ("./missing", "no such file or folder"),
        ("/missing/folder", "no such file or folder"),
        ("missing.gguf", "no such file or folder"),
        ("a/b/c", "form of a hub id"),
        ("", "no config.json"),
        ("org/na me", "form of a hub id"),
    ],
)
def test_anything_else_is_refused_with_the_legal_forms(
    source: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        catalog.resolve(source)
    assert why in str(caught.value)
    for legal in ("smollm2-135m-instruct", "gemma-3-270m", "config.json", ".gguf", "Qwen/Qwen3-0.6B"):
        assert legal in str(caught.value)


def test_other_files_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        catalog.resolve(str(tmp_path / "weights.bin"))
    with pytest.raises(ModelError, match=r"no config\.json"):
        catalog.resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["a/b/c", "/abs", "./x", "-x", "a b", "", "ä/b", "../x", "a/"])
def test_alias_names_that_a_client_cannot_use_are_refused(name: str) -> None:
    """T49."""
    with pytest.raises(ModelError, match="cannot be the name"):
        catalog.check_alias(name)


@pytest.mark.parametrize("name", ["plain", "Qwen/Qwen3-4B", "Qwen/Qwen3-4B:peft:131072"])
def test_legal_alias_names(name: str) -> None:
    catalog.check_alias(name)


def test_one_name_for_two_models_is_refused(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "a" / "tiny"), folder(tmp_path / "b" / "tiny")
    with pytest.raises(ModelError, match="local/tiny"):
        catalog.resolve_all([str(first), "gemma-3-270m"], {"local/tiny": "gemma-3-270m"}, {})
    with pytest.raises(ModelError, match="local/tiny"):
        catalog.resolve_all([str(first), str(second)], {}, {})


def test_an_alias_may_point_at_an_alias(tmp_path: Path) -> None:
    (spec,) = catalog.resolve_all([str(folder(tmp_path / "tiny"))], {"short": "local/tiny"}, {"org/x": "local/tiny"})
    assert spec.aliases == ("org/x", "short")


def test_saved_aliases(tmp_path: Path) -> None:
    assert aliases.read(tmp_path) == {}
    aliases.add(tmp_path, "Qwen/Qwen3-4B", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert aliases.read(tmp_path) == {"Qwen/Qwen3-4B": "smollm2-135m-instruct"}
    with pytest.raises(ModelError, match="own name"):
        aliases.add(tmp_path, "google/gemma-3-270m", "smollm2-135m-instruct")
    with pytest.raises(ModelError, match="no alias 'x'"):
        aliases.drop(tmp_path, "x")
    aliases.drop(tmp_path, "Qwen/Qwen3-4B")
    assert aliases.read(tmp_path) == {}
    (tmp_path / "aliases.json").write_text("[1]")
    with pytest.raises(ModelError, match="JSON object"):
        aliases.read(tmp_path)
