"""A rank above 0: a process that rank 0 starts, `python -m openrl.backends.torch.distributed.follower <fd>`.

It does what it is told. It holds nothing that is not on rank 0 too, or read anew, so it ends at once when rank 0 does,
or when anything goes wrong; rank 0 then ends as well.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

from openrl.workers.process import die_with_parent, set_before_torch

log = logging.getLogger(__name__)


def main() -> None:
    """Join, then carry out commands until rank 0 is gone."""
    die_with_parent()
    for stop in (signal.SIGINT, signal.SIGTERM):  # both may reach the whole group; rank 0 decides when we end
        signal.signal(stop, signal.SIG_IGN)
    set_before_torch()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s rank %(process)d %(name)s: %(message)s")
    code = 1
    try:
        _follow(Connection(int(sys.argv[1])))
    except (EOFError, ConnectionError):  # rank 0 has ended
        code = 0
    finally:
        if code:
            log.error("a rank failed", exc_info=True)
        os._exit(code)  # leaving the group in good order would need the others


def _follow(connection: Connection) -> None:
    opening = connection.recv()
    from openrl.backends.torch.distributed.commands import Begin, Compute, Create, Load, Step
    from openrl.backends.torch.distributed.opening import open_follower

    member = open_follower(opening, connection)
    while True:
        command = connection.recv()
        answer = member.do(command)
        if isinstance(command, Begin | Compute | Create | Load | Step):
            connection.send(answer)


if __name__ == "__main__":
    main()
