"""Models of the hub: what the cache holds, and what is said when the hub cannot be had. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from openrl.errors import ModelError
from openrl.models import catalog, hub, prepare, store

COMMIT = "c" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that may not be asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def snapshot(cache: Path, *files: str) -> Path:
    repo = cache / "models--org--name"
    folder = repo / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for name in files:
        (folder / name).write_text("{}")
    return folder


def test_a_whole_snapshot_is_used_without_asking_the_hub(cache: Path, tmp_path: Path) -> None:
    folder = snapshot(cache, "config.json", "model.safetensors")
    spec = catalog.resolve("org/name")
    assert store.locate(spec, tmp_path) == folder
    assert prepare.prepare(spec, tmp_path, lambda _step: None) == folder
    assert [model.spec.name for model in store.stored(tmp_path)][-1] == "org/name"


def test_sharded_weights_must_all_be_there(cache: Path) -> None:
    folder = snapshot(cache, "config.json", "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert hub.cached_snapshot("org/name") is None
    (folder / "model-2.safetensors").write_text("")
    assert hub.cached_snapshot("org/name") == folder


def test_offline_and_not_in_the_cache(cache: Path) -> None:
    with pytest.raises(ModelError, match="not in the local cache") as caught:
        hub.download("org/name", lambda _step: None)
    assert "openrl models list" in caught.value.hint
    assert not list(cache.glob("models--*"))


def test_the_cache_is_not_ours_to_clean(cache: Path, tmp_path: Path) -> None:
    snapshot(cache, "config.json", "model.safetensors")
    with pytest.raises(ModelError, match="hf cache rm model/org/name"):
        store.remove(store.find("org/name", tmp_path), tmp_path)


# ---- a hub on this machine ----

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights" * 5000,
    "pytorch_model.bin": b"never",
    "tokenizer.json": b"[]",
}


class FakeHub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as a download needs, for the one repo org/name."""

    def do_HEAD(self) -> None:
        self._resolve(with_body=False)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/name/tree"):
            entries = [{"type": "file", "path": n, "size": len(c), "oid": etag(c)} for n, c in FILES.items()]
            self._answer(json.dumps(entries).encode())
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in FILES]
            self._answer(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode())
        else:
            self._resolve(with_body=True)

    def _resolve(self, *, with_body: bool) -> None:
        content = FILES.get(self.path.rpartition("/")[2])
        if content is None or not self.path.startswith("/org/name/resolve/"):
            self._answer(b"", status=404, headers={"X-Error-Code": "RepoNotFound"})
            return
        headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": COMMIT}
        self._answer(content, headers=headers, with_body=with_body)

    def _answer(
        self, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None, with_body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


def etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def downloading(repo: str, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Download in another process: the hub's library reads its variables when it is imported."""
    code = (
        "from openrl.errors import ModelError\n"
        "from openrl.models import hub\n"
        "steps = []\n"
        "try:\n"
        f"    folder = hub.download({repo!r}, steps.append)\n"
        "    print(sorted(path.name for path in folder.iterdir()))\n"
        "    print(steps[-1].stage, steps[-1].done, steps[-1].total)\n"
        "except ModelError as error:\n"
        "    print(error)\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)


def test_download_takes_what_is_needed_and_reports_bytes(endpoint: str, tmp_path: Path) -> None:
    done = downloading("org/name", endpoint, tmp_path)
    wanted = {name: len(content) for name, content in FILES.items() if not name.endswith(".bin")}
    files, progress = done.stdout.splitlines()
    assert files == str(sorted(wanted))
    assert progress == f"downloading {sum(wanted.values())} {sum(wanted.values())}"
    assert "Downloading" not in done.stderr  # no bar but ours


def test_a_repo_that_does_not_exist(endpoint: str, tmp_path: Path) -> None:
    done = downloading("org/other", endpoint, tmp_path)
    assert "the hub has no model org/other, or not for you. Check the spelling" in done.stdout
