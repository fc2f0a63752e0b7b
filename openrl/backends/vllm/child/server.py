"""Serves frames: one thread reads them, one computes."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from .engine import Engine
from .link import Frame, Link, attempt, pipes
from .probe import Probe
from .weights import Weights

_ALIVE_SECONDS = 0.25  # between signs of life while it computes
_IDLE_SECONDS = 1.0  # and while it waits


class Server:
    """Serves frames with an engine, in the thread that computes."""

    def __init__(self, engine: Engine, weights: Weights, link: Link, inbox: queue.SimpleQueue[Frame]) -> None:
        self._engine = engine
        self._weights = weights
        self._link = link
        self._inbox = inbox
        self._steps = 0
        self._seconds = 0.0
        self._told = 0.0

    def run(self) -> None:
        while True:
            self._read()
            if self._engine.busy:
                began = time.perf_counter()
                parts = self._engine.step()
                self._seconds += time.perf_counter() - began
                self._steps += 1
                if parts:
                    self._tell({"op": "drawn", "parts": parts})
            if not self._engine.busy or time.monotonic() - self._told > _ALIVE_SECONDS:
                self._tell({"op": "alive"})

    def _read(self) -> None:
        """Take all frames that have come; wait for one if there is nothing to compute."""
        try:
            frame = self._inbox.get(timeout=_IDLE_SECONDS) if not self._engine.busy else self._inbox.get_nowait()
            while True:
                self._take(frame)
                frame = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _take(self, frame: Frame) -> None:
        match frame["op"]:
            case "adapter":
                given = frame["id"], frame["name"], frame["folder"]
                self._answer({"op": "adapter", "id": frame["id"]}, self._engine.load, *given)
            case "forget":
                self._engine.forget(frame["id"])
            case "weights":
                self._exchange(frame["folder"])
            case "draw":
                self._answer({"op": "failed", "key": frame["key"]}, self._engine.draw, frame)
            case "cancel":
                self._engine.cancel(frame["keys"])
            case other:
                raise ValueError(f"unknown frame {other!r}")

    def _answer(self, failure: Frame, action: Callable[..., object], *args: Any) -> None:
        _, error = attempt(action, *args)
        if error:
            self._link.send({**failure, "error": error})

    def _exchange(self, folder: str | None) -> None:
        self._link.send({"op": "loading"})
        able, error = attempt(self._weights.take, folder)
        whole = bool(able)
        if not whole:  # back to what it was opened with
            _, lost = attempt(self._weights.restore)
            whole = not lost
        print(f"weights of {folder or 'the base model'}: {error or ('taken' if able else 'wrong')}", file=sys.stderr)
        self._link.send({"op": "weights", "error": error, "able": able is not False, "whole": whole})

    def _tell(self, frame: Frame) -> None:
        self._link.send({**frame, "steps": self._steps, "seconds": self._seconds})
        self._steps, self._seconds, self._told = 0, 0.0, time.monotonic()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _read(link: Link, inbox: queue.SimpleQueue[Frame]) -> None:
    """Keep the pipe empty, so that the worker never waits; end with it."""
    while (frame := link.receive()) is not None:
        inbox.put(frame)
    os._exit(0)


def _open(opening: Frame) -> tuple[Engine, Weights, dict[str, bool]]:
    """vLLM, and what it can. Raises whatever vLLM does if it cannot start."""
    engine = Engine(opening)
    probe = Probe(engine, opening["probe"]["prompt"], opening["vocab"])
    return engine, Weights(engine, probe, opening["folder"]), probe.can(opening["probe"]["head"])


def main() -> int:
    """Open what the first frame says, then serve. Returns the exit code of a vLLM that cannot start."""
    _die_with_parent()
    link = pipes()
    opening = link.receive()
    if opening is None:
        return 0
    inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(link, inbox), daemon=True, name="inbox").start()
    opened, error = attempt(_open, opening)
    if opened is None:
        link.send({"op": "unusable", "error": error})
        return 1
    engine, weights, can = opened
    link.send({"op": "ready", "vllm": engine.vllm.__version__, "can": can, "kv_tokens": engine.kv_tokens})
    Server(engine, weights, link, inbox).run()
    return 0
