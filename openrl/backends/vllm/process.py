"""The child process that runs vLLM, held by its pipes: frames in and out, signs of life, its log, its end.

Three threads serve it, so that neither a busy nor a stopped child can block the worker's loop: one writes, one reads,
one watches the clock. All calls are for the loop's thread; Linux ends the child with the thread that started it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

Frame = dict[str, Any]

SCRIPT = Path(__file__).with_name("child")  # run as a folder
_LENGTH = struct.Struct(">I")
_WATCH_SECONDS = 0.5
_TAIL_BYTES = 1 << 16


class Child:
    """One life of vLLM. `wake` is called from other threads whenever there is something to `take`."""

    def __init__(
        self, command: Sequence[str], log: Path, wake: Callable[[], None], silence: float, start: float
    ) -> None:
        """Start it. It is killed if it sends nothing for `silence` seconds, or for `start` seconds before its first
        frame and while it is loading."""
        self._log = log
        self._wake = wake
        self._silence = silence
        self._start = start
        self._allowed = start
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._heard = time.monotonic()  # when the last frame came
        self._over = threading.Event()
        self.hung = False  # killed for its silence
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                cwd=log.parent,
                start_new_session=True,  # Ctrl-C is for the daemon; and its own children can be ended with it
            )
        for work in (self._write, self._read, self._watch):
            threading.Thread(target=work, daemon=True, name=f"vllm{work.__name__}").start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def over(self) -> bool:
        """Whether it has ended and everything that it sent has been taken."""
        return self._over.is_set() and self._inbox.empty()

    @property
    def eventful(self) -> bool:
        """Whether there is something to take, or its end to be noticed."""
        return self._over.is_set() or not self._inbox.empty()

    def send(self, frame: Mapping[str, Any]) -> None:
        """Queue a frame; one to a child that has ended is lost, as are all that it had not read."""
        self._outbox.put(json.dumps(frame).encode())

    def take(self) -> list[Frame]:
        """The frames that have come."""
        frames: list[Frame] = []
        with suppress(queue.Empty):
            while True:
                frames.append(self._inbox.get_nowait())
        return frames

    def wait(self, seconds: float) -> Frame | None:
        """The next frame; None if it ends, or none comes for so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.over:
            with suppress(queue.Empty):
                return self._inbox.get(timeout=0.05)
        return None

    def kill(self) -> None:
        """End it and whatever it started, at once."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, seconds: float = 5.0) -> None:
        """Let it end, by closing its stdin; kill it if that takes too long."""
        self._outbox.put(None)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()

    def epitaph(self) -> str:
        """How it ended, once it is over."""
        if self.hung:
            return f"gave no sign of life for {self._allowed:g} s and was killed"
        code = self._process.wait()
        return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

    def tail(self, lines: int = 15) -> str:
        """The last lines of its log."""
        return tail(self._log, lines)

    # ---- threads ----

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(OSError):  # it is gone: the reader notices and tells
            while (body := self._outbox.get()) is not None:
                pipe.write(_LENGTH.pack(len(body)) + body)
                pipe.flush()
        with suppress(OSError):
            pipe.close()

    def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        while (frame := _receive(pipe)) is not None:
            self._heard = time.monotonic()
            self._allowed = self._start if frame["op"] == "loading" else self._silence
            if frame["op"] != "loading":
                self._inbox.put(frame)
                self._wake()
        pipe.close()
        self._process.wait()
        self._outbox.put(None)
        self._over.set()
        self._wake()

    def _watch(self) -> None:
        while not self._over.wait(_WATCH_SECONDS):
            if time.monotonic() - self._heard > self._allowed:
                self.hung = True
                self.kill()
                return


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


def _receive(pipe: IO[bytes]) -> Frame | None:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    body = pipe.read(size)
    return json.loads(body) if len(body) == size else None
