"""`openrl remote`, `push`, `pull` and `status --remote` in this process, against real servers where it matters."""

from __future__ import annotations

import contextlib
import datetime
import functools
import http.server
import json
import os
import pty
import stat
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from typer.testing import CliRunner, Result

from openrl import keyrings, remotes
from openrl.checkpoints.manifest import digest_files
from openrl.errors import BadRequest, OpenRLError, SettingsError, Unauthorized
from openrl_cli import serve as serving
from openrl_cli.main import app
from openrl_recipes.local_server import openrl_command
from support.http import KEY
from support.live import LiveServer, folder_of, lay_checkpoint

OTHER = "tml-another-key-of-someone"


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration folder of the test's own, and no system keyring."""
    folder = tmp_path / "config"
    monkeypatch.setenv("OPENRL_REMOTES", str(folder / "remotes.toml"))
    monkeypatch.setenv("LAB_KEY", KEY)
    monkeypatch.setitem(sys.modules, "keyring", None)
    return folder


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(tmp_path / "lab") as server:
        yield server


def invoke(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=answer, catch_exceptions=False)


def call(*arguments: str, answer: str | None = None) -> str:
    """Standard output of a command that succeeds; no key is in anything that it says."""
    done = invoke(*arguments, answer=answer)
    assert done.exit_code == 0, done.output
    assert KEY not in done.output
    return done.stdout


def add_lab(lab: LiveServer, *more: str) -> None:
    call("remote", "add", "lab", lab.url, "--token-from", "env:LAB_KEY", *more)


# -- add, list, use, remove --


def test_remotes_are_added_listed_chosen_and_removed() -> None:
    assert "no remotes" in call("remote", "list")
    call("remote", "add", "gke", "https://rl.example/", "--token-from", 'command:gcloud secrets print "my key"')
    call("remote", "add", "pod", "--service", "openrl", "--namespace", "ml", "--kube-context", "ctx", "--port", "80")
    listed = json.loads(call("remote", "list", "--json"))
    assert [(one["name"], one["default"], one["url"]) for one in listed] == [
        ("gke", True, "https://rl.example"),
        ("pod", False, "http://openrl.ml:80"),
    ]
    assert listed[0]["key"] == 'command:gcloud secrets print "my key"'
    assert listed[1]["kube"] == {"service": "openrl", "namespace": "ml", "port": 80, "context": "ctx"}
    assert "pod is the default" in call("remote", "use", "pod")
    table = call("remote", "list")
    assert "ml/openrl:80 in ctx" in table
    assert "gke is forgotten" in call("remote", "remove", "gke")
    assert [one["name"] for one in json.loads(call("remote", "list", "--json"))] == ["pod"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x"], "needs a URL, or --service"),
        (["x", "http://h", "--service", "s"], "and not both"),
        (["x", "http://h", "--namespace", "n"], "go with --service"),
        (["x", "ftp://h"], "no server's URL"),
        (["a b", "http://h"], "no name for a remote"),
        (["list", "http://h"], "is a command of `openrl remote`"),
        (["run", "http://h"], "is a command of `openrl remote`"),
        (["x", "http://h", "--token-from", "vault:x"], "legal: env:VARIABLE"),
        (["x", "http://h", "--token-from", "env:OPENRL_LAB"], "begin with OPENRL_ are settings"),
        (["x", "http://h", "--ca-file", "/no/such/file"], "does not exist"),
        (["x", "--service", "--all-namespaces"], "--service"),
    ],
)
def test_what_cannot_be_added(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["remote", "add", *arguments])
    assert done.exit_code != 0
    assert words in (str(done.exception) if isinstance(done.exception, OpenRLError) else done.output)
    assert remotes.load_remotes() == {}


def test_a_key_given_instead_of_its_place_is_not_repeated() -> None:
    with pytest.raises(BadRequest) as caught:
        invoke("remote", "add", "x", "http://h", "--token-from", KEY)
    assert KEY not in str(caught.value)


