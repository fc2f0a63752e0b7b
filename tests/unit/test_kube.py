"""The managed `kubectl port-forward`, against a kubectl that is a script: it forwards, dies, hangs and complains."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from openrl.errors import NotReady, SettingsError
from openrl.kube import KubeTarget, PortForward

TARGET = KubeTarget("openrl", "ml", 8000, "my-context")

# Forwards each connection to a one-line HTTP answer; what it is called with is noted. A file `mode` says how it fails.
KUBECTL = """#!{python}
import http.server, os, pathlib, socketserver, sys, threading, time

home = pathlib.Path({home!r})
with (home / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
mode = (home / "mode").read_text().strip()
if mode.startswith("fail "):
    sys.exit(mode[5:])
local, _, remote = sys.argv[-1].partition(":")

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")
    def log_message(self, *_):
        pass

class Server(http.server.ThreadingHTTPServer):
    allow_reuse_address = True

try:
    server = Server(("127.0.0.1", int(local or 0)), Answer)
except OSError:
    sys.exit("Unable to listen on any of the requested ports")
threading.Thread(target=server.serve_forever, daemon=True).start()
(home / "pid").write_text(str(os.getpid()))
print(f"Forwarding from 127.0.0.1:{{server.server_port}} -> {{remote}}", flush=True)
while True:
    time.sleep(0.02)
    if (home / "hang").exists():
        (home / "hang").unlink()
        server.shutdown()
        print("E1130 portforward.go:234] lost connection to pod", flush=True)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the kubectl on the PATH keeps what it does."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "mode").write_text("work")
    script = folder / "kubectl"
    script.write_text(KUBECTL.format(python=sys.executable, home=str(tmp_path)))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def ask(tunnel: PortForward) -> str:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(tunnel.url)).text


def kill(home: Path) -> None:
    os.kill(int((home / "pid").read_text()), 9)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_forwards_to_the_service_it_is_told(home: Path) -> None:
    async def run() -> None:
        async with PortForward(TARGET) as tunnel:
            assert await ask(tunnel) == "ok"
            assert tunnel.error is None
            pid = int((home / "pid").read_text())
        assert not alive(pid), "nothing is left running"

    asyncio.run(run())
    (call,) = (home / "calls").read_text().splitlines()
    assert call == "--context=my-context --namespace=ml port-forward --address=127.0.0.1 service/openrl :8000"


def test_one_that_dies_is_started_again_on_the_same_port(home: Path) -> None:
    async def run() -> None:
        async with PortForward(TARGET, first_wait=0.02) as tunnel:
            url = tunnel.url
            for count in (1, 2):
                kill(home)
                await until(lambda count=count: tunnel.restarts == count)
                assert tunnel.url == url
                assert tunnel.error is None
                assert await ask(tunnel) == "ok"

    asyncio.run(run())


def test_one_that_lost_its_pod_but_stays_is_replaced(home: Path) -> None:
    async def run() -> None:
        async with PortForward(TARGET, first_wait=0.02) as tunnel:
            pid = int((home / "pid").read_text())
            (home / "hang").touch()
            await until(lambda: tunnel.restarts == 1)
            assert not alive(pid)
            assert await ask(tunnel) == "ok"

    asyncio.run(run())


def test_while_the_cluster_is_away_it_says_why_and_keeps_trying(home: Path) -> None:
    async def run() -> None:
        async with PortForward(TARGET, first_wait=0.02) as tunnel:
            (home / "mode").write_text("fail Unable to connect to the server: dial tcp: i/o timeout")
            kill(home)
            await until(lambda: tunnel.error is not None and "i/o timeout" in tunnel.error)
            since = tunnel.down_since
            assert since is not None
            await until(lambda: len((home / "calls").read_text().splitlines()) >= 3)
            assert tunnel.down_since == since
            (home / "mode").write_text("work")
            await until(lambda: tunnel.error is None)
            assert tunnel.down_since is None
            assert await ask(tunnel) == "ok"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("complaint", "hint"),
    [
        ('Error from server (NotFound): services "openrl" not found', "kubectl get services"),
        ('error: context "my-context" does not exist', "kubectl config get-contexts"),
        ("error: You must be logged in to the server (Unauthorized)", "Log in to the cluster"),
    ],
)
def test_a_start_that_fails_repeats_what_kubectl_says(home: Path, complaint: str, hint: str) -> None:
    async def run() -> None:
        async with PortForward(TARGET):
            pass

    (home / "mode").write_text(f"fail {complaint}")
    with pytest.raises(NotReady) as caught:
        asyncio.run(run())
    assert complaint in str(caught.value)
    assert hint in str(caught.value)


def test_without_kubectl_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with PortForward(TARGET):
            pass

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match="kubectl is not on the PATH"):
        asyncio.run(run())
