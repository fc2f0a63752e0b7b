"""The command line: what each command prints, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from openrl import setting_table, settings, version
from openrl.app_events import Listening, ModelFailed, ModelProgress, ModelReady, Stopping
from openrl.errors import ModelError, NotReady, OpenRLError, SettingsError, Unauthorized
from openrl.types import DeviceReport
from openrl_cli import checks
from openrl_cli.checks import State
from openrl_cli.main import app, main
from openrl_cli.progress import ModelBars
from openrl_cli.serve import Display, export_lines

KEY = "tml-0123456789abcdef"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without settings, models or hub."""
    for name in [name for name in os.environ if name.startswith("OPENRL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENRL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def run(*arguments: str) -> str:
    """What a command prints. Its own errors come through."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_version() -> None:
    assert run("version") == f"openrl {version.VERSION}\n"


def test_help_names_the_commands_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, openrl_cli.main\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'starlette', 'uvicorn', 'sqlite3', 'httpx', 'pydantic'}\n"
        "print(heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    text = run("--help")
    assert all(name in text for name in ("serve", "models", "status", "config", "doctor", "bench", "version"))


# ---- config ----


def test_config_tells_where_values_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENRL_PORT", "8123")
    monkeypatch.setenv("OPENRL_API_KEY", KEY)
    (tmp_path / "my.toml").write_text("[engine]\nthreads = 3\n")
    rows = {row["key"]: row for row in json.loads(run("config", "--json", "--config", str(tmp_path / "my.toml")))}
    assert rows["server.port"] == {"key": "server.port", "value": 8123, "origin": "env OPENRL_PORT"}
    assert rows["engine.threads"]["origin"] == f"file {tmp_path / 'my.toml'}"
    assert rows["engine.dtype"] == {"key": "engine.dtype", "value": "auto", "origin": "default"}
    table = run("config", "--config", str(tmp_path / "my.toml"))
    assert "env OPENRL_PORT" in table
    assert KEY not in table + json.dumps(rows)


def test_config_prints_the_page() -> None:
    assert run("config", "--markdown") == setting_table.reference()


# ---- models ----


def test_models_list_and_show() -> None:
    listed = json.loads(run("models", "list", "--json"))
    assert [model["source"] for model in listed] == ["smollm2-135m-instruct", "gemma-3-270m"]
    assert not any(model["ready"] for model in listed)
    assert "93 MB to fetch" in run("models", "list")
    shown = json.loads(run("models", "show", "gemma-3-270m", "--json"))
    assert (shown["name"], shown["tokenizer_in_hub_cache"]) == ("google/gemma-3-270m", False)
    assert "Gemma Terms" in run("models", "show", "google/gemma-3-270m")


def test_models_alias(tmp_path: Path) -> None:
    assert run("models", "alias", "Qwen/Qwen3-4B=smollm2-135m-instruct") == "Qwen/Qwen3-4B = smollm2-135m-instruct\n"
    assert "Qwen/Qwen3-4B" in run("models", "list")
    assert "Qwen/Qwen3-4B" in settings.load({}).settings.models[0].aliases
    assert run("models", "alias", "--remove", "Qwen/Qwen3-4B") == ""
    with pytest.raises(ModelError, match="NAME=MODEL"):
        run("models", "alias", "Qwen/Qwen3-4B")


def test_models_pull_takes_any_source_and_rm_only_what_is_ours(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    assert f"local/tiny is ready in {folder}" in run("models", "pull", str(folder))
    with pytest.raises(ModelError, match="not on this machine"):
        run("models", "rm", "gemma-3-270m")
    with pytest.raises(ModelError, match="is not a model"):
        run("models", "pull", "nonsense")


# ---- status ----


class FakeServer(BaseHTTPRequestHandler):
    """Answers GET /api/v1/status to whoever has the key."""

    picture: Any = None

    def do_GET(self) -> None:
        known = self.path == "/api/v1/status"
        status = 404 if not known else 200 if self.headers["X-API-Key"] == KEY else 401
        body = json.dumps(self.picture if status == 200 else {}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


READY = {"state": "ready", "detail": "", "backend": "cpu", "device": "cpu", "dtype": "float32"}
LOADING = {"state": "loading", "detail": "converting", "backend": None, "device": None, "dtype": None}
PICTURE = {
    "version": "9.9",
    "uptime_s": 7200.0,
    "models": [{"name": "a/b", "alias_of": None, **READY}, {"name": "x/y", "alias_of": "a/b", **LOADING}],
    "runs": [{"id": "s:train:0", "base_model": "a/b", "state": "live", "rank": 16, "next_seq": 7, "queued": 2}],
    "queue": {"train": 3, "sample": 5},
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(FakeServer, "picture", PICTURE)
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_status_shows_models_runs_and_queue(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENRL_API_KEY", KEY)
    monkeypatch.setenv("OPENRL_PORT", server.rpartition(":")[2])
    text = run("status")
    for part in (
        "9.9",
        "2.0 h",
        "3 training requests, 5 samples",
        "x/y (alias of a/b)",
        "loading: converting",
        "s:train:0",
    ):
        assert part in text
    assert json.loads(run("status", "--json", "--url", server)) == PICTURE


def test_status_says_what_is_wrong(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unauthorized, match="OPENRL_API_KEY"):
        run("status", "--url", server)
    monkeypatch.setenv("OPENRL_API_KEY", KEY)
    with pytest.raises(OpenRLError, match="status 404"):
        run("status", "--url", f"{server}/other")
    with pytest.raises(NotReady, match="openrl serve"):
        run("status", "--url", "http://127.0.0.1:9")


# ---- serve ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "http"], ["server.port", "flag --port", "http"]),
        (["--dtype", "float16"], ["engine.dtype", "float16"]),
        (["--host", "0.0.0.0", "--no-auth"], ["server.host", "--no-auth"]),
        (["--model", "./nowhere"], ["./nowhere", "gemma-3-270m"]),
        (["--alias", "x"], ["aliases", "NAME=MODEL"]),
    ],
)
def test_serve_refuses_bad_settings_before_anything_is_loaded(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(OpenRLError) as caught:
        run("serve", *arguments)
    assert all(word in str(caught.value) for word in words)


def test_serve_says_when_the_port_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrl.telemetry.logs.setup", lambda *_args, **_kwargs: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"port {port} on 127.0.0.1 is in use.*--port {port + 1}"):
            run("serve", "--port", str(port))


def test_what_serve_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = settings.load({}).settings
    report = DeviceReport("cpu", "cpu", "bfloat16", 2, 3 << 29)
    with ModelBars() as bars:
        display = Display(found, KEY, bars)
        display(Listening("http://127.0.0.1:8000"))
        for done in range(3):
            display(ModelProgress("a/b", "converting", done, 2))
        display(ModelReady("a/b", report, 4.25))
        display(ModelFailed("c/d", "does not fit [really]"))
        display(Stopping())
    shown = capsys.readouterr()
    assert shown.out.splitlines() == export_lines(found, KEY, "http://127.0.0.1:8000")
    for part in ("ready: a/b on cpu (bfloat16, 2 threads, 1.5 GiB) after 4.", "not served: c/d: does not fit [really]"):
        assert part in shown.err
    assert shown.err.count("a/b: converting ...") == 1
    assert "Ctrl-C again" in shown.err


def test_exports_are_what_a_script_needs() -> None:
    embedded = settings.load({}).settings
    lines = export_lines(embedded, KEY, "http://127.0.0.1:8000")
    assert lines[:2] == ["export TINKER_BASE_URL=http://127.0.0.1:8000", f"export TINKER_API_KEY={KEY}"]
    assert lines[2].startswith("export HF_HUB_OFFLINE=1")
    from_hub = settings.load({"models": ["Qwen/Qwen3-0.6B"]}).settings
    assert len(export_lines(from_hub, KEY, "http://x")) == 2
    with_alias = settings.load({"models": ["Qwen/Qwen3-0.6B"], "aliases": ["a/b=Qwen/Qwen3-0.6B"]}).settings
    assert len(export_lines(with_alias, KEY, "http://x")) == 3
    remote = settings.load({"models": ["Qwen/Qwen3-0.6B"], "server.host": "0.0.0.0"}).settings
    assert export_lines(remote, KEY, "http://x")[2].endswith("export HF_ENDPOINT=http://x/hf")


# ---- doctor ----


def test_doctor_checks_port_folder_and_hub(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert checks.port("127.0.0.1", number).state is State.GAP
        assert f"--port {number + 1}" in checks.port("127.0.0.1", number).advice
    assert checks.port("127.0.0.1", 0).state is State.OK
    assert checks.data_folder(tmp_path / "new").state is not State.GAP
    (tmp_path / "file").write_text("")
    assert checks.data_folder(tmp_path / "file").state is State.GAP
    offline = checks.hub_access()
    assert (offline.state, "HF_HUB_OFFLINE" in offline.found) == (State.NOTE, True)
    assert "smollm2-135m-instruct" in offline.advice


def test_doctor_sees_that_a_model_is_missing() -> None:
    (check,) = checks.models(settings.load({}).settings)
    assert (check.state, check.advice) == (State.NOTE, "openrl models pull smollm2-135m-instruct")


def test_doctor_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENRL_PORT", "0")
    found = {check["name"]: check for check in json.loads(run("doctor", "--json"))}
    assert {"system", "engines", "accelerator", "bf16", "memory", "data folder", "pip", "hub", "port"} <= set(found)
    assert "torch" in found["engines"]["found"]
    assert "--dtype auto takes" in found["bf16"]["found"]


# ---- errors ----


def test_errors_end_with_message_advice_and_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["openrl", "models", "show", "[nonsense]"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("error: '[nonsense]' is not a model")
    assert shown[1].startswith("Give the name of an embedded model")
    monkeypatch.setattr(sys, "argv", ["openrl", "config"])
    monkeypatch.setenv("OPENRL_PROT", "1")
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
