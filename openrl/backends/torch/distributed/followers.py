"""The processes of the ranks above 0, as rank 0 has them: started, told, asked, watched and ended."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from openrl.backends.torch.distributed.commands import Answer, Command, Layout, Opening
from openrl.backends.torch.distributed.group import GroupBroken

_START = 600.0  # seconds that a process may take to load its libraries


class Followers:
    """`ended` is called, from another thread, when one ends that was not told to."""

    def __init__(self, openings: Sequence[Opening], ended: Callable[[str], None], timeout: float) -> None:
        self._ended = ended
        self._timeout = timeout
        self._closing = False
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for opening in openings:
            self._start(opening)

    @property
    def pids(self) -> list[int]:
        """Of ranks 1, 2 and so on."""
        return [process.pid for process in self._processes]

    def tell(self, messages: Sequence[Command | Layout]) -> None:
        """Send to each rank its message. Raises `GroupBroken`."""
        for rank, (connection, message) in enumerate(zip(self._connections, messages, strict=True), 1):
            try:
                connection.send(message)
            except OSError as error:
                raise GroupBroken(f"the process of rank {rank} does not take its work: {error}.") from error

    def await_ready(self) -> None:
        """Wait until each has come so far that it can join. Raises `GroupBroken`."""
        for rank, connection in enumerate(self._connections, 1):
            self._answer(rank, connection, _START)

    def answers(self) -> list[Answer]:
        """The next answer of each rank. Raises `GroupBroken` if one is gone or takes too long."""
        return [self._answer(rank, connection, self._timeout) for rank, connection in enumerate(self._connections, 1)]

    def close(self) -> None:
        """End them all, at once: they keep nothing."""
        self._closing = True
        for process, connection in zip(self._processes, self._connections, strict=True):
            connection.close()
            process.kill()
        for process in self._processes:
            process.wait()

    def _start(self, opening: Opening) -> None:
        ours, theirs = socket.socketpair()
        # One that has stopped must not hold rank 0 up for ever.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(self._timeout) + 1, 0))
        with theirs:
            fd = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-m", "openrl.backends.torch.distributed.follower", str(fd)],
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        connection = Connection(ours.detach())
        self._processes.append(process)
        self._connections.append(connection)
        name = f"rank-{opening.rank}"
        threading.Thread(target=self._watch, args=(opening.rank, process), daemon=True, name=name).start()
        connection.send(opening)

    def _answer(self, rank: int, connection: Connection, timeout: float) -> Answer:
        try:
            if not connection.poll(timeout):
                raise GroupBroken(f"the process of rank {rank} gave no answer for {timeout:g} s.")
            return connection.recv()
        except (EOFError, OSError) as error:
            raise GroupBroken(f"the process of rank {rank} is gone.") from error

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            how = f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
            self._ended(f"the process of rank {rank} {how}.")
