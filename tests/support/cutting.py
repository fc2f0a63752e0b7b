"""A TCP relay in front of a server that cuts connections: what a network does to whoever relies on it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Cutter:
    """`url` is the relay's. Set `budget` to the number of bytes towards the server after which the connection that
    brings the last of them is cut; None: never again. `cuts` counts."""

    def __init__(self, listener: socket.socket, target: tuple[str, int]) -> None:
        self._listener = listener
        self._target = target
        self._lock = threading.Lock()
        self.budget: int | None = None
        self.refill: int | None = None  # the next budget after a cut
        self.cuts = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, 5)
            except OSError:
                near.close()
                continue
            threading.Thread(target=self._pump, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with suppress(OSError):
            while block := source.recv(16384):
                if counted and self._cut(len(block)):
                    break
                target.sendall(block)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if not counted:
            source.close()
            target.close()

    def _cut(self, count: int) -> bool:
        with self._lock:
            if self.budget is None:
                return False
            self.budget -= count
            if self.budget > 0:
                return False
            self.budget = self.refill
            self.cuts += 1
            return True


@contextmanager
def cutting(url: str) -> Iterator[Cutter]:
    """A relay to a server's URL."""
    host, port = url.removeprefix("http://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))
    cutter = Cutter(listener, (host, int(port)))
    thread = threading.Thread(target=cutter.serve, daemon=True)
    thread.start()
    try:
        yield cutter
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
