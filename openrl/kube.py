"""A way to a service inside a Kubernetes cluster that has no ingress: a `kubectl port-forward` that is kept alive.

The tunnel ends whenever its pod does, a node drains, or the laptop sleeps; kubectl then leaves, or stays and serves
nothing. Both end in a new kubectl on the same local port, so that the URL stays the same.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import TracebackType

from openrl.errors import NotReady, SettingsError

log = logging.getLogger(__name__)

DEFAULT_PORT = 8000
_START_SECONDS = 30.0
_END_SECONDS = 5.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 15.0  # seconds between kubectls, doubled each time one does not get through
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ->")
_BROKEN = re.compile(r"lost connection to pod|an error occurred forwarding", re.IGNORECASE)
_PORT_TAKEN = re.compile(r"unable to (listen|create listener)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KubeTarget:
    """A service's port; `context` None is kubectl's current one."""

    service: str
    namespace: str = "default"
    port: int = DEFAULT_PORT
    context: str | None = None

    def __str__(self) -> str:
        where = f"{self.namespace}/{self.service}:{self.port}"
        return f"{where} in {self.context}" if self.context else where


class PortForward:
    """A local URL for a target, while it is entered. `error` says why it does not work just now, since `down_since`
    (seconds since the epoch); None while it works.
    """

    def __init__(self, target: KubeTarget, *, first_wait: float = _FIRST_WAIT) -> None:
        self._target = target
        self._first_wait = first_wait
        self._port = 0  # 0: any free one
        self._process: Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.error: str | None = None
        self.down_since: float | None = None
        self.restarts = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> PortForward:
        """Raises SettingsError without a kubectl, NotReady with what kubectl said if it does not get through."""
        self._process = await self._start()
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._keeper is not None
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        await self._end()

    async def _start(self) -> Process:
        """A kubectl that forwards; its output from there on is unread."""
        process = await asyncio.create_subprocess_exec(
            *self._command(),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,  # Ctrl-C is ours: the tunnel must last until the server has let go of its calls
        )
        said: list[str] = []
        try:
            async with asyncio.timeout(_START_SECONDS):
                async for line in _lines(process):
                    if match := _FORWARDING.search(line):
                        self._port = int(match[1])
                        return process
                    said.append(line)
                await process.wait()
        except TimeoutError:
            said.append(f"it does not answer within {_START_SECONDS:.0f} s")
        except BaseException:
            await _kill(process)
            raise
        await _kill(process)
        raise NotReady(f"kubectl does not reach {self._target}: {_last(said)}", _hint(said))

    def _command(self) -> list[str]:
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise SettingsError(
                "kubectl is not on the PATH, and it is what reaches into a cluster.",
                "Install it, or give the remote a URL: openrl remote add NAME URL --force",
            )
        target = self._target
        context = [f"--context={target.context}"] if target.context else []
        place = [f"--namespace={target.namespace}", "port-forward", "--address=127.0.0.1", f"service/{target.service}"]
        return [kubectl, *context, *place, f"{self._port or ''}:{target.port}"]

    async def _keep(self) -> None:
        wait = self._first_wait
        while True:
            if self._process is not None:
                self._down(await self._until_broken(self._process))
                await self._end()
                wait = self._first_wait
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
            try:
                self._process = await self._start()
            except (NotReady, SettingsError, OSError) as error:
                self._down(str(error))
                if _PORT_TAKEN.search(str(error)):
                    self._port = 0
                continue
            self.error = self.down_since = None
            self.restarts += 1
            log.info("kubectl forwards %s to %s again", self.url, self._target)

    async def _until_broken(self, process: Process) -> str:
        """Reads what kubectl says until it leaves, or says that it serves nothing any more."""
        last = ""
        async for line in _lines(process):
            last = line
            if _BROKEN.search(line):
                return line
        return last or f"kubectl left with status {await process.wait()}"

    def _down(self, reason: str) -> None:
        if self.error is None:
            log.warning("the port-forward to %s is down: %s", self._target, reason)
        self.error = reason
        self.down_since = self.down_since or time.time()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await _kill(process)


async def _lines(process: Process) -> AsyncGenerator[str]:
    """What a process says, line by line, until it says no more."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        yield line.decode(errors="replace").strip()


async def _kill(process: Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _END_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


def _last(said: list[str]) -> str:
    return said[-1] if said else "it left without a word"


def _hint(said: list[str]) -> str:
    text = " ".join(said).lower()
    if "not found" in text or "notfound" in text:
        return "See: kubectl get services --all-namespaces"
    if "context" in text:
        return "See: kubectl config get-contexts"
    if "unauthorized" in text or "forbidden" in text or "credentials" in text:
        return "Log in to the cluster again; kubectl must be allowed to port-forward there."
    return "Try it by hand: kubectl port-forward"
