"""The process that opens backends and tries them, `python -m openrl.selftest.child FD`: started by `process` alone."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from openrl.backends.base import Backend
from openrl.errors import BackendFault, OpenRLError
from openrl.selftest import expected, models
from openrl.selftest.case import Case, Outcome, State, run_case
from openrl.selftest.messages import Began, Ended, News, Opened, Order, Unopened
from openrl.selftest.subject import Subject
from openrl.selftest.suite import CASES
from openrl.types import ModelSpec
from openrl.workers.main import die_with_parent, open_backend, set_before_torch

log = logging.getLogger(__name__)


def main() -> None:
    """Work off the order that comes; end early where a backend has processes of its own, so that they end, too."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it may reach the whole group; who started us decides
    set_before_torch()
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s self-test %(name)s: %(message)s")
    connection = Connection(int(sys.argv[1]))
    order: Order = connection.recv()
    for number, (family, names) in enumerate(order.todo):
        if not _family(order, order.root / f"{os.getpid()}-{number}", family, names, connection.send):
            break
    logging.shutdown()
    os._exit(0)


def _family(order: Order, root: Path, family: str, names: tuple[str, ...], send: Callable[[News], None]) -> bool:
    """Open a family and run its cases; whether another one may be opened in this process."""
    world = models.build(root, family)
    try:
        backend = _open(order, world)
    except OpenRLError as error:
        send(Unopened(family, error))
        return True
    except Exception as error:  # a fault of the backend is what we look for
        log.exception("opening %s failed", family)
        send(Unopened(family, BackendFault(f"{type(error).__name__}: {error}")))
        return True
    send(Opened(family, backend.info, backend.report))
    scratch = root / "scratch"
    scratch.mkdir()
    subject = Subject(order.worker.backend, backend, world, expected.of(family), scratch)
    for case in CASES:
        if case.name in names:
            send(Began(family, case.name))
            send(Ended(family, _run(case, subject)))
    return backend.apart is None and order.worker.devices == 1


def _open(order: Order, world: models.World) -> Backend:
    name = f"selftest/{world.family}"
    worker = replace(order.worker, model=ModelSpec(name, str(world.folder)))
    return open_backend(worker, world.folder, lambda _stage: None, lambda: None)


def _run(case: Case, subject: Subject) -> Outcome:
    try:
        return run_case(case, subject)
    except Exception as error:  # a fault of the backend is what we look for
        log.exception("case %s", case.name)
        return Outcome(case.name, State.FAILED, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