def test_a_name_is_replaced_only_with_force() -> None:
    call("remote", "add", "x", "http://one")
    with pytest.raises(SettingsError, match="exists"):
        invoke("remote", "add", "x", "http://two")
    call("remote", "add", "x", "http://two", "--force")
    assert remotes.find("x").url == "http://two"


# -- login --


def test_without_a_keyring_login_writes_a_file_that_only_the_user_can_read(config: Path) -> None:
    call("remote", "add", "lab", "http://lab")
    said = call("remote", "login", "lab", answer=f"{KEY}\n")
    file = config / "keys" / "lab"
    assert str(file) in said
    assert file.read_text().strip() == KEY
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert remotes.find("lab").token.read() == KEY
    assert KEY not in (config / "remotes.toml").read_text()
    call("remote", "remove", "lab")
    assert not file.exists()


def test_at_a_terminal_login_asks_and_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.null.Keyring")  # not that of whoever runs this
    call("remote", "add", "lab", "http://lab")
    ours, theirs = pty.openpty()
    login = subprocess.Popen(
        [openrl_command(), "remote", "login", "lab"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    said = b""
    while b"not shown" not in said:
        said += os.read(ours, 1000)
    os.write(ours, KEY.encode() + b"\n")
    with contextlib.suppress(OSError):  # what a terminal says once its other end is closed
        while more := os.read(ours, 1000):
            said += more
    assert login.wait(30) == 0, said
    os.close(ours)
    assert KEY.encode() not in said
    assert remotes.find("lab").token.read() == KEY


class FakeKeyring(types.ModuleType):
    """The package `keyring` over a dictionary."""

    def __init__(self, priority: float) -> None:
        super().__init__("keyring")
        self.kept: dict[tuple[str, str], str] = {}
        self.errors = types.ModuleType("keyring.errors")
        self.errors.KeyringError = OSError  # type: ignore[attr-defined]
        self._backend = types.SimpleNamespace(priority=priority, name="Test Keychain")

    def get_keyring(self) -> Any:
        return self._backend

    def set_password(self, service: str, name: str, key: str) -> None:
        self.kept[service, name] = key

    def get_password(self, service: str, name: str) -> str | None:
        return self.kept.get((service, name))

    def delete_password(self, service: str, name: str) -> None:
        if (service, name) not in self.kept:
            raise OSError("not there")
        del self.kept[service, name]


def use_keyring(monkeypatch: pytest.MonkeyPatch, priority: float = 5) -> FakeKeyring:
    fake = FakeKeyring(priority)
    monkeypatch.setitem(sys.modules, "keyring", fake)
    monkeypatch.setitem(sys.modules, "keyring.errors", fake.errors)
    return fake


def test_login_prefers_the_system_keyring(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use_keyring(monkeypatch)
    call("remote", "add", "lab", "http://lab")
    assert "the system keyring (Test Keychain)" in call("remote", "login", "lab", answer=f"{KEY}\n")
    assert fake.kept == {("openrl", "lab"): KEY}
    assert str(remotes.find("lab").token) == "keyring:lab"
    assert remotes.find("lab").token.read() == KEY
    assert not (config / "keys").exists()
    call("remote", "remove", "lab")
    assert fake.kept == {}


def test_a_keyring_that_does_not_encrypt_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """`keyring.backends.fail` has priority 0, and a plain-text file one of 0.5."""
    use_keyring(monkeypatch, 0.5)
    assert keyrings.usable() is None


def test_a_key_in_a_keyring_that_is_gone_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    call("remote", "add", "lab", "http://lab", "--token-from", "keyring")
    with pytest.raises(SettingsError, match=r"pip install \"openrl\[remote\]\""):
        remotes.find("lab").token.read()
    use_keyring(monkeypatch)
    with pytest.raises(SettingsError, match="openrl remote login lab"):
        remotes.find("lab").token.read()


@pytest.mark.parametrize("given", ["", "password", "tml-", "tml-with space inside it"])
def test_login_takes_api_keys_only(given: str) -> None:
    call("remote", "add", "lab", "http://lab")
    with pytest.raises(BadRequest) as caught:
        invoke("remote", "login", "lab", answer=f"{given}\n")
    assert "begins with `tml-`" in str(caught.value)
    assert not given or given == "tml-" or given not in str(caught.value)


def test_login_needs_a_remote() -> None:
    with pytest.raises(SettingsError, match="no remote 'lab'"):
        invoke("remote", "login", "lab", answer=f"{KEY}\n")


# -- check --


def check(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = invoke("remote", "check", *arguments, "--json")
    assert KEY not in done.output
    return done.exit_code, json.loads(done.stdout)


def test_a_good_remote(lab: LiveServer) -> None:
    add_lab(lab)
    code, report = check()
    assert (code, report["problems"], report["auth"], report["good"]) == (0, [], "ok", True)
    assert report["server_version"] == report["client_version"]
    assert 0 < report["latency_ms"] < 5000
    assert abs(report["clock_skew_s"]) < 5
    assert "admin" in report["scope"]
    assert {model["name"] for model in report["models"]} == {"test/scalar", "alias/scalar"}
    table = call("remote", "check", "lab")
    assert "lab can be used from here" in table
    assert "test/scalar" in table


def test_a_key_that_is_denied_or_missing(lab: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    add_lab(lab)
    monkeypatch.setenv("LAB_KEY", OTHER)
    code, report = check("lab")
    assert (code, report["auth"], report["reached"]) == (1, "denied", True)
    assert "openrl remote login lab" in report["problems"][0]
    call("remote", "add", "lab", lab.url, "--force")
    code, report = check("lab")
    assert (code, report["auth"]) == (1, "no key")


def test_a_server_that_is_not_there() -> None:
    call("remote", "add", "gone", "http://127.0.0.1:9")
    code, report = check("gone")
    assert code == 1
    assert report["problems"] == ["not reached: nothing listens at http://127.0.0.1:9."]
    done = invoke("remote", "check", "gone")
    assert "problem: not reached" in done.stdout


def test_a_key_that_cannot_be_read_is_one_problem_of_several(lab: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    add_lab(lab)
    monkeypatch.delenv("LAB_KEY")
    code, report = check("lab")
    assert code == 1
    assert "LAB_KEY, which is to hold the key, is not set" in report["problems"][0]
    assert report["reached"]


def test_a_key_in_clear_over_a_network_is_a_problem() -> None:
    call("remote", "add", "far", "http://openrl.invalid:8000")
    code, report = check("far")
    assert code == 1
    assert "has no TLS: the key and all data go over the network in clear" in report["problems"][0]
    assert "not known to DNS here" in report["problems"][1]


def test_no_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call("remote", "add", "pod", "--service", "openrl")
    monkeypatch.setenv("PATH", str(tmp_path))
    code, report = check("pod")
    assert code == 1
    assert "kubectl is not on the PATH" in report["problems"][0]


@contextmanager
def tls_server(
    tmp_path: Path, name: str = "127.0.0.1", **dates: datetime.datetime
) -> Iterator[tuple[LiveServer, Path]]:
    """A server with a certificate of a private authority, and that authority's own."""
    authority = trustme.CA()
    certificate = authority.issue_cert(name, **dates)
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    pem = str(tmp_path / "server.pem")
    with LiveServer(tmp_path / "tls", tls={"ssl_certfile": pem, "ssl_keyfile": pem}) as server:
        yield server, tmp_path / "ca.pem"


def test_tls_with_a_private_authority(tmp_path: Path) -> None:
    with tls_server(tmp_path) as (server, ca):
        add_lab(server)
        code, report = check("lab")
        assert code == 1
        assert "nobody trusted here vouches for the TLS certificate of 127.0.0.1" in report["problems"][0]
        assert "--ca-file" in report["problems"][0]
        add_lab(server, "--ca-file", str(ca), "--force")
        assert check("lab")[0] == 0


def test_tls_for_another_name_or_expired(tmp_path: Path) -> None:
    with tls_server(tmp_path, "other.example") as (server, ca):
        add_lab(server, "--ca-file", str(ca))
        assert "the TLS certificate is for another name than 127.0.0.1" in check("lab")[1]["problems"][0]
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    with tls_server(tmp_path, not_before=past - datetime.timedelta(days=1), not_after=past) as (server, ca):
        add_lab(server, "--ca-file", str(ca), "--force")
        assert "has expired" in check("lab")[1]["problems"][0]


def test_https_at_a_plain_port_and_a_broken_ca_file(lab: LiveServer, tmp_path: Path) -> None:
    call("remote", "add", "lab", lab.url.replace("http:", "https:"))
    assert "is it http:// rather than https://?" in check("lab")[1]["problems"][0]
    (tmp_path / "ca.pem").write_text("nonsense")
    call("remote", "add", "lab", lab.url, "--ca-file", str(tmp_path / "ca.pem"), "--force")
    assert "holds no certificates" in check("lab")[1]["problems"][0]


@contextmanager
def canned(answers: dict[str, tuple[int, object]], skew: float = 0) -> Iterator[str]:
    """A server that answers as it is told, and whose clock is `skew` seconds ahead."""

    class Answer(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, content = answers.get(self.path, (404, {"detail": "nothing here"}))
            body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(time.time() + skew)

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


GOOD: dict[str, tuple[int, object]] = {
    "/": (200, {"name": "openrl", "version": "99.0"}),
    "/api/v1/healthz": (200, {"status": "ok"}),
    "/api/v1/get_server_capabilities": (200, {"supported_models": [{"model_name": "m", "state": "ready"}]}),
    "/api/v1/auth/apikey/me": (200, {"scopes": ["read"]}),
}


def look(answers: dict[str, tuple[int, object]], skew: float = 0) -> tuple[int, str]:
    """Exit code, and all problems and notes."""
    with canned({**GOOD, **answers}, skew) as url:
        call("remote", "add", "canned", url, "--token-from", "env:LAB_KEY", "--force")
        code, report = check("canned")
    return code, " | ".join([*report["problems"], *report["notes"]])


@pytest.mark.parametrize(
    ("answers", "skew", "code", "words"),
    [
        ({}, 0, 0, "run the same version on both sides"),
        ({}, 0, 0, "the key's scope is read: it may look, but neither train nor sample"),
        ({}, 600, 1, "clock is 600 s ahead of this machine's"),
        ({}, -90, 1, "s behind this machine's"),
        ({"/": (200, "<html>a router</html>")}, 0, 1, "no openrl server"),
        ({"/api/v1/healthz": (503, {"detail": "stopping"})}, 0, 1, "says 503 to a health check: stopping"),
        ({"/api/v1/get_server_capabilities": (403, {"detail": "scope"})}, 0, 1, "refused with 403: scope"),
        ({"/api/v1/get_server_capabilities": (200, {"supported_models": []})}, 0, 1, "serves no models"),
        (
            {
                "/api/v1/get_server_capabilities": (
                    200,
                    {
                        "supported_models": [
                            {"model_name": "a", "state": "failed"},
                            {"model_name": "b", "state": "loading"},
                        ]
                    },
                )
            },
            0,
            1,
            "models that failed to load there: a",
        ),
    ],
)
def test_what_is_wrong_in_words(answers: dict[str, tuple[int, object]], skew: float, code: int, words: str) -> None:
    got, said = look(answers, skew)
    assert words in said
    assert got == code, said


# -- run --


def test_a_name_alone_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms are `openrl serve --backend remote --remote NAME ...`, with its options."""
    seen: list[dict[str, Any]] = []

    @functools.wraps(serving.serve)
    def serve(**options: Any) -> None:
        seen.append(options)

    monkeypatch.setattr(serving, "serve", serve)
    call("remote", "add", "lab", "http://lab")
    for words in (["lab"], ["run", "lab"]):
        call("remote", *words, "--port", "8123")
    assert [(one["backend"], one["remote"], one["port"]) for one in seen] == [("remote", "lab", "8123")] * 2


def test_an_unknown_name_is_said() -> None:
    with pytest.raises(SettingsError, match="no remote 'lsit'"):
        invoke("remote", "lsit")


# -- status --remote --


def test_status_of_a_remote(lab: LiveServer) -> None:
    add_lab(lab)
    assert "test/scalar" in call("status", "--remote", "lab")
    assert json.loads(call("status", "--remote", "lab", "--json"))["models"]
    with pytest.raises(BadRequest, match="--url and --remote"):
        invoke("status", "--remote", "lab", "--url", "http://x")
    with pytest.raises(SettingsError, match="Known are: lab"):
        invoke("status", "--remote", "nobody")


# -- push and pull --


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """The data folder of this machine, with a server over it and a checkpoint in it."""
    data_dir = tmp_path / "laptop"
    path = lay_checkpoint(data_dir)
    monkeypatch.setenv("OPENRL_API_KEY", OTHER)
    with LiveServer(data_dir, OTHER) as server:
        (data_dir / "server.lock").write_text(server.url)
        yield data_dir, path


def test_push_to_the_default_remote_and_pull_back(lab: LiveServer, laptop: tuple[Path, str]) -> None:
    data_dir, path = laptop
    add_lab(lab)
    done = invoke("push", path, "--data-dir", str(data_dir))
    assert done.exit_code == 0, done.output
    there = done.stdout.strip()
    assert there.startswith("tinker://")
    assert "every file's SHA-256 is right" in done.stderr
    assert KEY not in done.output
    assert OTHER not in done.output
    assert digest_files(folder_of(lab.data_dir, there)) == digest_files(folder_of(data_dir, path))
    assert "it was there already" in invoke("push", path, "--data-dir", str(data_dir)).stderr
    back = call("pull", there, "--data-dir", str(data_dir)).strip()
    assert digest_files(folder_of(data_dir, back)) == digest_files(folder_of(data_dir, path))


def test_both_ends_can_be_named(lab: LiveServer, laptop: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir, path = laptop
    monkeypatch.setenv("LAPTOP_KEY", OTHER)
    call("remote", "add", "mine", (data_dir / "server.lock").read_text(), "--token-from", "env:LAPTOP_KEY")
    add_lab(lab)
    there = call("push", path, "--from", "mine", "--to", "lab").strip()
    folder_of(lab.data_dir, there)
    also = call("pull", there, "--from", lab.url, "--to", "mine").strip()
    folder_of(data_dir, also)


def test_a_base_model_of_another_name(lab: LiveServer, laptop: tuple[Path, str]) -> None:
    data_dir, path = laptop
    add_lab(lab)
    there = call("push", path, "--data-dir", str(data_dir), "--base-model", "alias/scalar").strip()
    assert lab.on_loop(lab.h.daemon.checkpoint(there)).base_model == "alias/scalar"
    with pytest.raises(BadRequest, match="is not served here"):
        invoke("push", path, "--data-dir", str(data_dir), "--base-model", "org/none")


def test_push_without_a_server_here_or_a_key_there(lab: LiveServer, laptop: tuple[Path, str], tmp_path: Path) -> None:
    data_dir, path = laptop
    call("remote", "add", "closed", lab.url, "--token-from", "file:" + str(tmp_path / "key"))
    (tmp_path / "key").write_text(OTHER)
    with pytest.raises(Unauthorized, match="closed does not take this key"):
        invoke("push", path, "--data-dir", str(data_dir))
    with pytest.raises(OpenRLError, match="this machine's server cannot be reached"):
        invoke("push", path, "--data-dir", str(tmp_path / "empty"))


def test_an_interrupted_push_says_how_to_go_on(
    lab: LiveServer, laptop: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir, path = laptop
    add_lab(lab)
    interrupt_after(monkeypatch, 1)
    done = invoke("push", path, "--data-dir", str(data_dir))
    assert done.exit_code == 130
    assert "the same command again goes on from here" in done.stderr
    monkeypatch.undo()


def interrupt_after(monkeypatch: pytest.MonkeyPatch, moves: int) -> None:
    from openrl_cli.transfer import Bars

    count = [0]

    def moved(self: Bars, file: str, at: int) -> None:
        count[0] += 1
        if count[0] > moves:
            raise KeyboardInterrupt

    monkeypatch.setattr(Bars, "moved", moved)
