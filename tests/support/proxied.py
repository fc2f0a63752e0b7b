"""The end-to-end tests through the remote backend: with E2E_REMOTE=1 every server of theirs gets a proxy before it.

The tests stay as they are: where they start a server, they get the address of a second one, which passes everything on.
"""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from openrl_recipes.local_server import Endpoint, free_port, openrl_command
from openrl_recipes.local_server import local_server as plain_server

PROXIED = os.environ.get("E2E_REMOTE") == "1"


@contextmanager
def local_server(
    log_file: Path, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Generator[Endpoint]:
    """As the recipes' own, with a proxy before it where that is asked for."""
    with plain_server(log_file, arguments, environment) as endpoint:
        if not PROXIED:
            yield endpoint
            return
        with in_front_of(endpoint, log_file.with_name(f"proxy-{log_file.stem}")) as near:
            yield near


@contextmanager
def in_front_of(far: Endpoint, folder: Path, *more: str) -> Generator[Endpoint]:
    """`openrl serve --backend remote` for a server, with the same key, so that commands may talk to either."""
    near = replace(far, base_url=f"http://127.0.0.1:{free_port()}")
    port = near.base_url.rpartition(":")[2]
    arguments = ["--backend", "remote", "--url", far.base_url, "--data-dir", str(folder), "--port", port, *more]
    keys = {"OPENRL_API_KEY": near.api_key, "OPENRL_REMOTE_TOKEN": far.api_key}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("wb") as log:
        command = [openrl_command(), "serve", *arguments]
        process = subprocess.Popen(command, env=os.environ | keys, stdout=log, stderr=log)
    try:
        _wait(near.base_url, process)
        yield near
    finally:
        process.terminate()
        process.wait(60)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the proxy has ended"
        try:
            urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the proxy does not answer")
