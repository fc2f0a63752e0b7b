"""Tokenizers laid into the Hugging Face cache: found offline by name, and nobody else's repo is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openrl.models import hub, hub_cache
from openrl.models.hub_cache import Laid, Outcome

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "hello": 1, "world": 2}, "unk_token": "[UNK]"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a tokenizer of three words."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 3}))
    (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def files(repo: Path) -> set[str]:
    return {path.name for path in (repo / "snapshots").glob("*/*")}


def test_layout_without_weights(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    assert hub_cache.lay(folder, ["Org/Name"], cache) == (Laid("Org/Name", Outcome.LAID),)
    repo = cache / "models--Org--Name"
    commit = (repo / "refs" / "main").read_text()
    assert len(commit) == 40
    assert int(commit, 16)
    assert [path.name for path in (repo / "snapshots").iterdir()] == [commit]
    assert files(repo) == {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert hub_cache.is_laid("Org/Name", cache)
    assert hub.cached_snapshot("Org/Name", cache) is None  # no weights: not a model to serve


def test_laying_again_changes_nothing_and_new_files_replace_old(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    hub_cache.lay(folder, ["name"], cache)
    assert hub_cache.lay(folder, ["name"], cache) == (Laid("name", Outcome.CURRENT),)
    (folder / "chat_template.jinja").write_text("new")
    assert hub_cache.lay(folder, ["name"], cache) == (Laid("name", Outcome.LAID),)
    (snapshot,) = (cache / "models--name" / "snapshots").iterdir()
    assert (snapshot / "chat_template.jinja").read_text() == "new"


def test_a_repo_of_somebody_else_is_never_touched(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    foreign = cache / "models--Org--Name" / "snapshots" / ("a" * 40) / "tokenizer.json"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("theirs")
    assert hub_cache.lay(folder, ["Org/Name"], cache) == (Laid("Org/Name", Outcome.FOREIGN),)
    assert foreign.read_text() == "theirs"
    assert not hub_cache.take_up("Org/Name", cache)
    assert foreign.exists()


def test_a_repo_that_the_hub_took_over_is_no_longer_ours(folder: Path, tmp_path: Path) -> None:
    """Online, the hub's library adds the true snapshot to the repo we laid and points main at it."""
    cache = tmp_path / "hub"
    hub_cache.lay(folder, ["Org/Name"], cache)
    repo = cache / "models--Org--Name"
    (repo / "snapshots" / ("b" * 40)).mkdir()
    (repo / "refs" / "main").write_text("b" * 40)
    assert hub_cache.lay(folder, ["Org/Name"], cache) == (Laid("Org/Name", Outcome.FOREIGN),)
    assert not hub_cache.take_up("Org/Name", cache)


def test_taking_up(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    hub_cache.lay(folder, ["Org/Name"], cache)
    assert hub_cache.take_up("Org/Name", cache)
    assert not (cache / "models--Org--Name").exists()
    assert not hub_cache.take_up("Org/Name", cache)


def test_names_lead_where_clients_look() -> None:
    assert hub_cache.repos_of("Qwen/Qwen3-4B:peft:131072") == ("Qwen/Qwen3-4B",)
    assert hub_cache.repos_of("meta-llama/Llama-3.2-1B") == (
        "meta-llama/Llama-3.2-1B",
        "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer",
    )


def test_a_folder_without_tokenizer_lays_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert hub_cache.lay(tmp_path, ["name"], tmp_path / "hub") == ()


def test_the_tokenizer_loads_by_name_offline(folder: Path, tmp_path: Path) -> None:
    """`get_tokenizer()` of the SDK and of the cookbook is AutoTokenizer.from_pretrained(<served name>)."""
    names = ["Org/Name", "plain-name"]
    hub_cache.lay(folder, names, tmp_path / "home" / "hub")
    code = (
        "from transformers import AutoTokenizer\n"
        f"for name in {names!r}:\n"
        "    tokenizer = AutoTokenizer.from_pretrained(name)\n"
        "    text = tokenizer.apply_chat_template([{'role': 'user', 'content': 'hello'}], tokenize=False)\n"
        "    print(tokenizer('hello world').input_ids, text)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[1, 2] hello"] * 2, done.stderr
