"""The hub look-alike: what it gives out, what it does not, and that the real client library finds its way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openrl.models.hub_files import HubFiles
from openrl.server.app import create_app
from openrl.types import ModelSpec
from support.fake_daemon import FakeDaemon, server_settings
from support.http import KEY, Http
from support.serving import serving
from support.tokenizers import save_byte_tokenizer

ALIAS = "Qwen/Qwen3.5-4B"
FILES = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.fixture
def hub_files(tmp_path: Path) -> HubFiles:
    """A served model with weights, and one data set beside a secret."""
    model = tmp_path / "models" / "tiny"
    model.mkdir(parents=True)
    save_byte_tokenizer(model)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (model / "model.safetensors").write_bytes(b"weights")
    data = tmp_path / "sets" / "openai" / "gsm8k"
    (data / "main").mkdir(parents=True)
    (data / "README.md").write_text("---\nconfigs: []\n---\n")
    (data / "main" / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (data / ".hidden").write_text("x")
    (tmp_path / "sets" / "secret.txt").write_text("secret")
    (data / "link.txt").symlink_to(tmp_path / "sets" / "secret.txt")
    spec = ModelSpec("local/tiny", str(model), (ALIAS, "meta-llama/Llama-3.2-1B:peft:1", "short"))
    return HubFiles([spec], tmp_path, tmp_path / "sets")


@pytest.fixture
def http(hub_files: HubFiles) -> Http:
    return Http(create_app(FakeDaemon().as_daemon, server_settings(), KEY, hub_files=hub_files), key=None)


@pytest.mark.parametrize(
    "repo",
    [ALIAS, "local/tiny", "short", "meta-llama/Llama-3.2-1B", "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"],
)
def test_files_of_every_served_name_without_a_key(http: Http, repo: str) -> None:
    head = http.call("HEAD", f"//hf/{repo}/resolve/main/tokenizer.json")
    got = http.get(f"//hf/{repo}/resolve/main/tokenizer.json")
    assert (head.status_code, got.status_code, head.content) == (200, 200, b"")
    assert json.loads(got.content)["model"]["type"] == "BPE"
    for name in ("etag", "x-repo-commit", "content-length"):
        assert head.headers[name] == got.headers[name]
    assert int(head.headers["content-length"]) == len(got.content)
    assert len(head.headers["x-repo-commit"]) == 40
    pinned = http.get(f"//hf/{repo}/resolve/{head.headers['x-repo-commit']}/tokenizer.json")
    assert pinned.content == got.content


def test_parts_of_a_file(http: Http) -> None:
    path = "//hf/datasets/openai/gsm8k/resolve/main/main/train.jsonl"
    whole = http.get(path)
    part = http.get(path, headers={"range": "bytes=2-9", "if-range": whole.headers["etag"]})
    assert (part.status_code, part.content) == (206, whole.content[2:10])
    assert part.headers["content-range"] == f"bytes 2-9/{len(whole.content)}"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (f"{ALIAS}/resolve/main/nope.json", "EntryNotFound"),
        (f"{ALIAS}/resolve/main/model.safetensors", "EntryNotFound"),
        (f"{ALIAS}/resolve/main/../../sets/secret.txt", "EntryNotFound"),
        (f"{ALIAS}/resolve/main/%2e%2e/%2e%2e/sets/secret.txt", "EntryNotFound"),
        (f"{ALIAS}/resolve/v2/tokenizer.json", "RevisionNotFound"),
        ("Qwen/Other/resolve/main/tokenizer.json", "RepoNotFound"),
        ("datasets/openai/gsm8k/resolve/main/../../../secret.txt", "EntryNotFound"),
        ("datasets/openai/gsm8k/resolve/main/.hidden", "EntryNotFound"),
        ("datasets/openai/gsm8k/resolve/main/link.txt", "EntryNotFound"),
        ("datasets/openai/gsm8k/resolve/main//etc/passwd", "EntryNotFound"),
        ("datasets/../sets/resolve/main/secret.txt", "RepoNotFound"),
        ("datasets/openai/../resolve/main/secret.txt", "RepoNotFound"),
        ("datasets/openai/none/resolve/main/README.md", "RepoNotFound"),
        ("api/models/Qwen/Other", "RepoNotFound"),
        (f"api/models/{ALIAS}/revision/v2", "RevisionNotFound"),
        (f"api/models/{ALIAS}/tree/main/nope", "EntryNotFound"),
        ("api/whoami-v2/a/b/c", "RepoNotFound"),
        ("nope", "EntryNotFound"),
    ],
)
def test_what_is_not_there_is_named(http: Http, path: str, code: str) -> None:
    answer = http.get(f"//hf/{path}")
    assert (answer.status_code, answer.headers["x-error-code"]) == (404, code)
    assert answer.json()["error"]


def test_nothing_else_opens_without_a_key(http: Http) -> None:
    assert http.get("//hf/../api/v1/status").status_code in (401, 404)
    assert http.get("status").status_code == 401
    assert http.post("//hf/x/y/resolve/main/z").status_code == 405


def test_info_and_tree(http: Http) -> None:
    info = http.get(f"//hf/api/models/{ALIAS}/revision/main").json()
    assert info["id"] == ALIAS
    assert {entry["rfilename"] for entry in info["siblings"]} == FILES
    assert info["sha"] == http.get(f"//hf/api/models/{ALIAS}").json()["sha"]
    top = http.get("//hf/api/datasets/openai/gsm8k/tree/main").json()
    assert [(entry["type"], entry["path"]) for entry in top] == [("directory", "main"), ("file", "README.md")]
    every = http.get("//hf/api/datasets/openai/gsm8k/tree/main?recursive=true").json()
    assert [entry["path"] for entry in every] == ["main", "README.md", "main/train.jsonl"]
    below = http.get("//hf/api/datasets/openai/gsm8k/tree/main/main").json()
    assert [entry["path"] for entry in below] == ["main/train.jsonl"]


def test_paths_info_of_forms_and_json(http: Http) -> None:
    url = "//hf/api/datasets/openai/gsm8k/paths-info/main"
    form = {"content-type": "application/x-www-form-urlencoded"}
    one = http.post(url, b"paths=main%2Ftrain.jsonl&paths=nope&paths=main&expand=False", headers=form)
    other = http.post(url, {"paths": ["main/train.jsonl", "nope", "main"]})
    assert one.json() == other.json()
    assert [(entry["type"], entry["path"]) for entry in one.json()] == [
        ("file", "main/train.jsonl"),
        ("directory", "main"),
    ]


def test_a_changed_file_is_a_new_commit(http: Http, tmp_path: Path) -> None:
    url = "//hf/datasets/openai/gsm8k/resolve/main/README.md"
    before = http.call("HEAD", url).headers
    (tmp_path / "sets/openai/gsm8k/README.md").write_text("other")
    after = http.call("HEAD", url).headers
    assert before["etag"] != after["etag"]
    assert before["x-repo-commit"] != after["x-repo-commit"]


def test_a_model_that_is_not_ready(tmp_path: Path) -> None:
    """A client should try again rather than believe that there is no such repo."""
    gguf = tmp_path / "later.gguf"
    gguf.write_bytes(b"GGUF")
    files = HubFiles([ModelSpec("local/later", str(gguf))], tmp_path, None)
    http = Http(create_app(FakeDaemon().as_daemon, server_settings(), KEY, hub_files=files))
    answer = http.get("//hf/local/later/resolve/main/config.json")
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)


def test_the_real_library_finds_a_tokenizer_with_an_empty_cache(hub_files: HubFiles, tmp_path: Path) -> None:
    """A client on another machine: nothing in its cache, no key, only HF_ENDPOINT."""
    app = create_app(FakeDaemon().as_daemon, server_settings(), KEY, hub_files=hub_files)
    code = (
        "import sys; from transformers import AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "print(tokenizer.encode('<|end|>'), tokenizer.chat_template)\n"
        "from huggingface_hub import HfFileSystem\n"
        "print(HfFileSystem().glob('datasets/openai/gsm8k/**/*.jsonl'))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with serving(app) as url:
        environment |= {"HF_ENDPOINT": f"{url}/hf", "HF_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", code, ALIAS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[95] {{ messages[0].content }}",
        "['datasets/openai/gsm8k/main/train.jsonl']",
    ]
