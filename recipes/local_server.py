"""Start `openrl serve` for the time of a `with` block, and leave nothing of it behind.

Used by the demo and by the benchmark. Talks to the server as any user does: through the installed command and HTTP.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

START_SECONDS = 60.0
STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens, the key it wants, and its process id."""

    base_url: str
    api_key: str
    process: int = 0

    def environment(self) -> dict[str, str]:
        """What the `tinker` SDK reads; the tokenizer comes from the cache that the server filled, never from a hub."""
        return {"TINKER_BASE_URL": self.base_url, "TINKER_API_KEY": self.api_key, "HF_HUB_OFFLINE": "1"}


class ServerError(Exception):
    """The server did not start; the message holds the end of its log."""


@contextmanager
def local_server(
    log_file: Path, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Generator[Endpoint]:
    """`openrl serve ARGUMENTS` on a free port, with a key of its own; yields once it answers.

    `environment` is added to this process's. On the way out the server gets Ctrl-C and time to end in peace, then a
    second Ctrl-C, then it is killed with its workers. Raises `ServerError` if it does not come up.
    """
    endpoint = Endpoint(f"http://127.0.0.1:{free_port()}", f"tml-{secrets.token_urlsafe(32)}")
    port = endpoint.base_url.rsplit(":", 1)[1]
    command = [openrl_command(), "serve", "--port", port, *arguments]
    variables = {**inherited_environment(), **(environment or {}), "OPENRL_API_KEY": endpoint.api_key}
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("wb") as log:
        # A session of its own: a Ctrl-C in the terminal reaches us alone, and we pass it on in order.
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_until_healthy(process, endpoint, log_file)
        yield replace(endpoint, process=process.pid)
    finally:
        _stop(process)


def inherited_environment() -> dict[str, str]:
    """This process's environment, for its children."""
    return dict(os.environ)  # noqa: TID251 -- a script hands its environment on; it takes no setting from it


def openrl_command() -> str:
    """The `openrl` command installed beside the running Python."""
    command = Path(sysconfig.get_path("scripts")) / "openrl"
    if not command.exists():
        raise ServerError(f"{command} does not exist: install the project into {sys.prefix} (pip install -e .)")
    return str(command)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(process: subprocess.Popen[bytes], endpoint: Endpoint, log_file: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{endpoint.base_url}/api/v1/healthz", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    state = "is still not answering" if process.poll() is None else f"ended with status {process.returncode}"
    tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-20:])
    raise ServerError(f"openrl serve {state}. The end of {log_file}:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            break
        process.send_signal(number)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    # Workers live in the same process group; after a clean end nobody is left in it.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
